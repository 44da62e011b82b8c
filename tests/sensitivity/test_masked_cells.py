"""Cells of fp16 in models whose masks fp16 cannot hold, and in ones that really overflow."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.calibration.collect import calibrate
from qbench.graph.layers import find_layers
from qbench.records import Kind, Status
from qbench.runtime.ort import open_session, settings_for
from qbench.sensitivity.replay import Replay
from qbench.sensitivity.sweep import Sweep
from qbench.tasks.batches import Batch
from qbench.tasks.unlabelled import Unlabelled
from qbench.testing.graphs import Sketch

SETTINGS = settings_for(BACKENDS["ort-cpu"], threads=1)
F, INT = ir.DataType.FLOAT, ir.DataType.INT64


def masked_pool(fill: float, scale: float = 1.0) -> ir.Model:
    """Attention under a mask, then the maximum over what the same mask leaves."""
    s = Sketch(0)
    x, mask = s.input("x", F, ("b", "l", 8)), s.input("attention_mask", INT, ("b", "l"))
    wide = s.op("Cast", s.op("Unsqueeze", mask, s.ints(-1)), to=F)
    bias = s.op("Mul", s.op("Sub", s.number(1.0), wide), s.number(fill))
    q, k, v = (s.linear(x, f"a.{part}", 8, 8) for part in ("query", "key", "value"))
    scores = s.op("MatMul", q, s.op("Transpose", k, perm=[0, 2, 1]), at="a")
    turned = s.op("Transpose", bias, perm=[0, 2, 1])
    weights = s.op("Softmax", s.op("Add", scores, turned, at="a"), at="a", axis=-1)
    y = s.linear(s.op("MatMul", weights, v, at="a"), "a.out", 8, 8)
    y = s.op("Mul", y, s.number(scale))
    y = s.layer_norm(y, "m.norm", 8)
    y = s.op("Add", y, bias, at="m")
    return s.model(y=s.op("ReduceMax", y, s.ints(1), keepdims=0))


def sweep_of(model: ir.Model) -> Sweep:
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    random = np.random.default_rng(0)
    batches = [
        Batch(
            np.arange(3 * i, 3 * i + 3),
            {"x": random.normal(size=(3, 4, 8)).astype(np.float32), "attention_mask": mask},
            12,
            8,
        )
        for i in range(2)
    ]
    layers = find_layers(model)
    replay = Replay(model, layers, batches, SETTINGS, "y")
    ranges = calibrate(model, layers, batches, lambda g: open_session(g, SETTINGS)).ranges
    clips = {seen.tensor: seen.absmax for seen in ranges if not seen.implicit}
    names = tuple("012345")
    task = Unlabelled(names, tuple((n, None) for n in names), ({"input_ids": [1]},) * 6)
    sweep = Sweep(replay, task, BACKENDS["ort-cpu"], clips, ranges)
    sweep.layers = layers.layers
    return sweep


@pytest.mark.parametrize("fill", [-1e12, float(np.finfo(np.float32).min)])
def test_cells_behind_a_mask_that_fp16_cannot_hold_are_fine(fill: float) -> None:
    sweep = sweep_of(masked_pool(fill))
    masked = [layer for layer in sweep.layers if layer.masks]
    assert {layer.kind for layer in masked} == {Kind.SOFTMAX, Kind.RESIDUAL_ADD}
    for layer in sweep.layers:
        record = sweep.measure(layer, "fp16")
        assert record.status is Status.OK, record.reason
        assert record.divergence.value < 1e-4
        assert ("mask constant" in record.reason) == bool(layer.masks)
    sweep.close()


def test_what_really_overflows_stays_invalid() -> None:
    sweep = sweep_of(masked_pool(-1e12, scale=1e3))
    by_kind = {layer.kind: layer for layer in sweep.layers}
    record = sweep.measure(by_kind[Kind.LAYERNORM], "fp16")
    assert record.status is Status.INVALID and "sum_of_squares" in record.reason
    assert sweep.measure(by_kind[Kind.SOFTMAX], "fp16").status is Status.OK
    sweep.close()
