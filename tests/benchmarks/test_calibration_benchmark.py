"""The memory benchmark: it measures a process of its own, and draws what it measured."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "calibration_memory.py"


@pytest.fixture(scope="module")
def memory() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calibration_memory", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_child_measures_its_own_peak(
    memory: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = np.ones(40_000_000)  # 320 MB that a child must not be charged with
    figure = tmp_path / "memory.svg"
    memory.main(["--samples", "16", "--json", "--figure", str(figure)])
    said = json.loads(capsys.readouterr().out)
    (row,) = said["rows"]
    assert row["samples"] == 16 and row["ranges"] > 50 and said["peak_growth"] == 1.0
    own = memory.peak_mib()
    assert 0 < row["before_mib"] <= row["peak_mib"] < own - weight.nbytes / 2**21
    assert figure.read_text(encoding="utf-8").startswith("<svg")


def test_the_figure_shows_both_parts(memory: ModuleType) -> None:
    rows = [memory.Row(64, 9, 240.0, 150.0, 1.0), memory.Row(4096, 9, 246.0, 150.0, 60.0)]
    data = memory.memory_data(rows)
    assert len(data) == 4 and set(data["what"]) == {"peak", "before the first text"}
    assert "peaks from 240 to 246 MiB" in json.dumps(memory.draw_memory(rows).to_dict())
