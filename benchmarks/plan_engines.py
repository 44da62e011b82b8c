"""Engines of a run, whichever runtime serves them: files, outputs, and what times them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from qbench import judging
from qbench.engine.build import ENGINE_FILE
from qbench.gate import require
from qbench.judging import REFERENCE
from qbench.serving.bench import Engine
from qbench.serving.request import Feeds, Run
from qbench.tasks.base import Array
from qbench.tasks.batches import gather_outputs
from qbench.workbench import Workbench

_OPENVINO_FILE = "engine.xml"


def engine_file(work: Workbench, name: str) -> Path:
    """Return where an engine of ONNX Runtime goes, in a folder that is there."""
    return _folder(work, name) / ENGINE_FILE


def openvino_file(work: Workbench, name: str) -> Path:
    """Return where an engine of OpenVINO goes, in a folder that is there."""
    return _folder(work, name) / _OPENVINO_FILE


def _folder(work: Workbench, name: str) -> Path:
    folder = work.run.engine_dir(name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def is_built(work: Workbench, name: str) -> bool:
    """Whether the run has an engine of that name."""
    return judging.engine_path(work, name).is_file() or is_openvino(work, name)


def is_openvino(work: Workbench, name: str) -> bool:
    """Whether OpenVINO serves an engine, not ONNX Runtime."""
    return name != REFERENCE and (work.run.engine_dir(name) / _OPENVINO_FILE).is_file()


def bytes_of(work: Workbench, name: str) -> int:
    """Return the bytes of an engine with its weights."""
    if name == REFERENCE:
        return judging.reference_report(work).bytes
    return sum(file.stat().st_size for file in work.run.engine_dir(name).iterdir())


def serve(work: Workbench, name: str) -> Engine:
    """Return an engine as the timer wants it."""
    if not is_openvino(work, name):
        return judging.serve_with(work, name)
    return Engine(name, lambda threads: open_openvino(work, name, threads))


def outputs_of(work: Workbench, name: str, split: str) -> Array:
    """Return an engine's outputs of all items of a split."""
    if not is_openvino(work, name):
        return judging.outputs_of(work, judging.engine_path(work, name), split)
    run, batches = open_openvino(work, name, work.settings.threads), work.batches(split)
    return gather_outputs(batches, [run(batch.feeds)[work.model.output] for batch in batches])


def open_openvino(work: Workbench, name: str, threads: int) -> Run:
    """Return what runs feeds on an engine of OpenVINO, with so many threads, pinned to no core."""
    openvino = require("openvino")
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
    }
    file = work.run.engine_dir(name) / _OPENVINO_FILE
    request = openvino.Core().compile_model(str(file), "CPU", options).create_infer_request()
    wanted = [spec.name for spec in work.model.inputs]

    def run(feeds: Feeds) -> Mapping[str, np.ndarray]:
        found = request.infer({key: feeds[key] for key in wanted}, share_inputs=True)
        return {work.model.output: found[work.model.output]}

    return run
