"""Peak memory grows with the model once, not several times: a small model of the same make."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "large_model.py"
#: Megabytes of the program itself, its libraries and what it knows of a run.
PROGRAM_MB = 300.0


@pytest.fixture(scope="module")
def large() -> ModuleType:
    spec = importlib.util.spec_from_file_location("large_model_benchmark", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_weights_are_written_piece_by_piece(large: ModuleType, tmp_path: Path) -> None:
    path = large.write_model(tmp_path, 0.02, 256)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert 0.015e9 < size < 0.025e9
    assert path.stat().st_size < 1e6
    tokenizer, data = large.write_texts(tmp_path)
    assert len(json.loads(tokenizer.read_text())["model"]["vocab"]) == large.WORDS
    assert len(data.read_text().splitlines()) == large.TEXTS + 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peaks")
def test_a_model_is_in_memory_little_more_than_once(
    large: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large, "INCLUDE", ("encoder.layer.1.output.dense",))
    monkeypatch.setattr(large, "FORMATS", ("int8", "w4a16"))
    ran, size = large.measure(tmp_path, 0.2, 1024)
    assert [item.command for item in ran] == ["sweep", "plan", "build"]
    assert not any(item.exit_code for item in ran), [item.said for item in ran]
    peaks = {item.command: (item.peak_mb - PROGRAM_MB) / (size / 1e6) for item in ran}
    assert peaks["sweep"] < 2.6, ran[0].stages
    assert peaks["build"] < 2.2, ran[2].stages
    assert peaks["plan"] < 4.2, ran[1].stages  # two small engines are timed beside the reference
