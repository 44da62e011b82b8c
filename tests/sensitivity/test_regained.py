"""Cells in fp32 over an fp16 base: what they give back of what fp16 lost."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.calibration.collect import calibrate
from qbench.engine.build import lower_graph
from qbench.graph.layers import find_layers
from qbench.lowering.overflow import find_overflow, keep_overflowing
from qbench.records import Kind, Plan, PlanLayer, Status
from qbench.runtime.ort import open_session, settings_for
from qbench.runtime.passes import run_batches
from qbench.sensitivity.replay import Replay
from qbench.sensitivity.sweep import Sweep
from qbench.tasks.batches import make_batches
from qbench.testing.benches import OUTPUT, SPECS, made_task
from qbench.testing.graphs import tiny_encoder

BACKEND = BACKENDS["tensorrt"]
SETTINGS = settings_for(BACKEND, threads=1)


def scaled(model: ir.Model, name: str, factor: float) -> None:
    layer = next(x for x in find_layers(model).layers if x.name.endswith(name))
    value = model.graph.initializers[layer.weight]
    value.const_value = ir.tensor(value.const_value.numpy() * np.float32(factor), name=value.name)


@pytest.fixture(scope="module")
def swept():
    """An encoder with one feed-forward that fp16 cannot hold, and one layer whose weights are a
    few of fp16's least steps."""
    model = tiny_encoder()
    scaled(model, "layer.0.intermediate.dense", 3e4)
    scaled(model, "layer.0.output.dense", 1 / 3e4)
    scaled(model, "layer.1.intermediate.dense", 4e3)
    scaled(model, "layer.1.output.dense", 8e-7)
    layers, task = find_layers(model), made_task(60)
    batches = make_batches(task.encoded, SPECS, max_tokens=80)
    ranges = calibrate(model, layers, batches, lambda graph: open_session(graph, SETTINGS)).ranges
    clips = {seen.tensor: seen.absmax for seen in ranges if not seen.implicit}
    graph = keep_overflowing(model, layers, ranges, BACKEND)
    replay = Replay(graph, layers, batches, SETTINGS, OUTPUT)
    sweep = Sweep(replay, task, BACKEND, clips, ranges)
    yield model, layers, ranges, sweep
    sweep.close()


def test_the_base_holds_what_overflows_in_fp32(swept) -> None:
    model, layers, ranges, sweep = swept
    kept = find_overflow(model, layers, ranges)
    assert {x.split(".", 3)[-1] for x in kept} >= {"intermediate.dense", "output.dense"}
    assert np.isfinite(sweep.reference.outputs).all()
    rows = tuple(
        PlanLayer(x.name, x.kind, "fp32" if x.name in kept else "fp16") for x in layers.layers
    )
    whole = lower_graph(model, layers, Plan(1, BACKEND.name, "", "0" * 64, rows))
    with open_session(whole, SETTINGS) as session:
        outputs = run_batches(session, sweep.bench.replay.batches, OUTPUT)
    np.testing.assert_allclose(sweep.reference.outputs, outputs, atol=5e-3)


def test_a_layer_that_is_kept_takes_no_other_format(swept) -> None:
    model, layers, ranges, sweep = swept
    kept = find_overflow(model, layers, ranges)
    hot = next(x for x in layers.layers if x.name in kept and x.kind is Kind.LINEAR)
    for form in ("int8", "w4a16", "fp16"):
        record = sweep.measure(hot, form)
        assert record.status is Status.INVALID and "fp16 overflows" in record.reason
        assert "kept in fp32" in record.remedy
    own = sweep.measure(hot, "fp32")
    assert own.status is Status.NOT_APPLICABLE and "kept in fp32 as it is" in own.reason


def test_a_cell_in_fp32_says_what_it_gives_back(swept) -> None:
    _, layers, _, sweep = swept
    coarse = next(x for x in layers.layers if x.name.endswith("layer.1.output.dense"))
    record = sweep.measure(coarse, "fp32")
    assert record.status is Status.OK and record.emulated and record.divergence.value > 0
    assert record.weight_bytes == coarse.weight_bytes
    bench = sweep.bench
    truth = bench.truth.outputs(bench.replay)
    before = bench.task.divergence(truth, bench.reference.outputs).mean()
    assert 0 < record.regained.low <= record.regained.value <= before
    assert record.regained.value > 0.3 * before
    assert "off the divergence from the model in fp32" in record.reason


def test_a_layer_that_fp16_does_not_hurt_gives_nothing_back(swept) -> None:
    _, layers, _, sweep = swept
    norm = next(x for x in layers.layers if x.kind is Kind.LAYERNORM)
    record = sweep.measure(norm, "fp32")
    assert record.status is Status.OK
    coarse = next(x for x in layers.layers if x.name.endswith("layer.1.output.dense"))
    assert abs(record.regained.value) < 0.3 * sweep.measure(coarse, "fp32").regained.value


def test_keys_and_values_are_no_layer_of_their_own(swept) -> None:
    _, layers, _, sweep = swept
    cache = next(x for x in layers.layers if x.kind is Kind.KV)
    record = sweep.measure(cache, "fp32")
    assert record.status is Status.NOT_APPLICABLE and "computes nothing" in record.reason
