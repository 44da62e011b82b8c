"""Remedies in a plan file: written, read, hashed, and what is said of a wrong one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qbench.errors import PlanError
from qbench.planning.costs import cell_costs
from qbench.planning.planfile import plan_sha256, read_plan, write_plan
from qbench.planning.reasons import with_treatment
from qbench.records import (
    Estimate,
    Kind,
    Layer,
    Layers,
    Plan,
    PlanLayer,
    Status,
    SweepRecord,
    Treatment,
)
from qbench.records.packed import pack

SCALE = Treatment("smoothquant:0.5", {"m.a/in": 1.5}, {"scale": pack(np.linspace(0.5, 2, 16))})
BLOCKS = Treatment("awq:0.3,clip", {}, {"importance": pack(np.linspace(0.1, 1, 16))}, 32)


def plan(form: str = "int8", treatment: Treatment | None = SCALE) -> Plan:
    row = PlanLayer("m.a", Kind.LINEAR, form, "int8: least", 0.1, {"m.a/in": 3.0})
    return Plan(1, "ort-cpu", "here", "0" * 64, (replace(row, treatment=treatment),))


@pytest.mark.parametrize(("form", "own"), [("int8", SCALE), ("w4a16", BLOCKS), ("int8", None)])
def test_a_treatment_is_read_as_it_was_written(
    tmp_path: Path, form: str, own: Treatment | None
) -> None:
    written = plan(form, own)
    write_plan(written, tmp_path / "plan.yaml")
    found = read_plan(tmp_path / "plan.yaml")
    assert found.layers == written.layers and plan_sha256(found) == plan_sha256(written)
    assert ("treatment:" in (tmp_path / "plan.yaml").read_text().split("version")[1]) is (
        own is not None
    )


def test_what_a_treatment_holds_is_in_the_hash() -> None:
    seen = {
        plan_sha256(plan("int8", own))
        for own in (
            None,
            SCALE,
            replace(SCALE, clips={"m.a/in": 1.25}),
            replace(SCALE, vectors={"scale": pack(np.linspace(0.5, 3, 16))}),
            Treatment("mse", {"m.a/in": 1.5}),
        )
    }
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (("smoothquant:0.5", "smoothqant:0.5"), "did you mean 'smoothquant'"),
        (("variant: ", "varant: "), "unknown key 'varant'"),
        (("1.5", "-1.5"), "got -1.5"),
    ],
)
def test_a_wrong_edit_is_told(tmp_path: Path, edit: tuple[str, str], words: str) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(plan(), path)
    text = path.read_text()
    assert edit[0] in text
    path.write_text(text.replace(*edit))
    with pytest.raises(PlanError) as told:
        read_plan(path)
    assert words in str(told.value)


def test_with_another_format_a_treatment_does_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(plan(), path)
    path.write_text(path.read_text().replace("format: int8", "format: w8a16"))
    edited = read_plan(path)
    assert edited.layers[0].treatment == SCALE
    assert plan_sha256(edited) == plan_sha256(plan("w8a16", None))


def test_a_reason_names_the_remedy() -> None:
    row = plan(treatment=None).layers[0]
    assert with_treatment(row, None) is row
    assert "with smoothquant:0.5" in with_treatment(row, SCALE).reason


def test_the_time_of_a_remedy_is_not_pooled_with_plain_cells() -> None:
    layers = Layers(
        tuple(Layer(f"l{i}", Kind.LINEAR, (), weight_shape=(8, 8)) for i in range(5)), ()
    )
    records = [
        SweepRecord(
            f"l{i}",
            Kind.LINEAR,
            "int8",
            Status.OK,
            latency_delta_ms=Estimate(value, value - 0.1, value + 0.1, 5),
            treatment=SCALE if i == 0 else None,
        )
        for i, value in enumerate((2.0, -1.0, -1.0, -1.0, -1.0))
    ]
    costs = {cost.layer: cost.seconds for cost in cell_costs(records, layers)}
    assert costs["l0"] == pytest.approx(2e-3) and costs["l1"] == pytest.approx(-1e-3)
