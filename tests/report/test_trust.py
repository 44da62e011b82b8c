from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from qbench.records import Noise, RestoredView
from qbench.report.figures import draw_heat_map, draw_ranking, draw_views, spec_of, views_data
from qbench.report.multiplicity import cell_p_values, multiplicity_words
from qbench.report.run_records import RunRecords, load_records
from qbench.report.run_view import Run
from qbench.report.summary import run_summary
from qbench.report.tables import sweep_table
from qbench.report.trust_tables import (
    audit_table,
    audit_words,
    call_words,
    floor_value,
    floor_words,
    noise_table,
    restored_words,
    shown_audit,
    shown_calls,
    shown_noise,
    shown_restored,
    shown_spread,
)
from qbench.report.uncovered import uncovered_words
from qbench.statistics import holm
from qbench.testing.runs import made_run


def test_p_values_are_adjusted_over_the_cells_that_have_one(records: RunRecords) -> None:
    frame = sweep_table(records.sweep)
    ok = frame["status"] == "ok"
    assert frame.loc[ok, ["p", "p_holm", "p_bh"]].notna().all().all()
    assert frame.loc[~ok, ["p", "p_holm", "p_bh"]].isna().all().all()
    np.testing.assert_allclose(frame.loc[ok, "p_holm"], holm(frame.loc[ok, "p"]))
    assert (frame.loc[ok, "p"] <= frame.loc[ok, "p_bh"]).all()
    assert (frame.loc[ok, "p_bh"] <= frame.loc[ok, "p_holm"]).all()


def test_words_count_drops_raw_and_adjusted(records: RunRecords) -> None:
    cells = [r for r in records.sweep if r.drops][:20]
    values = [1e-4, 0.01, 0.04, *([0.5] * 17)]
    cells = [replace(r, p_values={"mrr": p}) for r, p in zip(cells, values, strict=True)]
    words = multiplicity_words(cells, "mrr")
    assert "Of 20 drops of mrr" in words and "3 have p < 0.05" in words
    assert "after Holm 1 remain" in words
    assert multiplicity_words([replace(r, p_values={}) for r in cells], "mrr") == ""
    assert np.isnan(cell_p_values(cells, None)["p"]).all()


def test_the_hover_of_the_heat_map_tells_all_three(specs: dict[str, dict[str, Any]]) -> None:
    text = str(specs["heat_map"])
    assert "p: raw; Holm; Benjamini–Hochberg" in text
    assert "Noise floor, the reference in other batches" in text


def test_a_floor_near_the_layers_is_a_line_and_a_far_one_is_told(records: RunRecords) -> None:
    least = sweep_table(records.sweep)["divergence"].min()
    near = spec_of(draw_ranking(records.sweep, noise_floor=float(least)))
    assert "It is the dashed line." in str(near["title"]) and "strokeDash" in str(near)
    far = spec_of(draw_ranking(records.sweep, noise_floor=float(least) * 1e-6))
    assert "far left of the axis" in str(far["title"]) and "strokeDash" not in str(far)
    none = spec_of(draw_heat_map(records.sweep))
    assert "Noise floor" not in str(none["title"])


def test_the_sweep_has_the_interaction_of_restored_cells(records: RunRecords) -> None:
    view = records.restored
    assert view is not None
    frame = sweep_table(records.sweep, restored=view)
    int8 = (frame["format"] == "int8") & (frame["status"] == "ok")
    assert frame.loc[int8, "interaction"].notna().all()
    assert frame.loc[~int8, "interaction"].isna().all()
    by_layer = {r.layer: r.interaction.value for r in view.records if r.interaction}
    for row in frame[int8].itertuples():
        assert row.interaction == by_layer[row.layer]
        assert row.interaction_low <= row.interaction <= row.interaction_high
    assert sweep_table(records.sweep)["interaction"].isna().all()


def test_both_views_are_drawn_with_the_largest_interactions_named(records: RunRecords) -> None:
    view = records.restored
    assert view is not None
    data = views_data(view)
    assert len(data) == len(view.records)
    named = data[data["label"] != ""]
    assert len(named) <= 8 and named["resolvable"].all()
    assert data["interaction"].abs().is_monotonic_decreasing
    spec = spec_of(draw_views(view))
    assert "one restored" in str(spec["title"])
    empty = RestoredView("int8", 0, view.all_low)
    assert "No layer was measured" in str(spec_of(draw_views(empty)))


def test_words_of_the_restored_view_say_what_adds_up(records: RunRecords) -> None:
    view = records.restored
    assert view is not None
    words = restored_words(replace(view, remarks=("3 of 9 were restored",)))
    assert "add up to" in words and "3 of 9 were restored." in words
    beyond = sum(r.interaction.resolvable for r in view.records if r.interaction)
    assert f"beyond noise for {beyond} of {len(view.records)} layers" in words
    said = {row[4] for row in shown_restored(view).rows}
    assert said <= {"noise", "cheaper in company", "dearer in company"}


def test_noise_is_told_in_tables_and_words(records: RunRecords) -> None:
    noise = records.noise
    assert noise is not None
    assert floor_value(noise) == max(
        f.divergence.value for f in noise.floors if f.what == "reference"
    )
    assert len(noise_table(noise)) == len(shown_noise(noise).rows) == 6
    assert len(shown_spread(noise).rows) == 3 and "4 halves" in shown_spread(noise).caption
    words = floor_words(noise)
    assert "the reference in other batches" in words and "all in int8_dynamic" in words
    assert floor_words(None) == "" and floor_value(Noise()) is None
    assert "Noise: the spread covers 3 of 5 <cells>." in uncovered_words(records)


def test_layers_are_called_sensitive_by_both_halves_only(records: RunRecords) -> None:
    noise = records.noise
    assert noise is not None
    words = call_words(noise)
    assert words[-1] == "No layer is called sensitive that the second draw does not call so."
    called = [c for c in noise.calls if c.sensitive]
    for call in called:
        assert any(call.format in w and call.layer in w for w in words) or len(called) > 6
    said = shown_calls(noise)
    assert len(said.marked) == len(called)
    assert call_words(None) == []


def test_the_audit_says_what_may_stand_alone(records: RunRecords) -> None:
    audit = records.audit
    assert audit is not None
    frame = audit_table(audit)
    assert set(frame["format"]) >= {"all", "int8"}
    shown = shown_audit(audit)
    assert len(shown.rows) == len(frame)
    words = audit_words(audit)
    assert any(w.startswith("Weight MSE may not be used alone") for w in words)
    assert any("skipped: the source is an <ONNX> file" in w for w in words)
    assert not any("other half" in w for w in words)


def test_page_and_console_tell_it(records: RunRecords, page: str) -> None:
    section = page.partition('<section id="trust">')[2].partition("</section>")[0]
    assert "Noise floor" in section and 'data-figure="views"' in section
    assert "Rank correlation of each proxy" in section and "<ONNX>" not in section
    assert "drops of mrr" in page and "second draw" in page
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(run_summary(records))
    text = re.sub(r"\s+", " ", console.export_text())
    assert "No layer is called sensitive that the second draw does not call so." in text
    assert "after Holm" in text and "Noise floor" in text


@pytest.mark.parametrize("name", ["noise", "restored", "audit"])
def test_a_run_gives_each_table(tmp_path: Any, name: str) -> None:
    rundir = made_run(tmp_path, blocks=1, n=24)
    run = Run(rundir)
    assert len(getattr(run, name))
    assert run.sweep["interaction"].notna().any()
    records = load_records(rundir)
    assert getattr(records, name) == getattr(rundir, f"read_{name}")()
    (rundir.path / f"{name}.json").unlink()
    absent = load_records(rundir)
    assert getattr(absent, name) is None
    assert ("noise" in absent.missing) == (name == "noise")
