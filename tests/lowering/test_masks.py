"""Mask constants that fp16 cannot hold: found, taken as its least number, and said."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from qbench.graph.layers import find_layers
from qbench.graph.masks import find_fills
from qbench.lowering import lowering_for
from qbench.records import Kind
from qbench.testing.graphs import Sketch
from qbench.testing.lowerings import run_graph

F, INT = ir.DataType.FLOAT, ir.DataType.INT64
LOWEST = float(np.finfo(np.float32).min)
MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
X = np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)
FEEDS = {"x": X, "mask": MASK}


def attention(way: str, fill: float, scale: float = 1.0, guard: bool = False) -> ir.Model:
    """One head over x [batch, 5, 8] whose keys are masked in one of several ways."""
    s = Sketch(0)
    x, mask = s.input("x", F, ("b", "l", 8)), s.input("mask", INT, ("b", "l"))
    q, k, v = (s.linear(x, f"attn.{part}", 8, 8) for part in ("query", "key", "value"))
    scores = s.op("MatMul", q, s.op("Transpose", k, perm=[0, 2, 1]), at="attn")
    scores = s.op("Mul", scores, s.number(scale), at="attn")
    wide = s.op("Unsqueeze", mask, s.ints(1))
    ones = s.op("Cast", wide, to=F)
    if way == "where":
        keep = s.op("Cast", wide, to=ir.DataType.BOOL)
        scores = s.op("Where", keep, scores, s.number(fill), at="attn")
    elif way == "where bias":
        keep = s.op("Cast", wide, to=ir.DataType.BOOL)
        bias = s.op("Where", keep, s.number(0.0), s.number(fill))
        scores = s.op("Add", scores, bias, at="attn")
    elif way == "factor":
        bias = s.op("Mul", s.op("Sub", s.number(1.0), ones), s.number(fill))
        scores = s.op("Add", scores, bias, at="attn")
    elif way == "positive factor":
        bias = s.op("Mul", s.op("Sub", ones, s.number(1.0)), s.number(-fill))
        scores = s.op("Add", bias, scores, at="attn")
    elif way == "subtracted":
        bias = s.op("Mul", s.op("Sub", s.number(1.0), ones), s.number(-fill))
        scores = s.op("Sub", scores, bias, at="attn")
    elif way == "constant":
        bias = np.triu(np.full((5, 5), fill, np.float32), 1) if math.isfinite(fill) else None
        bias = np.where(np.tri(5) > 0, 0, fill).astype(np.float32) if bias is None else bias
        scores = s.op("Add", scores, s.constant("causal", bias[None]), at="attn")
    weights = s.op("Softmax", scores, at="attn", axis=-1)
    if guard:
        zero = s.op("IsNaN", weights, at="attn")
        weights = s.op("Where", zero, s.number(0.0), weights, at="attn")
    y = s.op("MatMul", weights, v, at="attn")
    return s.model(y=s.linear(y, "attn.out", 8, 8))


WAYS = ("where", "where bias", "factor", "positive factor", "subtracted", "constant")
FILLS = [(w, f) for w in WAYS for f in (-1e12, LOWEST, -math.inf, -1e5)]
#: 0 · ∞ is no number: nobody multiplies a mask by it.
FILLS = [(w, f) for w, f in FILLS if math.isfinite(f) or w in ("where", "where bias", "constant")]


def layer_of(model: ir.Model, kind: Kind):
    return next(layer for layer in find_layers(model).layers if layer.kind is kind)


@pytest.mark.parametrize(("way", "fill"), FILLS)
@pytest.mark.parametrize("kind", [Kind.SOFTMAX, Kind.ATTENTION_SCORES])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_masked_attention_takes_a_narrow_format(way, fill, kind, name) -> None:
    model = attention(way, fill)
    layer = layer_of(model, kind)
    lowered = model.clone()
    assert lowering_for(name).requires(lowered, layer) is None
    change = lowering_for(name).apply(lowered, layer, {})
    assert change.changed
    before, after = run_graph(model, FEEDS)["y"], run_graph(lowered, FEEDS)["y"]
    assert np.isfinite(after).all() or kind is not Kind.SOFTMAX
    fine = np.isfinite(before)  # rows that are −∞ alone have no softmax in fp32 either
    assert fine[:2].all() and (fine.all() or math.isinf(fill))
    if fill == -1e5:  # fp32 still tells scores beside such a fill apart, and fp16 does not
        fine[2] = False
    np.testing.assert_allclose(after[fine], before[fine], atol=0.003 if name == "fp16" else 0.03)
    if kind is Kind.SOFTMAX:
        (said,) = change.rewritten
        least = -65504 if name == "fp16" else pytest.approx(-3.39e38, rel=1e-3)
        assert said.becomes == least and abs(said.value) == np.float32(abs(fill))
        assert said.constant in change.remark and name in change.remark


def test_a_guarded_infinity_stays_one() -> None:
    model = attention("where", -math.inf, guard=True)
    layer = layer_of(model, Kind.SOFTMAX)
    lowered = model.clone()
    change = lowering_for("fp16").apply(lowered, layer, {})
    before, after = run_graph(model, FEEDS)["y"], run_graph(lowered, FEEDS)["y"]
    assert np.isfinite(before).all()
    np.testing.assert_allclose(after, before, atol=0.003)
    assert "stays" in change.remark and change.rewritten[0].becomes == -math.inf


def test_a_mask_that_a_residual_reads() -> None:
    s = Sketch(0)
    x, mask = s.input("x", F, ("b", "l", 8)), s.input("mask", INT, ("b", "l"))
    wide = s.op("Cast", s.op("Unsqueeze", mask, s.ints(-1)), to=F)
    bias = s.op("Mul", s.op("Sub", s.number(1.0), wide), s.number(-1e12))
    weights = s.op("Softmax", s.op("Add", x, bias), at="m.soft", axis=1)
    y = s.op("Add", s.linear(weights, "m.lin", 8, 8), bias, at="m")
    model = s.model(y=s.op("ReduceMax", y, s.ints(1), keepdims=0))
    found = [x for x in find_layers(model).layers if x.kind is Kind.RESIDUAL_ADD]
    assert found and all(layer.masks for layer in found)
    lowered = model.clone()
    lowering_for("fp16").apply(lowered, found[-1], {})
    feeds = {"x": X, "mask": np.ones_like(MASK)}
    np.testing.assert_allclose(
        run_graph(lowered, feeds)["y"], run_graph(model, feeds)["y"], atol=0.01
    )
    assert np.isfinite(run_graph(lowered, FEEDS)["y"]).all()


@pytest.mark.parametrize("factor", [1e5, -1e5, 1e12])
def test_a_scale_or_a_shift_is_no_mask(factor: float) -> None:
    s = Sketch(0)
    x, ids = s.input("x", F, ("b", 8)), s.input("ids", INT, ("b",))
    rows = s.op("Gather", s.weight("table", 20, 8), ids, at="m.emb", axis=0)
    scaled = s.op("Mul", s.op("Add", x, rows), s.number(factor))
    shifted = s.op("Add", x, s.number(factor))
    model = s.model(y=s.layer_norm(scaled, "m.norm", 8), z=s.op("Softmax", shifted, axis=-1))
    assert set(find_fills(model)) == {f"number_{factor!r}"}
    assert all(layer.masks == () for layer in find_layers(model).layers)


def test_constants_in_nodes_are_followed() -> None:
    model = ir.from_onnx_text(
        """
        <ir_version: 10, opset_import: ["" : 21]>
        odd (bool[b, l] keep, float[b, l] x) => (float[b, l] y) {
            low = Constant <value_float = -1.0e12> ()
            masked = Where(keep, x, low)
            y = Softmax(masked)
        }
        """
    )
    for index, node in enumerate(model.graph):
        node.name = f"n{index}"
    (layer,) = find_layers(model).layers
    assert [(m.tensor, m.constant) for m in layer.masks] == [("masked", "n0")]
