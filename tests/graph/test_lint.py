from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qbench.graph.lint import find_extreme_constants, find_non_finite_weights
from qbench.testing.graphs import Sketch, tiny_decoder, tiny_encoder

LOWEST = float(np.finfo(np.float32).min)


def sketch_with(mask: object, weight: object) -> ir.Model:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("n", 4))
    masked = s.op("Add", x, s.constant("mask", np.array(mask)), at="masked")
    y = s.op("MatMul", masked, s.constant("weight", np.array(weight)), at="linear")
    return s.model(y=y)


@pytest.mark.parametrize("fill", [-math.inf, -1e12, LOWEST, 7e4])
def test_mask_constants_are_found_with_their_readers(fill: float) -> None:
    model = sketch_with(np.float32([0, fill, 0, 0]), np.eye(4, dtype=np.float32))
    (found,) = find_extreme_constants(model)
    assert (found.name, found.elements, found.consumers) == ("mask", 4, ("/masked/Add",))
    assert found.value == np.float32(fill)
    assert found.infinite == math.isinf(fill)
    assert find_non_finite_weights(model) == ()


def test_weights_that_fp16_saturates_are_found() -> None:
    weight = np.eye(4, dtype=np.float32)
    weight[0, 0], weight[1, 1] = 65504, 65505
    (found,) = find_extreme_constants(sketch_with(np.float32([0, 0, 0, 0]), weight))
    assert (found.name, found.value, found.consumers) == ("weight", 65505, ("/linear/MatMul",))


def test_ordinary_models_have_only_their_mask() -> None:
    for model in (tiny_encoder(), tiny_decoder()):
        assert [e.value for e in find_extreme_constants(model)] == [LOWEST]
        assert find_non_finite_weights(model) == ()


def test_damaged_weights_are_named() -> None:
    weight = np.eye(4, dtype=np.float32)
    weight[2, 3] = np.inf
    assert find_non_finite_weights(sketch_with(np.zeros(4, np.float32), weight)) == ("weight",)
    mask = np.float32([0, np.nan, -np.inf, 0])
    model = sketch_with(mask, np.eye(4, dtype=np.float32))
    assert find_non_finite_weights(model) == ("mask",)
    (found,) = find_extreme_constants(model)
    assert found.infinite
    model = sketch_with(np.full(4, np.nan, np.float32), np.eye(4, dtype=np.float32))
    assert find_extreme_constants(model) == ()


def test_memory_mapped_weights_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qbench.graph.lint._CHUNK", 8)
    weight = np.ones((4, 300), np.float32)
    weight[3, 299] = np.nan
    weight[3, 290] = 1e6
    path = tmp_path / "m.onnx"
    ir.save(sketch_with(np.zeros(4, np.float32), weight), path, external_data="m.data")
    model = ir.load(path)
    assert isinstance(model.graph.initializers["weight"].const_value, ir.ExternalTensor)
    assert find_non_finite_weights(model) == ("weight",)
    assert [e.value for e in find_extreme_constants(model)] == [1e6]


def test_constants_in_nodes_and_subgraphs_are_found() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    odd (bool c, float[2] x) => (float[2] y) {
        big = Constant <value_float = -1.0e9> ()
        pair = Constant <value = float[2] {1.0, 70000.0}> ()
        z = Add(x, big)
        y = If(c) <
            then_branch = yes () => (float[2] a) {
                low = Constant <value_floats = [-1.0e12, 0.0]> ()
                a = Add(z, low)
            },
            else_branch = no () => (float[2] b) { b = Mul(z, pair) }
        >
    }
    """
    found = find_extreme_constants(ir.from_proto(onnx.parser.parse_model(text)))
    assert sorted(e.value for e in found) == [np.float32(-1e12), np.float32(-1e9), 70000]


def test_half_precision_and_integer_constants() -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT16, ("n", 2))
    half = s.constant("half", np.float16([1, -np.inf]))
    shape = s.ints(-1, 2**40)
    model = s.model(y=s.op("Add", x, half), z=s.op("Identity", shape))
    assert [(e.name, e.value) for e in find_extreme_constants(model)] == [("half", -math.inf)]
