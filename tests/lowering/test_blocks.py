"""The size of a block: chosen by the weight's error against bytes, or as a plan says."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qbench.graph.layers import find_layers
from qbench.lowering import lowering_for
from qbench.lowering.weight_only import choose_block, own_block, quantize_blocks
from qbench.records import Kind, Status
from qbench.testing.graphs import Sketch, tiny_encoder


def normal(k: int, n: int = 24) -> np.ndarray:
    return np.random.default_rng(k).normal(size=(k, n)).astype(np.float32)


def spiked(k: int = 512, n: int = 24, every: int = 128) -> np.ndarray:
    """A weight that has one large number in each ``every`` elements of K."""
    weight = normal(k, n)
    weight[::every] *= 12
    return weight


@pytest.mark.parametrize(("k", "block"), [(128, 128), (384, 128), (4096, 128), (192, 64), (96, 32)])
def test_an_ordinary_weight_has_the_usual_block(k: int, block: int) -> None:
    got, why = choose_block(normal(k), 4)
    assert got == block
    assert (why == "") == (block == 128) and (block == 128 or "does not divide K" in why)


def test_a_smaller_block_is_taken_where_its_error_is_worth_its_scales() -> None:
    got, why = choose_block(spiked(), 4)
    assert got < 128 and "below that of 128" in why


def test_the_error_that_is_weighed_is_the_weights() -> None:
    weight, errors = spiked(), {}
    for block in (128, 64, 32):
        integers, scales = quantize_blocks(weight, 4, block)
        rounded = integers * np.repeat(scales, block, axis=0)
        errors[block] = float(np.square(rounded - weight).sum()) * 4 ** (32 / block)
    assert min(errors, key=errors.__getitem__) == choose_block(weight, 4)[0]


@pytest.mark.parametrize("k", [1, 5, 17, 31, 100, 131])
def test_a_part_of_a_block_is_padded_with_nothing(k: int) -> None:
    weight = normal(k)
    integers, scales = quantize_blocks(weight, 4, 32)
    assert integers.shape == weight.shape and scales.shape == (-(-k // 32), 24)
    rounded = integers * np.repeat(scales, 32, axis=0)[:k]
    assert np.abs(rounded - weight).max() <= 0.5001 * scales.max()


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "w8a16"])
def test_a_plan_may_say_the_block(name: str) -> None:
    model = tiny_encoder(layers=1)
    layer = next(
        x for x in find_layers(model).layers if x.kind is Kind.LINEAR and x.weight_shape[0] == 128
    )
    free = lowering_for(name).apply(model.clone(), layer, {})
    told = lowering_for(name, 32).apply(model.clone(), layer, {})
    assert (free.block, told.block) == (128, 32) and told.weight_bytes > free.weight_bytes
    assert "as planned" in told.remark


@pytest.mark.parametrize(("name", "block"), [("w4a16", 48), ("w8a16", 7), ("w4a8", 24)])
def test_a_block_that_cannot_be_had_is_refused(name: str, block: int) -> None:
    model = tiny_encoder(layers=1)
    layer = next(x for x in find_layers(model).layers if x.kind is Kind.LINEAR)
    said = lowering_for(name, block).requires(model, layer)
    assert said is not None and said.status is Status.INVALID
    assert f"got block {block}; allowed" in said.reason and said.remedy


@pytest.mark.parametrize("form", ["w4a16", "w4a8"])
@pytest.mark.parametrize("k", [64, 96, 100, 144, 256, 576])
def test_the_block_that_remedies_take_is_the_one_that_the_lowering_chose(form: str, k: int) -> None:
    weight = np.random.default_rng(k).standard_t(3, size=(k, 32)).astype(np.float32)
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", "sequence", k))
    model = s.model(y=s.op("MatMul", x, s.constant("head.weight", weight), at="head"))
    (layer,) = find_layers(model).layers
    change = lowering_for(form).apply(model, layer, {})
    assert change.block == own_block(weight, form)
