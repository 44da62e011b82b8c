from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.graph.layers import find_layers
from qbench.lowering import LOWERINGS, Refusal, lowering_for, unusable_clips
from qbench.records import Edge, Kind, Layer, Occurrence, Status
from qbench.testing.graphs import Sketch, tiny_convnet, tiny_encoder

LINEAR_ONLY = ("int8_dynamic", "w4a16", "w4a8", "fp8")


def refusal(model: ir.Model, format_name: str, kind: Kind = Kind.LINEAR) -> Refusal | None:
    layer = next(layer for layer in find_layers(model).layers if layer.kind is kind)
    return lowering_for(format_name).requires(model, layer)


def product(weight, x_type=ir.DataType.FLOAT, op="MatMul", domain="", shape=("a", "b", 32)):
    s = Sketch(0)
    x = s.input("x", x_type, shape)
    y = s.op(op, x, s.constant("w", weight), at="m.lin", domain=domain)
    y.type = ir.TensorType(x_type)
    return s.model(y=y)


@pytest.mark.parametrize("name", ["int8", "int8_dynamic", "w8a16", "w4a16", "w4a8", "fp8"])
def test_fused_operators_are_refused_with_their_name(name: str) -> None:
    model = product(np.ones((32, 8), np.float32), op="FusedMatMul", domain="com.microsoft")
    said = refusal(model, name)
    assert said is not None and said.status is Status.NOT_YET
    assert "FusedMatMul" in said.reason and said.remedy


@pytest.mark.parametrize("name", ["int8", "int8_dynamic", "w8a16", "w4a16", "w4a8", "fp8"])
def test_a_half_precision_graph_is_refused(name: str) -> None:
    model = product(np.ones((32, 8), np.float16), ir.DataType.FLOAT16)
    said = refusal(model, name)
    assert said is not None and said.status is Status.NOT_YET and "FLOAT16" in said.reason


def test_fp16_means_nothing_where_the_graph_is_half_already() -> None:
    said = refusal(product(np.ones((32, 8), np.float16), ir.DataType.FLOAT16), "fp16")
    assert said is not None and said.status is Status.NOT_APPLICABLE


@pytest.mark.parametrize("name", ["int8", "int8_dynamic", "w8a16", "w4a16", "w4a8", "fp8"])
def test_batches_of_matrices_are_refused(name: str) -> None:
    model = product(np.ones((4, 32, 8), np.float32), shape=("a", 4, 5, 32))
    said = refusal(model, name)
    assert said is not None and said.status is Status.NOT_YET and "3 dimensions" in said.reason


@pytest.mark.parametrize("top, refused", [(65504.0, False), (65519.9, True), (1e6, True)])
@pytest.mark.parametrize("where", ["weight", "gamma", "table", "kernel"])
def test_fp16_refuses_weights_out_of_its_range(top: float, refused: bool, where: str) -> None:
    model = tiny_convnet() if where == "kernel" else tiny_encoder(layers=1)
    name, kind = {
        "weight": ("encoder.layer.0.attention.self.query.weight", Kind.LINEAR),
        "gamma": ("embeddings.LayerNorm.weight", Kind.LAYERNORM),
        "table": ("embeddings.position_embeddings.weight", Kind.EMBEDDING),
        "kernel": ("stem.conv.weight", Kind.CONV),
    }[where]
    value = model.graph.initializers[name]
    array = value.const_value.numpy().copy()
    array.flat[3] = -top
    value.const_value = ir.tensor(array, name=name)
    layer = next(
        layer
        for layer in find_layers(model).layers
        if layer.kind is kind and (layer.weight == name or name in layer.occurrences[0].inputs)
    )
    said = lowering_for("fp16").requires(model, layer)
    assert (said is not None) == refused
    if said is not None:
        assert said.status is Status.INVALID and name in said.reason and said.remedy


@pytest.mark.parametrize("name", LINEAR_ONLY)
def test_other_kinds_are_refused(name: str) -> None:
    for layer in find_layers(tiny_encoder(layers=1)).layers:
        said = lowering_for(name).requires(tiny_encoder(layers=1), layer)
        if layer.kind is not Kind.LINEAR:
            assert said is not None and said.status is Status.NOT_APPLICABLE
            assert str(layer.kind) in said.reason


def test_a_left_constant_needs_the_rank_of_the_activation() -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("a", 32, "b"))
    model = s.model(y=s.op("MatMul", s.constant("w", np.ones((8, 32), np.float32)), x, at="m.l"))
    assert refusal(model, "int8") is None
    model.graph.inputs[0].shape = None
    said = refusal(model, "int8")
    assert said is not None and "rank" in said.reason and said.remedy


@pytest.mark.parametrize(
    "clips, word",
    [({}, "no clip"), ({"x": 0.0}, "clips at 0"), ({"x": -1.0}, "-1"), ({"x": np.nan}, "nan")],
)
def test_clips_that_cannot_be_used_are_named(clips, word) -> None:
    use = Occurrence("MatMul", ("n",), ("x", "w"), "y", (Edge("n", 0, "x"),))
    said = unusable_clips(Layer("l", Kind.LINEAR, (use,)), clips)
    assert list(said) == ["x"] and word in said["x"]


def test_a_clip_that_can_be_used_is_not() -> None:
    use = Occurrence("MatMul", ("n",), ("x", "w"), "y", (Edge("n", 0, "x"),))
    assert unusable_clips(Layer("l", Kind.LINEAR, (use,)), {"x": 1e-6}) == {}


def test_every_format_of_the_backend_but_its_high_precision_has_a_lowering() -> None:
    assert set(LOWERINGS) == set(BACKENDS["ort-cpu"].formats) - {"fp32"}
