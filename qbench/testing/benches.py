"""A sweep that is ready to run, on a small random encoder and texts without labels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qbench.backends import BACKENDS
from qbench.calibration.collect import calibrate
from qbench.graph.layers import find_layers
from qbench.graph.model import TensorSpec
from qbench.records import Layers
from qbench.runtime.ort import open_session, settings_for
from qbench.sensitivity.replay import Replay
from qbench.sensitivity.sweep import Sweep
from qbench.tasks.batches import make_batches
from qbench.tasks.padding import sized_batches
from qbench.tasks.unlabelled import Unlabelled
from qbench.testing.graphs import tiny_encoder

BACKEND = BACKENDS["ort-cpu"]
SETTINGS = settings_for(BACKEND, threads=1)
OUTPUT = "embedding"
#: Inputs of the encoder.
SPECS = tuple(
    TensorSpec(name, "int64", ("batch", "sequence")) for name in ("input_ids", "attention_mask")
)


def made_task(items: int = 24, seed: int = 0) -> Unlabelled:
    """Return random texts of three lengths as an unlabelled task."""
    rng = np.random.default_rng(seed)
    encoded = tuple(
        {"input_ids": rng.integers(1, 99, 4 + 2 * (i % 3)).tolist()} for i in range(items)
    )
    names = tuple(str(i) for i in range(items))
    return Unlabelled(names, tuple((name, None) for name in names), encoded)


def made_sweep(
    items: int = 24, model: ir.Model | None = None, batch: int | None = None
) -> tuple[Sweep, Layers]:
    """Return a sweep, calibrated on its own batches, and the layers of its graph.

    Args:
        items: Texts of its task.
        model: The graph, if it is to be a stored one; ``tiny_encoder`` by default.
        batch: Texts of a batch whose time is measured, if not that of the task's.
    """
    model, task = model or tiny_encoder(), made_task(items)
    layers = find_layers(model)
    batches = make_batches(task.encoded, SPECS, max_tokens=40)
    replay = Replay(model, layers, batches, SETTINGS, OUTPUT)
    found = calibrate(model, layers, batches, lambda graph: open_session(graph, SETTINGS))
    clips = {seen.tensor: seen.absmax for seen in found.ranges if not seen.implicit}
    timed = sized_batches(task.encoded, SPECS, batch, 4) if batch else ()
    return Sweep(replay, task, BACKEND, clips, found.ranges, timed=timed), layers
