from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import CheckerPass

from qbench.graph.layers import find_layers
from qbench.lowering import lowering_for
from qbench.lowering.islands import make_islands
from qbench.records import Kind
from qbench.testing.graphs import Sketch, decompose, tiny_convnet, tiny_decoder, tiny_encoder
from qbench.testing.lowerings import run_graph

IDS = np.random.default_rng(0).integers(1, 99, (2, 7))
ENCODER = {"input_ids": IDS, "attention_mask": np.array([[1] * 7, [1] * 5 + [0] * 2])}
IMAGE = {"image": np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype(np.float32)}
CACHE = {"input_ids": IDS} | {
    f"past_key_values.{i}.{part}": np.random.default_rng(i).normal(size=(2, 2, 3, 8)).astype("f4")
    for i in range(2)
    for part in ("key", "value")
}
GRAPHS = {
    "encoder": (tiny_encoder, ENCODER),
    "decomposed": (lambda: decompose(tiny_encoder()), ENCODER),
    "decoder": (tiny_decoder, {"input_ids": IDS}),
    "cache": (lambda: tiny_decoder(past=True), CACHE),
    "convnet": (tiny_convnet, IMAGE),
}


def half_casts(model: ir.Model) -> Counter:
    kinds = Counter()
    for node in model.graph:
        if node.op_type == "Cast" and str(node.name).startswith("fp16_islands"):
            kinds[ir.DataType(node.attributes.get_int("to")).name] += 1
    return kinds


def check(model: ir.Model, feeds, before, atol: float) -> None:
    CheckerPass()(model)
    after = run_graph(model, feeds)
    assert list(after) == list(before)
    for name, value in before.items():
        assert after[name].dtype == value.dtype and after[name].shape == value.shape
        np.testing.assert_allclose(after[name], value, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_whole_model_in_fp16_stays_near(name: str) -> None:
    build, feeds = GRAPHS[name]
    model = build()
    layers, before = find_layers(model), run_graph(model, feeds)
    formats = {layer.name: "fp16" for layer in layers.layers}
    found = make_islands(model, layers, formats)
    check(model, feeds, before, 0.05)
    assert found.nodes > 0.5 * len(before) and found.casts == half_casts(model).total()
    halves = [v for v in model.graph.initializers.values() if v.dtype is ir.DataType.FLOAT16]
    assert all(np.isfinite(v.const_value.numpy()).all() for v in halves)
    stored = set(model.graph.initializers)
    weights = {x.weight for x in layers.layers if x.weight and x.kind is Kind.LINEAR}
    assert not weights & stored, "weights are stored in fp16 alone"
    large = {x.weight for x in layers.layers if np.prod(x.weight_shape) > 512}
    assert len(large) == sum(v.const_value.size > 512 for v in halves), "tied ones once"


def test_adjacent_layers_are_one_island_with_casts_at_its_borders() -> None:
    model = tiny_encoder(layers=2)
    layers = find_layers(model)
    found = make_islands(model, layers, {layer.name: "fp16" for layer in layers.layers})
    assert found.count == 1
    # What enters is the mask, once; what leaves is read by the pooling in fp32.
    assert half_casts(model) == {"FLOAT16": 1, "FLOAT": 1}
    assert [item.becomes for item in found.rewritten] == [-65504]


def test_layers_apart_are_islands_of_their_own() -> None:
    model = tiny_encoder(layers=2)
    layers, before = find_layers(model), run_graph(model, ENCODER)
    own = [x for x in layers.layers if x.name.endswith(("intermediate.dense", "output.LayerNorm"))]
    found = make_islands(model, layers, {layer.name: "fp16" for layer in own})
    # attention.output.LayerNorm and intermediate.dense touch; output.LayerNorm stands alone.
    assert found.count == 4
    check(model, ENCODER, before, 0.02)
    emulated = tiny_encoder(layers=2)
    for layer in own:
        lowering_for("fp16").apply(emulated, layer, {})
    one, two = (run_graph(m, ENCODER)["embedding"] for m in (model, emulated))
    np.testing.assert_allclose(one, two, atol=2e-3)


@pytest.mark.parametrize("whole", [False, True])
def test_quantized_layers_stand_in_fp16_or_beside_it(whole: bool) -> None:
    model = tiny_encoder(layers=2)
    layers, before = find_layers(model), run_graph(model, ENCODER)
    formats = {}
    for index, layer in enumerate(layers.layers):
        formats[layer.name] = "fp16"
        if layer.kind is Kind.LINEAR:
            formats[layer.name] = ("int8", "w4a16", "fp16", "fp32")[index % 4]
        if formats[layer.name] in ("int8", "w4a16"):
            clips = {edge.tensor: 6.0 for edge in layer.edges}
            lowering_for(formats[layer.name]).apply(model, layer, clips)
    make_islands(model, layers, formats, whole=whole)
    check(model, ENCODER, before, 0.3)
    scales = {
        node.inputs[1].dtype
        for node in model.graph
        if node.op_type in ("QuantizeLinear", "DequantizeLinear")
    }
    assert scales == {ir.DataType.FLOAT16 if whole else ir.DataType.FLOAT}
    kept = {x.weight for x in layers.layers if formats[x.name] == "fp32"}
    assert kept <= set(model.graph.initializers)


@pytest.mark.parametrize("fill", [-np.inf, -1e12])
def test_the_fill_of_a_mask_enters_as_a_finite_number(fill: float) -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("b", "l", 8))
    keep = s.input("keep", ir.DataType.BOOL, ("b", 1, "l"))
    q, k, v = (s.linear(x, f"a.{part}", 8, 8) for part in ("query", "key", "value"))
    scores = s.op("MatMul", q, s.op("Transpose", k, perm=[0, 2, 1]), at="a")
    weights = s.op("Softmax", s.op("Where", keep, scores, s.number(fill)), at="a", axis=-1)
    model = s.model(y=s.op("MatMul", weights, v, at="a"))
    random = np.random.default_rng(0)
    feeds = {
        "x": random.normal(size=(2, 3, 8)).astype("f4"),
        "keep": np.array([[[1, 1, 0]]] * 2) > 0,
    }
    layers, before = find_layers(model), run_graph(model, feeds)
    found = make_islands(model, layers, {layer.name: "fp16" for layer in layers.layers})
    assert found.count == 1 and found.casts == 2
    check(model, feeds, before, 0.01)
    (constant,) = {item.constant for item in found.rewritten}
    assert constant == f"number_{fill!r}" or constant.startswith("number_")
    halves = [v for v in model.graph.initializers.values() if v.dtype is ir.DataType.FLOAT16]
    assert min(v.const_value.numpy().min() for v in halves) == -65504


def test_the_same_plan_is_the_same_bytes() -> None:
    made = []
    for _ in range(2):
        model = tiny_encoder()
        layers = find_layers(model)
        make_islands(model, layers, {layer.name: "fp16" for layer in layers.layers})
        made.append(ir.to_proto(model).SerializeToString(deterministic=True))
    assert made[0] == made[1]


def test_no_layer_no_island() -> None:
    model = tiny_encoder()
    layers, before = find_layers(model), len(list(model.graph))
    found = make_islands(model, layers, {})
    assert (found.count, found.nodes, found.casts) == (0, 0, 0)
    assert len(list(model.graph)) == before
