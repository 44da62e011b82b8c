"""Backends that are not here: one clear error before anything is done, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qbench.backends import BACKENDS
from qbench.cli.main import run_command_line
from qbench.config import make_config
from qbench.errors import MissingDependencyError
from qbench.runtime.ort import open_session, settings_for
from qbench.runtime.presence import check_present, present_backends, why_absent
from qbench.testing.graphs import tiny_encoder

CUDA = BACKENDS["ort-cuda"]
IDS = np.arange(1, 9, dtype=np.int64).reshape(2, 4)
FEEDS = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
no_cuda = pytest.mark.skipif(not why_absent(CUDA), reason="ONNX Runtime runs on a GPU here")


@pytest.mark.parametrize("name", ["ort-cpu", "tensorrt", "tensorrt-rtx"])
def test_what_runs_on_a_cpu_is_here(name: str) -> None:
    check_present(BACKENDS[name])
    assert name in present_backends()


@no_cuda
def test_what_is_not_here_is_told_with_what_was_found_and_what_to_install() -> None:
    with pytest.raises(MissingDependencyError) as caught:
        check_present(CUDA)
    told = str(caught.value)
    for words in ("CUDAExecutionProvider", "offers", "CPUExecutionProvider", "qbench[gpu]"):
        assert words in told
    assert told.endswith("ort-cpu, tensorrt, tensorrt-rtx") and caught.value.exit_code == 2
    assert "ort-cuda" not in present_backends()


@no_cuda
@pytest.mark.parametrize("verb", ["plan", "build", "verify", "bench", "resume"])
def test_a_run_of_a_backend_that_is_not_here_stays_as_it_is(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(
        {
            "model": {"source": "model"},
            "data": {"source": "pairs.csv"},
            "task": {"kind": "retrieval"},
            "plan": {"backend": "ort-cuda"},
        }
    )
    run = tmp_path / "run"
    run.mkdir()
    facts = {"qbench": 1, "config": config.model_dump(mode="json")}
    (run / "run.json").write_text(json.dumps(facts))
    assert run_command_line([verb, str(run)]) == 2
    told = capsys.readouterr().err
    assert "backend ort-cuda is not installed" in told and "qbench[gpu]" in told, told
    assert [p.name for p in run.iterdir()] == ["run.json"]
    assert json.loads((run / "run.json").read_text()) == facts


@pytest.mark.skipif(bool(why_absent(CUDA)), reason="ONNX Runtime has no CUDA here")
def test_a_session_really_runs_on_the_gpu() -> None:
    model = tiny_encoder()
    with open_session(model, settings_for(CUDA, 1)) as session:
        assert session.provider == "CUDAExecutionProvider"
        found = session.run(FEEDS)["embedding"]
    with open_session(model, settings_for(BACKENDS["ort-cpu"], 1)) as session:
        np.testing.assert_allclose(found, session.run(FEEDS)["embedding"], atol=1e-4)
