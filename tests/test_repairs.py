"""Models where the whole is not the sum of its parts: repaired, or said to be beyond repair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from qbench.config import make_config
from qbench.pipeline import build_engine, calibrate, make_plan, start, sweep
from qbench.records import Verdict
from qbench.testing.models import pairs_csv
from qbench.testing.planted import planted_folder
from qbench.workbench import Workbench


def begun(place: Path, run_id: str, **overrides: Any) -> Workbench:
    config = make_config(
        {
            "model": {
                "source": str(place / "model" / "model.onnx"),
                "tokenizer": str(place / "model"),
            },
            "data": {
                "source": str(place / "pairs.csv"),
                "columns": {"query": "question", "answer": "reply"},
                "splits": {"calibration": 16, "sweep": 60, "verification": "rest"},
                "prepared": str(place / "calib_data"),
            },
            "task": {"kind": "retrieval"},
            "sweep": {"formats": ["int8"], "exclude": ["copy.*"], "remedies": 0},
            "plan": {"max_drop": "20 %", "levels": 3, "objective": "bytes", "rounds": 4},
            "bench": {"clients": 2, "rounds": 2, "seconds": 0.1},
            "run": {"results": str(place / "results"), "id": run_id, "threads": 1},
        },
        overrides,
    )
    work = start(config)
    calibrate(work)
    for _ in sweep(work):
        pass
    return work


@pytest.fixture
def place(tmp_path: Path) -> Path:
    pairs_csv(tmp_path / "pairs.csv", rows=200)
    return tmp_path


def test_two_layers_that_break_together_are_found_and_taken_apart(place: Path) -> None:
    planted_folder(place / "model")
    work = begun(place, "pair")
    cells = {r.layer: r for r in work.run.read_sweep() if r.divergence is not None}
    assert all(r.divergence is not None and r.divergence.value < 1e-2 for r in cells.values())
    plan = make_plan(work)
    facts = work.run.read_run()
    assert facts["verdict"] == Verdict.VERIFIED, facts["verdict_words"]
    formats = plan.formats()
    assert {formats["gate.a"], formats["gate.b"]} == {"fp32", "int8"}
    assert sum(form == "int8" for form in formats.values()) == len(cells) - 1
    written = yaml.safe_load(work.run.plan_path.read_text())["history"]
    rounds = [entry for entry in written if "round" in entry]
    assert rounds and rounds[-1]["step"] == "kept"
    pairs = [term for entry in rounds for term in entry["interactions"]]
    assert {"gate.a int8", "gate.b int8"} in [set(pair["cells"]) for pair in pairs]
    work.run.unlock()


def test_where_every_engine_breaks_it_is_said(place: Path) -> None:
    planted_folder(place / "model", every=True, gain=3e4)
    work = begun(place, "none", **{"plan.rounds": 1})
    plan = make_plan(work)
    facts = work.run.read_run()
    assert facts["verdict"] in (Verdict.BUDGET_UNREACHABLE, Verdict.NOT_RESOLVABLE), facts
    assert set(plan.formats().values()) == {"fp32"}
    work.run.unlock()


def test_limits_are_kept_by_what_is_built(place: Path) -> None:
    planted_folder(place / "model")
    limits = {"plan.objective": "divergence", "plan.max_bytes": "40K", "plan.levels": 2}
    work = begun(place, "small", **limits, **{"plan.keep": ["dense.0"]})
    plan = make_plan(work)
    facts = work.run.read_run()
    assert facts["verdict"] == Verdict.VERIFIED, facts["verdict_words"]
    row = next(row for row in work.run.read_front() if row["chosen"])
    assert row["bytes"] <= 40_000 and plan.formats()["dense.0"] == "fp32"
    assert build_engine(work).bytes == row["bytes"]
    work.run.unlock()
    bits = {"plan.objective": "divergence", "plan.max_bits": 20.0, "plan.levels": 1}
    work = Workbench.reopen(work.run.path, {**bits, "plan.max_bytes": None, "plan.keep": []})
    plan = make_plan(work)
    assert plan.predicted["mean_bits"] <= 20 < plan.predicted["mean_bits_with_scales"] + 3
    work.run.unlock()
    work = Workbench.reopen(work.run.path, {"plan.max_bits": None, "plan.max_latency": "0.1 %"})
    assert set(make_plan(work).formats().values()) == {"fp32"}
    facts = work.run.read_run()
    assert facts["verdict"] == Verdict.BUDGET_UNREACHABLE and "reachable" in facts["verdict_words"]
    work.run.unlock()
