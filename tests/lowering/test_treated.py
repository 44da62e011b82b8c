from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.errors import InputError, PlanError
from qbench.graph.layers import find_layers
from qbench.graph.shapes import infer_shapes
from qbench.lowering import lowering_for
from qbench.lowering.awq import clip_blocks, dequantized
from qbench.lowering.smooth import Readers, smooth
from qbench.lowering.treated import treated
from qbench.records import Kind, Layer, Treatment
from qbench.records.packed import pack, unpack
from qbench.runtime.ort import open_session, settings_for
from qbench.testing.graphs import Sketch, tiny_decoder, tiny_encoder

SETTINGS = settings_for(BACKENDS["ort-cpu"], threads=1)
F = ir.DataType.FLOAT
K, N = 32, 24
SCALE = np.geomspace(0.25, 4.0, K).astype(np.float16).astype(np.float32)


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    name = str(model.graph.outputs[0].name)
    with open_session(model, SETTINGS) as session:
        return session.run(feeds, [name])[name]


def ready(model: ir.Model, part: str) -> tuple[ir.Model, Layer]:
    infer_shapes(model)
    layers = find_layers(model).layers
    return model, next(x for x in layers if part in x.name and x.kind is Kind.LINEAR)


def tokens(model: ir.Model) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(3).integers(1, 99, (3, 7))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    return {str(v.name): feeds[str(v.name)] for v in model.graph.inputs}


def product(op: str, **attributes: int) -> tuple[ir.Model, dict[str, np.ndarray]]:
    s = Sketch(1)
    x = s.input("x", F, ("batch", K))
    shape = (N, K) if attributes.get("transB") else (K, N)
    w = s.weight("m.lin.weight", *shape, scale=K**-0.5)
    b = s.weight("m.lin.bias", N, scale=0.1)
    if op == "Gemm":
        y = s.op("Gemm", x, w, b, at="m.lin", **attributes)
    else:
        y = s.op("Add", s.op("MatMul", x, w, at="m.lin"), b, at="m.lin")
    feeds = {"x": np.random.default_rng(0).normal(size=(5, K)).astype(np.float32)}
    return s.model(y=y), feeds


@pytest.mark.parametrize(
    ("op", "attributes"), [("MatMul", {}), ("Gemm", {}), ("Gemm", {"transB": 1})]
)
def test_smoothing_alone_changes_nothing_but_rounding(op: str, attributes: dict[str, int]) -> None:
    model, feeds = product(op, **attributes)
    before = run(model.clone(), feeds)
    model, layer = ready(model, "lin")
    done = smooth(model, layer, SCALE)
    assert not done.folded
    assert any(node.op_type == "Mul" for node in model.graph)
    np.testing.assert_allclose(run(model, feeds), before, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("part", ["mlp.gate_proj", "self_attn.q_proj"])
def test_a_norm_read_by_products_alone_takes_the_scale(part: str) -> None:
    model, layer = ready(tiny_decoder(), part)
    feeds, count = tokens(model), sum(1 for _ in model.graph)
    before = run(model.clone(), feeds)
    done = smooth(model, layer, SCALE)
    assert done.folded
    assert sum(1 for _ in model.graph) == count
    np.testing.assert_allclose(run(model, feeds), before, rtol=1e-4, atol=1e-5)


def test_a_norm_that_a_residual_reads_too_is_left_alone() -> None:
    model, layer = ready(tiny_encoder(), "attention.self.query")
    feeds = tokens(model)
    before = run(model.clone(), feeds)
    done = smooth(model, layer, SCALE)
    assert not done.folded
    np.testing.assert_allclose(run(model, feeds), before, rtol=1e-4, atol=1e-5)


def test_a_fold_waits_for_what_the_plan_says_of_the_other_readers() -> None:
    model, layer = ready(tiny_decoder(), "mlp.gate_proj")
    assert not smooth(model.clone(), layer, SCALE, Readers(kept=frozenset())).folded
    other = next(x for x in find_layers(model).layers if x.name.endswith("0.mlp.up_proj"))
    feeds = tokens(model)
    before = run(model.clone(), feeds)
    both = Readers(kept=frozenset(), same=frozenset(other.nodes))
    assert smooth(model, layer, SCALE, both).folded
    again = smooth(model, other, SCALE, Readers(frozenset(), frozenset(layer.nodes)))
    assert again.folded
    assert not any("smooth:0" in str(v.name) for n in model.graph for v in n.outputs)
    np.testing.assert_allclose(run(model, feeds), before, rtol=1e-4, atol=1e-5)


def outlier_case() -> tuple[ir.Model, Layer, dict[str, np.ndarray], np.ndarray]:
    """A product whose activation has one channel a hundred times as large as the others."""
    model, feeds = product("MatMul")
    feeds["x"][:, 3] *= 100
    before = run(model.clone(), feeds)
    model, layer = ready(model, "lin")
    return model, layer, feeds, before


def error(model: ir.Model, feeds: dict[str, np.ndarray], before: np.ndarray) -> float:
    return float(np.square(run(model, feeds) - before).mean())


def test_smoothquant_helps_where_a_channel_stands_out() -> None:
    model, layer, feeds, before = outlier_case()
    tensor, top = layer.edges[0].tensor, np.abs(feeds["x"]).max(axis=0)
    plain = model.clone()
    lowering_for("int8").apply(plain, layer, {tensor: float(top.max())})
    scale = unpack(pack(np.sqrt(top)))
    own = Treatment("smoothquant:0.5", {tensor: float((top / scale).max())}, {"scale": pack(scale)})
    lowering = treated(lowering_for("int8"), own)
    assert lowering.requires(model, layer) is None
    change = lowering.apply(model, layer, {tensor: float(top.max())})
    assert change.changed and "scaled by a Mul" in change.remark
    assert lowering.ensures(model, layer) is None
    assert error(model, feeds, before) < error(plain, feeds, before) / 20


def test_rows_are_quantized_alone() -> None:
    model, layer, feeds, _ = outlier_case()
    feeds["x"][1] *= 1000
    feeds["x"][2] = 0
    lowering = treated(lowering_for("int8_dynamic"), Treatment("rows"))
    before = run(model.clone(), feeds)
    assert lowering.apply(model, layer, {}).changed
    assert lowering.ensures(model, layer) is None
    after = run(model, feeds)
    alone = {"x": feeds["x"][:1]}
    assert np.array_equal(run(model, alone), after[:1])  # batch-mates do not matter
    np.testing.assert_allclose(after[2], before[2], atol=1e-6)
    assert np.abs(after - before)[3:].max() < 0.05 * np.abs(before[3:]).max()


def test_clipped_blocks_lower_the_weighted_error() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_t(3, size=(64, 16)).astype(np.float32)
    importance = np.ones(64, np.float32)
    importance[::7] = 50
    clipped = clip_blocks(weight, importance, 4, 32)

    def cost(stored: np.ndarray) -> np.ndarray:
        errors = importance[:, None] * np.square(dequantized(stored, 4, 32) - weight)
        return errors.reshape(2, 32, 16).sum(axis=1)

    assert (cost(clipped) <= cost(weight) * (1 + 1e-6)).all()
    assert cost(clipped).sum() < 0.9 * cost(weight).sum()


@pytest.mark.parametrize(("k", "block"), [(100, 100), (96, 64), (72, 32)])
def test_blocks_of_any_size_are_clipped_a_part_of_one_too(k: int, block: int) -> None:
    weight = np.random.default_rng(0).standard_t(3, size=(k, 8)).astype(np.float32)
    importance = np.linspace(1, 9, k, dtype=np.float32)
    clipped = clip_blocks(weight, importance, 4, block)
    assert clipped.shape == weight.shape

    def cost(stored: np.ndarray) -> float:
        return float((importance[:, None] * (dequantized(stored, 4, block) - weight) ** 2).sum())

    assert cost(clipped) < cost(weight)


def test_awq_clips_the_weight_that_it_scaled() -> None:
    model, layer, feeds, before = outlier_case()
    vectors = {"scale": pack(SCALE), "importance": pack(np.ones(K, np.float32))}
    lowering = treated(lowering_for("w4a16"), Treatment("awq:0.5,clip", {}, vectors, 16))
    assert lowering.requires(model, layer) is None
    change = lowering.apply(model, layer, {})
    assert change.changed and lowering.ensures(model, layer) is None
    stored = [v.const_value for v in model.graph.initializers.values()]
    assert any(t is not None and t.dtype == ir.DataType.INT4 for t in stored)
    assert error(model, feeds, before) < 0.05 * float(np.square(before).mean())


@pytest.mark.parametrize("block", [32, 64])
def test_a_block_size_is_taken_as_asked(block: int) -> None:
    s = Sketch(1)
    x = s.input("x", F, ("batch", 128))
    model, layer = ready(s.model(y=s.linear(x, "m.lin", 128, 8)), "lin")
    lowering = treated(lowering_for("w4a16"), Treatment(f"block:{block}", block=block))
    assert lowering.apply(model, layer, {}).block == block
    node = next(n for n in model.graph if n.op_type == "DequantizeLinear")
    assert node.attributes.get_int("block_size", 0) == block


@pytest.mark.parametrize(
    ("treatment", "format_name", "words"),
    [
        (Treatment("smoothquant:0.5"), "int8", "no vector `scale`"),
        (Treatment("awq:0.5", {}, {"scale": pack(SCALE)}, 32), "int8", "is for w4a16"),
        (Treatment("block:32"), "w4a16", "names no `block`"),
        (Treatment("smothquant:0.5"), "int8", "smoothquant"),
    ],
)
def test_a_wrong_treatment_is_told(treatment: Treatment, format_name: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        treated(lowering_for(format_name), treatment)


def test_a_vector_of_another_length_is_refused() -> None:
    model, layer, _, _ = outlier_case()
    own = Treatment("smoothquant:0.5", {}, {"scale": pack(np.ones(7, np.float32))})
    refusal = treated(lowering_for("int8"), own).requires(model, layer)
    assert refusal is not None and "has 7 numbers" in refusal.reason


def test_packed_vectors_come_back_and_damaged_ones_are_told() -> None:
    np.testing.assert_allclose(unpack(pack(SCALE)), SCALE, rtol=1e-3)
    assert unpack(pack(np.array([0.0, 1e9]))).tolist() == pytest.approx([6.104e-5, 65504], rel=1e-3)
    for text in ("!!", "AAA=", "", pack(np.ones(3))[:-2]):
        with pytest.raises(InputError, match="treatment"):
            unpack(text)
