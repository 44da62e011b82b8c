"""Whether a verified plan is worth it at the user's load."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from qbench.backends import BACKENDS
from qbench.judging import record_gain
from qbench.records import BenchRun, BenchSummary, EngineReport, Estimate, Verdict
from qbench.rundir import RunDir
from qbench.workbench import Workbench


def served(low: float, value: float, high: float) -> BenchRun:
    speedup = Estimate(value, low, high, 6)
    summary = BenchSummary("plan", 10, speedup, speedup, 1.0, 1.0, 1.0, {}, {}, 1.0)
    return BenchRun({}, (), (summary,))


def engine(name: str, size: int) -> EngineReport:
    return EngineReport(name, "", "ort-cpu", size, "", {}, {}, {})


@pytest.mark.parametrize(
    ("objective", "speedup", "size", "verdict"),
    [
        ("latency", (1.2, 1.5, 1.8), 50, Verdict.VERIFIED),
        ("latency", (1.2, 1.5, 1.8), 150, Verdict.VERIFIED),
        ("latency", (0.6, 0.7, 0.8), 50, Verdict.NO_GAIN),  # smaller, and shown to be slower
        ("latency", (0.9, 1.1, 1.3), 50, Verdict.NO_GAIN),  # not shown to be faster
        ("balanced", (1.01, 1.1, 1.3), 150, Verdict.VERIFIED),
        ("balanced", (0.8, 0.97, 1.2), 50, Verdict.NO_GAIN),  # smaller, which was not asked for
        ("balanced", (0.8, 0.97, 1.2), 100, Verdict.NO_GAIN),
        ("bytes", (0.6, 0.7, 0.8), 50, Verdict.VERIFIED),
        ("bytes", (1.2, 1.5, 1.8), 100, Verdict.NO_GAIN),
        ("divergence", (0.6, 0.7, 0.8), 50, Verdict.VERIFIED),
        ("divergence", (0.6, 0.7, 0.8), 100, Verdict.NO_GAIN),
    ],
)
def test_gain(
    tmp_path: Path,
    objective: str,
    speedup: tuple[float, float, float],
    size: int,
    verdict: Verdict,
) -> None:
    run = RunDir.create(tmp_path, "run")
    run.write_run({"verdict": str(Verdict.VERIFIED)})
    run.write_engines([engine("reference", 100), engine("plan", size)])
    work = SimpleNamespace(
        run=run,
        backend=BACKENDS["ort-cpu"],
        config=SimpleNamespace(plan=SimpleNamespace(objective=objective, max_latency=None)),
    )
    record_gain(cast(Workbench, cast(Any, work)), served(*speedup))
    facts = run.read_run()
    assert facts["verdict"] == str(verdict)
    if verdict is Verdict.NO_GAIN:
        assert "do not quantize" in facts["verdict_words"]
    run.unlock()
