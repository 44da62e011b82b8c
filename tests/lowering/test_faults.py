from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qbench.graph.layers import find_layers
from qbench.lowering import lowering_for
from qbench.lowering.faults import quantizer_faults
from qbench.records import Kind
from qbench.testing.graphs import Sketch, tiny_convnet, tiny_encoder

F = ir.DataType.FLOAT


def weight_only(axis: int, scales: int, op: str = "MatMul", **attributes) -> ir.Model:
    s = Sketch(0)
    turned = attributes.get("transB")
    shape = (8, 16) if turned else (16, 8)
    x = s.input("x", F, ("b", 16))
    whole = s.constant("w", np.ones(shape, np.int8))
    scale = s.constant("s", np.ones(scales, np.float32))
    weight = s.op("DequantizeLinear", whole, scale, at="m", axis=axis)
    return s.model(y=s.op(op, x, weight, at="m", **attributes))


@pytest.mark.parametrize(
    ("axis", "scales", "op", "attributes", "words"),
    [
        (1, 8, "MatMul", {}, ""),
        (-1, 8, "MatMul", {}, ""),
        (0, 16, "MatMul", {}, "output channels of MatMul"),
        (-2, 16, "Gemm", {}, "output channels of Gemm"),
        (0, 8, "Gemm", {"transB": 1}, ""),
        (1, 16, "Gemm", {"transB": 1}, "along axis 0"),
        (1, 16, "MatMul", {}, "16 scales for axis 1, which is 8 long"),
        (3, 8, "MatMul", {}, "none of the 2 axes"),
    ],
)
def test_scales_lie_along_the_output_channels(axis, scales, op, attributes, words) -> None:
    model = weight_only(axis, scales, op, **attributes)
    found = " ".join(quantizer_faults(model))
    assert words in found and bool(words) == bool(found)


@pytest.mark.parametrize(
    ("block", "shape", "words"),
    [
        (32, (2, 8), ""),
        (32, (4, 8), "blocks of 32 want 2"),
        (32, (2, 4), "4 long on axis 1"),
        (48, (2, 8), "do not divide axis 0"),
        (32, (2,), "have 1 axes"),
    ],
)
def test_blocks_cover_their_axis(block, shape, words) -> None:
    s = Sketch(0)
    x = s.input("x", F, ("b", 64))
    model = s.model(y=s.op("Tanh", x))
    whole = ir.Value(name="w", shape=ir.Shape((64, 8)), type=ir.TensorType(ir.DataType.INT8))
    scale = ir.val("s", const_value=ir.tensor(np.ones(shape, np.float32), name="s"))
    node = ir.node("DequantizeLinear", [whole, scale], {"axis": 0, "block_size": block}, name="d")
    model.graph.insert_before(model.graph[0], node)
    found = " ".join(quantizer_faults(model))
    assert words in found and bool(words) == bool(found)


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        (np.int8(0), ""),
        (np.uint8(0), "UINT8"),
        (np.uint8(128), "not 0"),
        (np.int8(3), "not 0"),
        (None, "gives UINT8"),
    ],
)
def test_zero_points_are_signed_zeros(zero, words) -> None:
    s = Sketch(0)
    x, scale = s.input("x", F, ("b", 4)), s.number(0.1)
    inputs = [x, scale] + ([] if zero is None else [s.constant("z", zero)])
    q = s.op("QuantizeLinear", *inputs)
    back = s.op("DequantizeLinear", q, scale, *inputs[2:])
    found = " ".join(quantizer_faults(s.model(y=back)))
    assert words in found and bool(words) == bool(found)


def test_foreign_operators_are_named() -> None:
    model = tiny_encoder(layers=1)
    layers = [x for x in find_layers(model).layers if x.kind is Kind.LINEAR]
    lowering_for("w4a8").apply(model, layers[0], {})
    lowering_for("int8_dynamic").apply(model, layers[1], {})
    found = " ".join(quantizer_faults(model))
    assert "com.microsoft" in found and "DynamicQuantizeLinear" in found
    assert "MatMulInteger" in found and layers[1].name in found


@pytest.mark.parametrize("name", ["int8", "w8a16", "w4a16", "fp8"])
@pytest.mark.parametrize("make", [tiny_encoder, tiny_convnet])
def test_our_own_lowerings_have_none(name: str, make) -> None:
    model = make()
    for layer in find_layers(model).layers:
        lowering = lowering_for(name)
        if lowering.requires(model, layer) is None:
            lowering.apply(model, layer, {edge.tensor: 2.0 for edge in layer.edges})
    assert any(node.op_type == "DequantizeLinear" for node in model.graph) or make is tiny_convnet
    assert quantizer_faults(model) == ()


@pytest.mark.parametrize("dtype", [ir.DataType.UINT4, ir.DataType.UINT8, ir.DataType.INT32])
def test_dequantizers_read_signed_integers_alone(dtype: ir.DataType) -> None:
    s = Sketch(0)
    x = s.input("x", F, ("b", 16))
    model = s.model(y=s.op("Tanh", x))
    whole = ir.Value(name="w", shape=ir.Shape((16, 8)), type=ir.TensorType(dtype))
    scale = ir.val("s", const_value=ir.tensor(np.ones(8, np.float32), name="s"))
    node = ir.node("DequantizeLinear", [whole, scale], {"axis": 1}, name="d")
    model.graph.insert_before(model.graph[0], node)
    (found,) = quantizer_faults(model)
    assert f"it reads {dtype.name}; allowed:" in found and "INT4" in found


def test_packed_products_of_another_domain_are_named() -> None:
    s = Sketch(0)
    x = s.input("x", F, ("b", 32))
    packed = s.constant("w", np.zeros((8, 1, 16), np.uint8))
    scales = s.constant("s", np.ones(8, np.float32))
    model = s.model(y=s.op("Identity", x))
    node = ir.node(
        "MatMulNBits", [x, packed, scales], {"K": 32, "N": 8, "bits": 4, "block_size": 32},
        domain="com.microsoft", name="m",
    )  # fmt: skip
    model.graph.insert_before(model.graph[0], node)
    (found,) = quantizer_faults(model)
    assert (
        found == "MatMulNBits 'm' is of the domain 'com.microsoft', which the backend does not read"
    )
