from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.calibration.collect import calibrate
from qbench.calibration.searched import cut_off
from qbench.graph.layers import find_layers
from qbench.lowering.smooth import product_weight
from qbench.records import Cause, CauseName, Kind, Status
from qbench.runtime.ort import open_session, settings_for
from qbench.sensitivity.causes import Clipping, Evidence, find_causes, weight_facts
from qbench.sensitivity.replay import Replay
from qbench.sensitivity.sweep import Sweep
from qbench.tasks.batches import Batch
from qbench.tasks.unlabelled import Unlabelled
from qbench.testing.graphs import Sketch

BACKEND = BACKENDS["ort-cpu"]
SETTINGS = settings_for(BACKEND, threads=1)
WIDTH, BRANCHES, ITEMS = 128, 6, 24
PLANTED = 2


def bank(planted: str = "") -> ir.Model:
    """Six linear layers side by side, one of which has the trouble that is named."""
    s = Sketch(0)
    rng = np.random.default_rng(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", WIDTH))
    total = x
    for index in range(BRANCHES):
        own = planted if index == PLANTED else ""
        at = f"m.branch.{index}"
        h = s.layer_norm(x, f"{at}.norm", WIDTH)
        weight = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
        if own == "channels":
            push = np.ones(WIDTH, np.float32)
            push[7] = 60
            h = s.op("Mul", h, s.constant(f"{at}.push", push), at=at)
            weight[7] /= 60
        if own == "weights":
            rows, columns = rng.integers(0, WIDTH, (2, 40))
            weight[rows, columns] *= 25
        if own == "overflow":
            h = s.op("Mul", h, s.number(1e5), at=at)
            weight /= 1e5
        y = s.op("MatMul", h, s.constant(f"{at}.lin.weight", weight), at=f"{at}.lin")
        gain = 20.0 if own == "amplified" else 0.3
        total = s.op("Add", total, s.op("Mul", y, s.number(gain), at=at), at=at)
    return s.model(y=total)


def causes_of(planted: str, formats: tuple[str, ...], cut: float = 1.0) -> tuple[Cause, ...]:
    """Sweep the bank and look for causes; ``cut`` is the planted layer's clip over its absmax."""
    model = bank(planted)
    values = np.random.default_rng(1).normal(size=(ITEMS, WIDTH)).astype(np.float32)
    batches = [Batch(np.arange(ITEMS), {"x": values}, ITEMS, ITEMS)]
    names = tuple(map(str, range(ITEMS)))
    task = Unlabelled(names, tuple((n, None) for n in names), ({"input_ids": [1]},) * ITEMS)
    layers = find_layers(model)
    found = calibrate(model, layers, batches, lambda graph: open_session(graph, SETTINGS))
    clips = {seen.tensor: seen.absmax for seen in found.ranges if not seen.implicit}
    linear = [layer for layer in layers.layers if layer.kind is Kind.LINEAR]
    target = linear[PLANTED].edges[0].tensor
    clipping: Mapping[str, Clipping] = {}
    if cut < 1:
        top, clips[target] = clips[target], clips[target] * cut
        clipping = {
            target: Clipping(clips[target], *cut_off(found.histograms[target], top, clips[target]))
        }
    replay = Replay(model, layers, batches, SETTINGS, "y")
    sweep = Sweep(replay, task, BACKEND, clips, found.ranges)
    records = [sweep.measure(layer, form) for layer in linear for form in formats]
    assert all(r.status in (Status.OK, Status.INVALID) for r in records), records
    weights = {}
    for layer in linear:
        weight = product_weight(model, layer)
        assert not isinstance(weight, str)
        weights[layer.name] = weight_facts(layer.name, weight)
    sweep.close()
    by_tensor = {seen.tensor: seen for seen in found.ranges}
    return find_causes(records, Evidence(layers.layers, by_tensor, weights, clipping))


def test_a_healthy_model_has_no_cause() -> None:
    assert causes_of("", ("fp16", "int8", "int8_dynamic", "w8a16", "w4a16")) == ()


@pytest.mark.parametrize(
    ("planted", "form", "cut", "name", "words"),
    [
        ("channels", "int8", 1.0, CauseName.OUTLIER_CHANNELS, "1 stand out"),
        ("channels", "int8_dynamic", 1.0, CauseName.OUTLIER_CHANNELS, "of 128 input channels"),
        ("", "int8", 0.3, CauseName.CLIPPED_RANGE, "of the elements are cut"),
        ("weights", "w4a16", 1.0, CauseName.WEIGHT_OUTLIERS, "is typical"),
        ("overflow", "fp16", 1.0, CauseName.FP16_OVERFLOW, "fp16 ends at 65504"),
        ("amplified", "int8", 1.0, CauseName.AMPLIFICATION, "as much as elsewhere"),
        ("amplified", "w4a16", 1.0, CauseName.AMPLIFICATION, "no larger than usual"),
    ],
)
def test_a_planted_trouble_is_recognised(
    planted: str, form: str, cut: float, name: CauseName, words: str
) -> None:
    found = causes_of(planted, (form,), cut)
    assert found and {(c.layer, c.cause) for c in found} == {(f"m.branch.{PLANTED}.lin", name)}
    assert words in found[0].evidence and found[0].strength >= 1


def test_the_typical_peak_is_that_of_a_normal_weight() -> None:
    weight = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
    facts = weight_facts("x", weight)
    assert facts.peak == pytest.approx(facts.typical_peak, rel=0.05)
    assert abs(facts.kurtosis) < 0.1
    zero = weight_facts("x", np.zeros((24, 3), np.float32))
    assert (zero.peak, zero.kurtosis, zero.absmax) == (0, 0, 0)
