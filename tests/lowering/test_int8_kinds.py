"""int8 on layers that are no product with a matrix: which tensors it rounds, and where."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.graph.layers import find_layers
from qbench.lowering import lowering_for
from qbench.lowering.channels import Channels, channel_axis, quantize_channels
from qbench.records import Kind, Status
from qbench.runtime.ort import settings_for
from qbench.runtime.probe import annotate, probe_tensors
from qbench.testing.graphs import Sketch, decompose, tiny_convnet, tiny_decoder, tiny_encoder
from qbench.testing.lowerings import run_graph

INT8 = lowering_for("int8")
F = ir.DataType.FLOAT
IDS = np.random.default_rng(0).integers(1, 99, (2, 7))
ENCODER = {"input_ids": IDS, "attention_mask": np.array([[1] * 7, [1] * 5 + [0] * 2])}
DECODER = {"input_ids": IDS}
CACHE = DECODER | {
    f"past_key_values.{i}.{part}": np.random.default_rng(i).normal(size=(2, 2, 3, 8)).astype("f4")
    for i in range(2)
    for part in ("key", "value")
}
IMAGE = {"image": np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype(np.float32)}
GRAPHS = {
    "encoder": (tiny_encoder, ENCODER),
    "decomposed": (lambda: decompose(tiny_encoder()), ENCODER),
    "decoder": (tiny_decoder, DECODER),
    "cache": (lambda: tiny_decoder(past=True), CACHE),
    "convnet": (tiny_convnet, IMAGE),
}
KINDS = {
    Kind.ATTENTION_SCORES, Kind.ATTENTION_CONTEXT, Kind.SOFTMAX, Kind.KV, Kind.LAYERNORM,
    Kind.EMBEDDING, Kind.CONV, Kind.LINEAR,
}  # fmt: skip


def tapped(model: ir.Model, feeds, names) -> dict[str, np.ndarray]:
    copy = model.clone()
    made = {v.name: v for node in copy.graph for v in node.outputs}
    given = {v.name for v in copy.graph.outputs}
    copy.graph.outputs.extend(made[name] for name in names if name in made and name not in given)
    return run_graph(copy, feeds) | {name: feeds[name] for name in names if name in feeds}


@pytest.mark.parametrize("name", GRAPHS)
def test_every_pair_rounds_to_its_own_scale(name: str) -> None:
    build, feeds = GRAPHS[name]
    model = build()
    annotate(model, probe_tensors(model, feeds, settings_for(BACKENDS["ort-cpu"], 1)))
    before, seen = run_graph(model, feeds), Counter()
    for layer in find_layers(model).layers:
        if layer.kind not in KINDS:
            said = INT8.requires(model, layer)
            assert said is not None and said.status is Status.NOT_APPLICABLE
            continue
        assert INT8.requires(model, layer) is None
        edges = {edge.tensor for edge in layer.edges}
        values = tapped(model, feeds, edges)
        clips = {t: float(np.abs(np.maximum(values[t], -100)).max()) for t in edges}
        lowered = model.clone()
        change = INT8.apply(lowered, layer, clips)
        assert change.changed and INT8.ensures(lowered, layer) is None
        pairs = [n for n in lowered.graph if n.op_type == "QuantizeLinear"]
        assert all(len(n.outputs[0].uses()) == 1 for n in pairs)
        assert all(len(n.inputs[0].uses()) for n in pairs)
        _check_pairs(lowered, feeds, pairs)
        after = run_graph(lowered, feeds)
        for key, value in before.items():
            assert after[key].shape == value.shape
            np.testing.assert_allclose(after[key], value, atol=0.3, err_msg=layer.name)
        moved = any(not np.array_equal(after[k], before[k]) for k in before)
        seen[layer.kind, moved] += 1
    assert all(seen[kind, True] for kind, _ in seen), seen


def _check_pairs(lowered: ir.Model, feeds, pairs) -> None:
    wanted = []
    for node in pairs:
        back = next(reader for reader, _ in node.outputs[0].uses())
        assert [v.name for v in back.inputs[1:]] == [v.name for v in node.inputs[1:]]
        zero = node.inputs[2].const_value
        assert zero.dtype == ir.DataType.INT8 and zero.numpy() == 0
        wanted.append((node.inputs[0].name, back.outputs[0].name, node.inputs[1].const_value))
    values = tapped(lowered, feeds, [n for w in wanted for n in w[:2]])
    for source, result, scale in wanted:
        step = scale.numpy()
        rounded = np.clip(np.rint(values[source] / step), -128, 127) * step
        close = np.isclose(values[result], rounded, atol=1e-6)
        assert close.mean() > 0.999, source


def test_readers_of_a_softmax_get_a_pair_each() -> None:
    s = Sketch(0)
    x = s.input("x", F, ("a", 8))
    p = s.op("Softmax", x, at="m", axis=-1)
    model = s.model(p=p, y=s.op("Tanh", p), z=s.op("Neg", p))
    (layer,) = [x for x in find_layers(model).layers if x.kind is Kind.SOFTMAX]
    INT8.apply(model, layer, {"x": 1.0})
    assert sum(n.op_type == "QuantizeLinear" for n in model.graph) == 3
    given = run_graph(model, {"x": np.random.default_rng(0).normal(size=(3, 8)).astype("f4")})
    assert list(given) == ["p", "y", "z"]
    steps = given["p"] * 127
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-4)
    np.testing.assert_allclose(given["y"], np.tanh(given["p"]), atol=1e-6)
    np.testing.assert_array_equal(given["z"], -given["p"])


def test_a_logarithm_of_probabilities_is_refused() -> None:
    s = Sketch(0)
    x = s.input("x", F, ("a", 8))
    model = s.model(y=s.op("Neg", s.op("LogSoftmax", x, at="m")))
    (layer,) = [x for x in find_layers(model).layers if x.kind is Kind.SOFTMAX]
    said = INT8.requires(model, layer)
    assert said is not None and said.status is Status.NOT_APPLICABLE and "lower end" in said.reason


# --- the channel axis ----------------------------------------------------------------------------

CONVS = [
    ("Conv", (6, 4, 3, 3), 1),
    ("Conv", (6, 2, 3, 3), 2),
    ("Conv", (4, 1, 5), 4),
    ("ConvTranspose", (4, 6, 3, 3), 1),
    ("ConvTranspose", (4, 3, 3), 2),
]


@pytest.mark.parametrize(("op", "shape", "group"), CONVS)
def test_convolutions_scale_their_output_channels(op, shape, group) -> None:
    s = Sketch(0)
    random = np.random.default_rng(3)
    spatial = len(shape) - 2
    inputs = shape[1] * group if op == "Conv" else shape[0]
    x = s.input("x", F, ("b", inputs, *[9] * spatial))
    axis = 0 if op == "Conv" else 1
    sizes = np.geomspace(0.01, 100, shape[axis]).astype(np.float32)
    weight = random.normal(size=shape).astype(np.float32)
    weight *= sizes.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    y = s.op(op, s.op("Relu", x), s.constant("w", weight), at="m.conv", group=group)
    model = s.model(y=y)
    (layer,) = [x for x in find_layers(model).layers if x.kind is Kind.CONV]
    assert INT8.requires(model, layer) is None
    lowered, edge = model.clone(), layer.edges[0].tensor
    change = INT8.apply(lowered, layer, {edge: 4.0})
    assert INT8.ensures(lowered, layer) is None
    channels = shape[axis]
    assert change.weight_bytes == weight.size + 4 * channels + 4 + 1
    value = np.abs(random.normal(size=(2, inputs, *[9] * spatial))).astype(np.float32)
    before, after = (run_graph(m, {"x": value})["y"] for m in (model, lowered))
    others = tuple(i for i in range(before.ndim) if i != 1)
    error = np.abs(after - before).max(axis=others) / np.abs(before).max(axis=others)
    assert error.max() < 0.05, "each channel has a scale that fits it"


def scaled_back(weight: np.ndarray, axis: int) -> np.ndarray:
    whole, scale = quantize_channels(Channels(weight, axis))
    return whole * scale.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])


@pytest.mark.parametrize("seed", range(12))
def test_the_channel_axis_is_the_one_that_no_sum_runs_along(seed: int) -> None:
    """A scale along the axis commutes with the operator; along a summed axis it would not."""
    random = np.random.default_rng(seed)
    k, n, m = (int(i) for i in random.integers(2, 9, 3))
    x, w = random.normal(size=(m, k)), random.normal(size=(k, n))
    scale = random.uniform(0.5, 2, n)

    def check(stored: np.ndarray, axis: int, compute) -> None:
        shape = [-1 if i == axis % stored.ndim else 1 for i in range(stored.ndim)]
        np.testing.assert_allclose(compute(stored * scale.reshape(shape)), (x @ w) * scale)

    check(w, channel_axis("MatMul", {}, 2), lambda s: x @ s)
    check(w.T, channel_axis("MatMul", {}, 2, operand=0), lambda s: (s @ x.T).T)
    check(w, channel_axis("Gemm", {"transB": 0}, 2), lambda s: x @ s)
    check(w.T, channel_axis("Gemm", {"transB": 1}, 2), lambda s: x @ s.T)
    check(w.T, channel_axis("Gemm", {"transA": 0}, 2, operand=0), lambda s: (s @ x.T).T)
    check(w, channel_axis("Gemm", {"transA": 1}, 2, operand=0), lambda s: (s.T @ x.T).T)
    table = random.normal(size=(5, n))
    ids = random.integers(0, 5, 4)
    for given, axis in ((table, 0), (table, -2), (table.T, 1), (table.T, -1)):
        found = channel_axis("Gather", {"axis": axis}, 2)
        shape = [-1 if i == found else 1 for i in range(2)]
        rows = np.take(given * scale.reshape(shape), ids, axis=axis)
        rows = rows if axis in (0, -2) else rows.T
        np.testing.assert_allclose(rows, table[ids] * scale)


@pytest.mark.parametrize("seed", range(4))
def test_no_element_is_off_by_more_than_half_a_step_of_its_channel(seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = tuple(int(i) for i in random.integers(1, 6, 4))
    weight = random.normal(size=shape).astype(np.float32)
    for axis in range(4):
        others = tuple(i for i in range(4) if i != axis)
        step = np.abs(weight).max(axis=others, keepdims=True) / 127
        assert (np.abs(scaled_back(weight, axis) - weight) <= 0.5001 * step).all()


@pytest.mark.parametrize(("op", "rank"), [("MatMul", 1), ("Gather", 1), ("Relu", 2)])
def test_what_has_no_output_channel_is_an_error(op: str, rank: int) -> None:
    with pytest.raises(ValueError, match="no output-channel axis"):
        channel_axis(op, {}, rank)
