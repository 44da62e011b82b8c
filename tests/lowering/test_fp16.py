from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.graph.layers import find_layers
from qbench.lowering import lowering_for
from qbench.records import Kind
from qbench.runtime.ort import settings_for
from qbench.runtime.probe import annotate, probe_tensors
from qbench.testing.graphs import (
    Sketch,
    anonymise,
    decompose,
    tiny_convnet,
    tiny_decoder,
    tiny_encoder,
)
from qbench.testing.lowerings import run_graph

FP16 = lowering_for("fp16")
IDS = np.random.default_rng(0).integers(1, 99, (2, 7))
ENCODER = {"input_ids": IDS, "attention_mask": np.array([[1] * 7, [1] * 5 + [0] * 2])}
DECODER = {"input_ids": IDS}
IMAGE = {"image": np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype(np.float32)}
CACHE = DECODER | {
    f"past_key_values.{i}.{part}": np.random.default_rng(i).normal(size=(2, 2, 3, 8)).astype("f4")
    for i in range(2)
    for part in ("key", "value")
}


def annotated(model: ir.Model, feeds) -> ir.Model:
    annotate(model, probe_tensors(model, feeds, settings_for(BACKENDS["ort-cpu"], 1)))
    return model


def half(array):
    with np.errstate(over="ignore"):
        return array.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize(
    "build, feeds",
    [
        (tiny_encoder, ENCODER),
        (lambda: decompose(tiny_encoder()), ENCODER),
        (lambda: anonymise(decompose(tiny_encoder())), ENCODER),
        (tiny_decoder, DECODER),
        (lambda: tiny_decoder(past=True), CACHE),
        (lambda: decompose(tiny_decoder()), DECODER),
        (tiny_convnet, IMAGE),
    ],
    ids=["encoder", "decomposed", "anonymous", "decoder", "cache", "decomposed decoder", "convnet"],
)
def test_every_layer_takes_fp16_and_stays_near(build, feeds) -> None:
    model = annotated(build(), feeds)
    before = run_graph(model, feeds)
    kinds = Counter()
    for layer in find_layers(model).layers:
        lowered = model.clone()
        assert FP16.requires(lowered, layer) is None
        assert FP16.apply(lowered, layer, {}).changed, layer.name
        assert FP16.ensures(lowered, layer) is None, layer.name
        after = run_graph(lowered, feeds)
        kinds[layer.kind] += any(not np.array_equal(before[k], after[k]) for k in before)
        for name, value in before.items():
            np.testing.assert_allclose(after[name], value, atol=0.02, err_msg=layer.name)
    assert all(kinds.values()), kinds


def test_decomposed_patterns_round_where_the_operator_does() -> None:
    whole, apart = annotated(tiny_encoder(), ENCODER), annotated(decompose(tiny_encoder()), ENCODER)
    first, second = find_layers(whole).layers, find_layers(apart).layers
    assert [layer.kind for layer in first] == [layer.kind for layer in second]
    for one, two in zip(first, second, strict=True):
        if one.kind not in (Kind.LAYERNORM, Kind.SOFTMAX, Kind.ACTIVATION):
            continue
        outputs = []
        for model, layer in ((whole, one), (apart, two)):
            lowered = model.clone()
            FP16.apply(lowered, layer, {})
            given = layer.occurrences[0].output
            value = next(v for n in lowered.graph for v in n.outputs if v.name == given)
            readers = {n.op_type for n, _ in value.uses()}
            assert readers == {"Cast"} or value.is_graph_output(), "it is not rounded at its border"
            outputs.append(run_graph(lowered, ENCODER)["embedding"])
        np.testing.assert_allclose(outputs[0], outputs[1], atol=2e-4, err_msg=one.name)


def test_the_cache_that_is_given_out_is_the_one_that_attention_reads() -> None:
    model = annotated(tiny_decoder(past=True), CACHE)
    before = run_graph(model, CACHE)
    for layer in find_layers(model).layers:
        if layer.kind is not Kind.KV:
            continue
        lowered = model.clone()
        FP16.apply(lowered, layer, {})
        after = run_graph(lowered, CACHE)
        moved = [name for name in before if not np.array_equal(before[name], after[name])]
        given = layer.occurrences[0].output
        assert given in moved and "logits" in moved
        np.testing.assert_array_equal(after[given], half(before[given]))


def test_a_tensor_that_others_read_is_rounded_for_attention_alone() -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("b", 2, "s", 8))
    k = s.op("Tanh", x)
    scores = s.op("MatMul", x, s.op("Transpose", k, perm=[0, 1, 3, 2]))
    weights = s.op("Softmax", scores, axis=-1)
    model = s.model(y=s.op("MatMul", weights, x), other=s.op("Neg", k))
    feeds = {"x": np.random.default_rng(0).normal(size=(1, 2, 3, 8)).astype(np.float32)}
    layers = [layer for layer in find_layers(model).layers if layer.kind is Kind.KV]
    keys = next(layer for layer in layers if layer.occurrences[0].output == k.name)
    before = run_graph(model, feeds)
    FP16.apply(model, keys, {})
    after = run_graph(model, feeds)
    assert not np.array_equal(before["y"], after["y"])
    np.testing.assert_array_equal(before["other"], after["other"])


def test_values_beyond_the_range_become_infinite() -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("a", "b", 4))
    y = s.op("MatMul", x, s.constant("w", np.full((4, 2), 300, np.float32)), at="m.lin")
    model = s.model(y=y)
    layer = find_layers(model).layers[0]
    FP16.apply(model, layer, {})
    got = run_graph(model, {"x": np.full((1, 1, 4), 300, np.float32)})
    assert np.isposinf(got["y"]).all()


def test_a_sum_of_a_tensor_with_itself_and_a_given_output() -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("a", "b", 16))
    h = s.op("Add", s.linear(x, "m.one", 16, 16), x, at="m")
    model = s.model(z=s.op("Gelu", h, at="m.act"), h=h)
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 3, 16)).astype(np.float32)}
    before = run_graph(model, feeds)
    layer = next(x for x in find_layers(model).layers if x.kind is Kind.RESIDUAL_ADD)
    FP16.apply(model, layer, {})
    after = run_graph(model, feeds)
    assert list(after) == ["z", "h"]
    np.testing.assert_array_equal(after["h"], half(after["h"]))
    np.testing.assert_allclose(after["h"], before["h"], atol=4e-3)


def test_all_layers_at_once_in_any_order() -> None:
    model = annotated(tiny_encoder(), ENCODER)
    before = run_graph(model, ENCODER)["embedding"]
    layers = find_layers(model).layers
    for order in (layers, layers[::-1]):
        lowered = model.clone()
        for layer in order:
            FP16.apply(lowered, layer, {})
            assert FP16.ensures(lowered, layer) is None
        after = run_graph(lowered, ENCODER)["embedding"]
        assert 0 < np.abs(after - before).max() < 0.01
