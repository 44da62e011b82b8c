from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.calibration.collect import calibrate
from qbench.graph.layers import find_layers
from qbench.lowering import LOWERINGS, Change, lowering_for
from qbench.records import Kind, Status, SweepRecord, from_dict, to_dict
from qbench.runtime.ort import open_session, settings_for
from qbench.sensitivity.cells import spread_batches
from qbench.sensitivity.replay import Replay
from qbench.sensitivity.sweep import Sweep
from qbench.tasks.batches import Batch
from qbench.tasks.unlabelled import Unlabelled
from qbench.testing.graphs import Sketch, anonymise, decompose, tiny_encoder

BACKEND = BACKENDS["ort-cpu"]
SETTINGS = settings_for(BACKEND, threads=1)
F = ir.DataType.FLOAT


def task_of(items: int) -> Unlabelled:
    names = tuple(str(i) for i in range(items))
    return Unlabelled(names, tuple((n, None) for n in names), ({"input_ids": [1]},) * items)


def made_sweep(model, output, feeds, clips=None, ranges=None) -> Sweep:
    """A sweep of a graph on a few batches; calibrated on them unless told otherwise."""
    batches, start = [], 0
    for feed in feeds:
        size = len(next(iter(feed.values())))
        batches.append(Batch(np.arange(start, start + size), feed, size, size))
        start += size
    layers = find_layers(model)
    replay = Replay(model, layers, batches, SETTINGS, output)
    if ranges is None:
        found = calibrate(model, layers, batches, lambda graph: open_session(graph, SETTINGS))
        ranges = found.ranges
    if clips is None:
        clips = {seen.tensor: max(seen.absmax, 1e-6) for seen in ranges if not seen.implicit}
    sweep = Sweep(replay, task_of(start), BACKEND, clips, ranges)
    sweep.layers = layers.layers
    return sweep


def tokens(count: int = 3) -> list[dict[str, np.ndarray]]:
    feeds = []
    for seed in range(count):
        ids = np.random.default_rng(seed).integers(1, 99, (4, 4 + seed))
        feeds.append({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    return feeds


def dense(scale: float = 1.0, seed: int = 0) -> tuple[ir.Model, list[dict[str, np.ndarray]]]:
    s = Sketch(seed)
    x = s.input("x", F, ("batch", "sequence", 16))
    wide = s.op("Mul", x, s.number(scale))
    h = s.op("MatMul", wide, s.constant("w", np.full((16, 16), scale, np.float32)), at="m.lin")
    h = s.layer_norm(h, "m.norm", 16)
    y = s.op("ReduceMean", s.linear(h, "m.head", 16, 8), s.ints(1), keepdims=0)
    random = np.random.default_rng(1)
    feeds = [{"x": random.uniform(0.5, 1, size=(3, 4, 16)).astype(np.float32)} for _ in range(2)]
    return s.model(y=y), feeds


@pytest.fixture(scope="module")
def encoder():
    sweep = made_sweep(tiny_encoder(), "embedding", tokens())
    yield sweep
    sweep.close()


def test_every_cell_is_a_record(encoder) -> None:
    for layer in encoder.layers:
        for name in ("fp32", "fp16", "bf16", "int8", "int8_dynamic", "w8a16", "w4a16", "fp8"):
            record = encoder.measure(layer, name)
            assert (record.layer, record.kind, record.format) == (layer.name, layer.kind, name)
            assert from_dict(SweepRecord, to_dict(record)) == record
            if record.status is not Status.OK:
                assert record.status in (Status.NOT_APPLICABLE, Status.NOT_YET), record.reason
                assert record.reason and record.divergence is None
                continue
            assert record.n == 12 and record.wall_s > 0
            assert record.divergence.value >= 0 and len(record.samples["divergence"]) == 12
            assert 10 < record.sqnr_db <= 300 and 0.9 < record.cosine <= 1
            assert record.latency_delta_ms.n == 3 and math.isfinite(record.latency_delta_ms.value)
            matrix = layer.kind in (Kind.LINEAR, Kind.EMBEDDING)
            assert record.emulated == (name in ("fp16", "bf16", "fp8") or not matrix)
            assert record.weight_bytes > 0 or layer.weight == ""


def test_fewer_bits_err_more(encoder) -> None:
    layer = next(x for x in encoder.layers if x.kind is Kind.LINEAR)
    decibels = [encoder.measure(layer, name).sqnr_db for name in ("fp16", "w8a16", "w4a16")]
    assert decibels == sorted(decibels, reverse=True)
    assert decibels[0] > 60 and decibels[1] > 35 and decibels[2] > 12


def test_the_block_that_divides_is_told(encoder) -> None:
    layer = next(x for x in encoder.layers if x.kind is Kind.LINEAR)
    assert "block 32" in encoder.measure(layer, "w4a16").reason


class Broken:
    """A lowering that fails in a way of its own."""

    format = lowering_for("int8").format

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def requires(self, model, layer):
        return None

    def ensures(self, model, layer):
        return "something is missing" if self.fault == "ensures" else None

    def apply(self, model, layer, clips):
        if self.fault == "apply":
            raise TypeError("operand of a strange type")
        node = next((n for n in model.graph if n.name in layer.nodes), None)
        if self.fault == "nothing" or node is None:
            return Change(False)
        if self.fault == "load":
            node.op_type = "NoSuchOperator"
        if self.fault == "run":
            bad = Sketch(0).constant("bad", np.ones((3, 5), np.float32))
            model.graph.register_initializer(ir.val("bad_w", const_value=bad.const_value))
            node.replace_input_with(1, model.graph.initializers["bad_w"])
        return Change(True)


@pytest.mark.parametrize(
    "fault, words",
    [
        ("apply", "TypeError: operand of a strange type"),
        ("load", "NoSuchOperator"),
        ("run", "MeasurementError"),
        ("ensures", "something is missing"),
        ("nothing", "changed nothing"),
    ],
)
def test_a_cell_that_fails_is_a_record(encoder, monkeypatch, fault: str, words: str) -> None:
    monkeypatch.setitem(LOWERINGS, "int8", Broken(fault))
    layer = next(x for x in encoder.layers if x.kind is Kind.LINEAR)
    record = encoder.measure(layer, "int8")
    assert record.status is Status.FAILED and words in record.reason and record.remedy
    assert record.divergence is None and record.sqnr_db is None
    monkeypatch.undo()
    assert encoder.measure(layer, "int8").status is Status.OK


def test_a_missing_range_is_named() -> None:
    sweep = made_sweep(tiny_encoder(layers=1), "embedding", tokens(1), clips={})
    layer = next(x for x in sweep.layers if x.kind is Kind.LINEAR)
    record = sweep.measure(layer, "int8")
    assert record.status is Status.FAILED and layer.edges[0].tensor in record.reason
    assert "calibrat" in record.remedy
    assert sweep.measure(layer, "int8_dynamic").status is Status.OK
    sweep.close()


def test_overflow_of_fp16_is_judged_from_ranges() -> None:
    model, feeds = dense(scale=300.0)  # 300 · 300 · 16 · 0.75 is about 1e6
    sweep = made_sweep(model, "y", feeds)
    by_name = {layer.name: layer for layer in sweep.layers}
    record = sweep.measure(by_name["m.lin"], "fp16")
    assert record.status is Status.INVALID and "beyond 65504" in record.reason and record.remedy
    norm = sweep.measure(by_name["m.norm"], "fp16")
    assert norm.status is Status.INVALID
    assert sweep.measure(by_name["m.head"], "fp16").status is Status.OK
    sweep.close()


def test_overflow_inside_a_normalisation_is_seen() -> None:
    s = Sketch(0)
    x = s.input("x", F, ("batch", "sequence", 16))
    h = s.linear(x, "m.lin", 16, 16, bias=False)
    h = s.op("Mul", h, s.number(500.0))
    y = s.linear(s.layer_norm(h, "m.norm", 16), "m.head", 16, 8)
    model = s.model(y=s.op("ReduceMean", y, s.ints(1), keepdims=0))
    feed = {"x": np.random.default_rng(0).normal(size=(3, 4, 16)).astype(np.float32)}
    sweep = made_sweep(model, "y", [feed])
    norm = next(x for x in sweep.layers if x.kind is Kind.LAYERNORM)
    record = sweep.measure(norm, "fp16")
    assert record.status is Status.INVALID
    assert "sum_of_squares" in record.reason and "inside it" in record.reason
    sweep.close()


def test_infinity_that_no_range_foretold_is_found_where_it_starts() -> None:
    model, feeds = dense(scale=300.0)
    sweep = made_sweep(model, "y", feeds, clips={}, ranges=())
    layer = next(x for x in sweep.layers if x.name == "m.lin")
    record = sweep.measure(layer, "fp16")
    assert record.status is Status.INVALID
    assert "6 of 6 items" in record.reason and "first at" in record.reason
    assert "m.lin/" in record.reason and "which reads" in record.reason
    assert record.sqnr_db is None and record.latency_delta_ms is None and not record.samples
    sweep.close()


def test_collapsed_outputs_are_said() -> None:
    s = Sketch(0)
    x = s.input("x", F, ("batch", "sequence", 16))
    y = s.op("ReduceMean", s.linear(x, "m.lin", 16, 8), s.ints(1), keepdims=0)
    model = s.model(y=y)
    feeds = [{"x": np.random.default_rng(0).normal(size=(4, 3, 16)).astype(np.float32)}]
    sweep = made_sweep(model, "y", feeds, clips={"x": 1e9})
    record = sweep.measure(sweep.layers[0], "int8")
    assert record.status is Status.OK and "same output" in record.reason
    sweep.close()


def test_local_error_of_a_reused_layer_is_over_all_its_uses() -> None:
    s = Sketch(0)
    x = s.input("x", F, ("batch", "sequence", 16))
    weight = s.weight("shared.weight", 16, 16)
    first = s.op("MatMul", x, weight, at="shared")
    second = s.op("MatMul", s.op("Mul", x, s.number(10.0)), weight, at="shared")
    y = s.op("Tanh", s.op("Add", first, second))
    model = s.model(y=s.op("ReduceMean", y, s.ints(1), keepdims=0))
    feed = {"x": np.random.default_rng(0).normal(size=(4, 3, 16)).astype(np.float32)}
    sweep = made_sweep(model, "y", [feed])
    layer = next(x for x in sweep.layers if x.kind is Kind.LINEAR)
    assert len(layer.occurrences) == 2
    record = sweep.measure(layer, "w4a16")
    w = model.graph.initializers["shared.weight"].const_value.numpy()
    scale = np.abs(w).max(axis=0) / np.float32(7)
    rounded = np.clip(np.rint(w / scale), -7, 7) * scale
    outputs = [feed["x"] @ w, 10 * feed["x"] @ w]
    changed = [feed["x"] @ rounded, 10 * feed["x"] @ rounded]
    signal = sum(float(np.square(a).sum()) for a in outputs)
    noise = sum(float(np.square(a - b).sum()) for a, b in zip(outputs, changed, strict=True))
    assert record.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=0.01)
    assert record.weight_bytes == 16 * 16 // 2 + 16 * 4
    sweep.close()


def test_the_same_cells_of_an_anonymous_decomposed_graph_give_equal_records(encoder) -> None:
    other = made_sweep(anonymise(decompose(tiny_encoder())), "embedding", tokens())
    assert [x.kind for x in other.layers] == [x.kind for x in encoder.layers]
    seen = set()
    for one, two in zip(encoder.layers, other.layers, strict=True):
        for name in ("fp16", "int8", "int8_dynamic", "w8a16", "w4a16"):
            if (one.kind, name) in seen:
                continue
            seen.add((one.kind, name))
            a, b = encoder.measure(one, name), other.measure(two, name)
            assert a.status is b.status, (one.name, name, a.reason, b.reason)
            if a.status is Status.OK:
                assert b.sqnr_db == pytest.approx(a.sqnr_db, abs=0.1), (one.name, name)
                assert b.divergence.value == pytest.approx(a.divergence.value, rel=0.05, abs=2e-8)
                assert b.weight_bytes == a.weight_bytes
    other.close()


def test_batches_are_spread_over_all() -> None:
    assert spread_batches(range(100), 5) == [0, 24, 49, 74, 99]
    assert spread_batches(range(3), 8) == [0, 1, 2]
    assert spread_batches(range(1), 8) == [0]
