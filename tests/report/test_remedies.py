from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from qbench.records import Cause, CauseName, Estimate, Status, Treatment
from qbench.report.page import render_page
from qbench.report.remedy_tables import (
    cause_words,
    causes_table,
    remedies_table,
    remedy_words,
    strongest_causes,
)
from qbench.report.run_records import RunRecords
from qbench.report.summary import run_summary


@pytest.fixture
def tried(records: RunRecords) -> RunRecords:
    """A run whose worst int8 cell was tried with two remedies, and whose plan takes one."""
    cell = max(
        (r for r in records.sweep if r.format == "int8" and r.status is Status.OK),
        key=lambda r: r.divergence.value,
    )
    half = tuple(value / 4 for value in cell.samples["divergence"])
    mean = sum(half) / len(half)
    good = replace(
        cell,
        treatment=Treatment("smoothquant:0.5", {"x": 1.0}, {"scale": "AAA="}),
        samples={**cell.samples, "divergence": half},
        divergence=Estimate(mean, mean / 2, mean * 2, len(half)),
    )
    same = replace(cell, treatment=Treatment("mse", {"x": 1.0}))
    none = replace(
        cell, treatment=Treatment("entropy"), status=Status.NOT_APPLICABLE, divergence=None
    )
    rows = tuple(
        replace(row, format="int8", treatment=good.treatment) if row.name == cell.layer else row
        for row in records.plan.layers
    )
    causes = (
        Cause(cell.layer, "int8", CauseName.OUTLIER_CHANNELS, "16 times", 2.0),
        Cause(cell.layer, "int8", CauseName.AMPLIFICATION, "40 times", 4.0),
    )
    plan = replace(records.plan, layers=rows)
    return replace(records, remedies=(good, same, none), causes=causes, plan=plan)


def test_remedies_stand_beside_the_plain_cell(tried: RunRecords) -> None:
    frame = remedies_table(tried.sweep, tried.remedies, tried.plan)
    assert list(frame["remedy"]) == ["smoothquant:0.5", "mse", "entropy"]
    assert list(frame["better"]) == [True, False, False]
    assert list(frame["best"]) == [True, False, False]
    assert list(frame["planned"]) == [True, False, False]
    assert frame["gain"][0] == pytest.approx(3 * frame["divergence"][0], rel=1e-6)
    assert frame["gain"][1] == 0 and frame["gain"].isna()[2]


def test_causes_are_told_strongest_first(tried: RunRecords) -> None:
    assert list(causes_table(tried.causes)["cause"]) == [c.cause for c in tried.causes]
    layer = tried.causes[0].layer
    assert strongest_causes(tried.causes) == {(layer, "int8"): "amplification downstream"}
    assert "outlier channels" in cause_words(tried.causes) and cause_words(()) == ""


def test_page_and_summary_tell_both(tried: RunRecords, records: RunRecords) -> None:
    words = remedy_words(tried.sweep, tried.remedies, tried.plan)
    assert words.startswith("2 remedies were tried on 1 cells: 1 do better")
    assert "The plan uses 1 smoothquant:0.5." in words
    html = render_page(tried)
    assert words.split(":")[0] in html and "16 times" in html and "smoothquant:0.5" in html
    console = Console(width=200, record=True)
    console.print(run_summary(tried))
    assert "Why layers suffer." in console.export_text()
    assert remedy_words(records.sweep, ()) == ""
    assert "Every remedy that was tried" not in render_page(records)
