from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qbench.calibration import Calibration, calibrate
from qbench.errors import DataError, MeasurementError, ModelError
from qbench.graph.intermediates import implicit_of, nodes_by_name, tensors_of
from qbench.graph.layers import find_layers
from qbench.records import Edge, Kind, Layer, Layers, Occurrence
from qbench.testing.graphs import Sketch, decompose, tiny_convnet, tiny_decoder, tiny_encoder

MOVES = {"Reshape", "Transpose", "Gather", "Shape", "Slice", "Unsqueeze", "Cast", "Squeeze"}


@dataclass(frozen=True)
class Feeds:
    feeds: Mapping[str, np.ndarray]
    rows: np.ndarray = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.rows is None:
            object.__setattr__(self, "rows", np.arange(len(next(iter(self.feeds.values())))))


class OrtSession:
    def __init__(self, model: ir.Model) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        payload = ir.to_proto(model).SerializeToString()
        self._raw = ort.InferenceSession(payload, options, providers=["CPUExecutionProvider"])

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [output.name for output in self._raw.get_outputs()]
        return dict(zip(names, self._raw.run(names, dict(feeds)), strict=True))


def layers_of(model: ir.Model) -> Layers:
    """Make a layer of every node that computes: its float inputs are edges."""
    kinds = {"LayerNormalization": Kind.LAYERNORM, "Softmax": Kind.SOFTMAX, "Gelu": Kind.ACTIVATION}
    found = []
    for node in model.graph:
        if node.op_type in MOVES or "Div" in node.name and "self" not in node.name:
            continue
        edges = tuple(
            Edge(node.name, i, value.name)
            for i, value in enumerate(node.inputs)
            if value is not None and not value.is_initializer() and value.dtype == ir.DataType.FLOAT
        )
        inputs = tuple(v.name if v is not None else "" for v in node.inputs)
        use = Occurrence(
            node.op_type, (node.name,), inputs, node.outputs[0].name, edges, attributes(node)
        )
        kind = kinds.get(node.op_type, Kind.LINEAR)
        found.append(Layer(node.name.strip("/").replace("/", "."), kind, (use,)))
    return Layers(tuple(found), ())


def attributes(node: ir.Node) -> dict[str, int | str]:
    return {
        name: node.attributes[name].value
        for name in ("axis", "approximate")
        if name in node.attributes
    }


def texts(count: int, lengths: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 100, lengths[i % len(lengths)]) for i in range(count)]


def batched(items: list[np.ndarray], size: int, pad_to: int | None = None) -> list[Feeds]:
    """Batches of items in order; padded to the longest of the batch, or to a given length."""
    batches = []
    for start in range(0, len(items), size):
        part = items[start : start + size]
        length = pad_to or max(len(item) for item in part)
        ids, mask = np.zeros((2, len(part), length), np.int64)
        for row, item in enumerate(part):
            ids[row, : len(item)], mask[row, : len(item)] = item, 1
        batches.append(Feeds({"input_ids": ids, "attention_mask": mask}))
    return batches


def run(model: ir.Model, batches: list[Feeds], **options: int) -> Calibration:
    return calibrate(model, layers_of(model), batches, OrtSession, **options)


def assert_same(first: Calibration, second: Calibration, relative: float = 1e-6) -> None:
    """Compare to a relative error of the tensor's own magnitude."""
    assert [r.tensor for r in first.ranges] == [r.tensor for r in second.ranges]
    for a, b in zip(first.ranges, second.ranges, strict=True):
        assert a.count == b.count, a.tensor
        near = {"rel": relative, "abs": relative * a.absmax}
        for name in ("min", "max", "absmax", "mean", "std"):
            assert getattr(b, name) == pytest.approx(getattr(a, name), **near), (a.tensor, name)
        assert b.kurtosis == pytest.approx(a.kurtosis, rel=1e-5, abs=1e-5), a.tensor
        assert b.channel_absmax == pytest.approx(a.channel_absmax, **near), a.tensor
        assert b.non_finite == a.non_finite


def fixed(model: ir.Model, batch: int | str, sequence: int) -> ir.Model:
    for value in model.graph.inputs:
        value.shape = ir.Shape([batch, sequence])
    for node in model.graph:
        for value in node.outputs:
            value.shape = None
    return model


def test_every_edge_and_output_has_a_range_in_order() -> None:
    model = tiny_encoder()
    found = run(model, batched(texts(8, (9,)), 4))
    layers = layers_of(model)
    edges = {edge.tensor for layer in layers.layers for edge in layer.edges}
    outputs = {use.output for layer in layers.layers for use in layer.occurrences}
    tensors = [r.tensor for r in found.ranges if not r.implicit]
    assert set(tensors) == edges | outputs
    assert len(tensors) == len(set(tensors))
    assert set(found.histograms) == {r.tensor for r in found.ranges}
    for r in found.ranges:
        assert found.histograms[r.tensor][1].sum() == r.count


@pytest.mark.parametrize(
    "model",
    [tiny_encoder(), tiny_decoder(), decompose(tiny_encoder())],
    ids=["encoder", "decoder", "decomposed"],
)
def test_layers_of_any_graph_get_what_their_formats_need(model: ir.Model) -> None:
    layers = find_layers(model)
    wanted = {value.name for value in model.graph.inputs}
    batches = [
        Feeds({name: b.feeds[name] for name in wanted}) for b in batched(texts(4, (6, 9)), 2)
    ]
    if "attention_mask" not in wanted:
        batches = [Feeds({k: v[:, :6] for k, v in b.feeds.items()}) for b in batches]
    found = calibrate(model, layers, batches, OrtSession).by_tensor()
    nodes = nodes_by_name(model.graph)
    for layer in layers.layers:
        assert set(tensors_of(layer, nodes)) <= set(found), layer.name
        assert {item.name for item in implicit_of(layer)} <= set(found), layer.name
        if layer.kind is Kind.LAYERNORM:
            assert found[f"{layer.name}.sum_of_squares"].implicit
        if layer.kind is Kind.LINEAR:
            assert all(found[edge.tensor].channel_absmax for edge in layer.edges)
    assert all(r.fp16_headroom > 1 for r in found.values())


def test_figures_are_those_of_the_values() -> None:
    model = tiny_encoder()
    items = texts(8, (9,))
    found = run(model, batched(items, 4)).by_tensor()
    name = next(t for t in found if "intermediate_act_fn" in t)
    node = next(n for n in model.graph if n.name == name.removesuffix("_output_0"))
    tapped = model.clone()
    tapped.graph.outputs.append(next(n for n in tapped.graph if n.name == node.name).outputs[0])
    values = OrtSession(tapped).run(batched(items, 8)[0].feeds)[name].astype(np.float64)
    seen = found[name]
    near = {"rel": 1e-6}  # fewer taps, other fusions
    assert seen.count == values.size
    assert (seen.min, seen.max) == pytest.approx((values.min(), values.max()), **near)
    assert (seen.mean, seen.std) == pytest.approx((values.mean(), values.std()), **near)
    central = values - values.mean()
    assert seen.kurtosis == pytest.approx((central**4).mean() / values.var() ** 2 - 3, rel=1e-5)
    assert seen.channel_absmax == pytest.approx(np.abs(values).max(axis=(0, 1)), **near)
    for percentile, value in seen.percentiles.items():
        low, high = (
            np.percentile(np.abs(values), float(percentile), method=side)
            for side in ("lower", "higher")
        )
        assert low * (1 - 1 / 128) <= value <= high * (1 + 1 / 128)
    assert seen.fp16_headroom == pytest.approx(65504 / seen.absmax)


def test_batch_sizes_agree() -> None:
    model = tiny_encoder()
    items = texts(16, (11,))
    one, four, sixteen = (run(model, batched(items, size)) for size in (1, 4, 16))
    assert_same(one, four)
    assert_same(one, sixteen)


def test_decoder_batch_sizes_agree() -> None:
    model = tiny_decoder()
    items = texts(8, (11,))
    one, eight = (
        run(model, [Feeds({"input_ids": b.feeds["input_ids"]}) for b in batched(items, size)])
        for size in (1, 8)
    )
    assert_same(one, eight)
    softmax = next(r for r in one.ranges if r.tensor.endswith("Softmax_output_0"))
    assert softmax.max <= 1
    scores = next(r for r in one.ranges if r.non_finite)
    assert scores.absmax < 1e4  # what the causal mask filled in counts apart
    assert scores.non_finite == 8 * 4 * 11 * 10 // 2


def test_padding_does_not_count() -> None:
    model = tiny_encoder()
    items = texts(12, (4, 7, 11, 8))  # 8 is the size of a head
    alone = run(model, batched(items, 1))
    assert_same(alone, run(model, batched(items, 12)))
    assert_same(alone, run(model, batched(items, 5, pad_to=8 * 2)))


@pytest.mark.parametrize("length", [8, 12, 32])  # a head is 8 and the width 32
@pytest.mark.parametrize("batch", ["batch", 4])
def test_padding_of_a_fixed_sequence_does_not_count(length: int, batch: int | str) -> None:
    items = texts(12, (4, 7, 8, 5))
    alone = run(tiny_encoder(), batched(items, 1))
    model = fixed(tiny_encoder(), batch, length)
    together = run(model, batched(items, 4, pad_to=length))
    tables = {r.tensor for r in alone.ranges if "position" in r.tensor}
    drop = [
        dataclasses.replace(
            c,
            ranges=tuple(
                dataclasses.replace(r, channel_absmax=())
                for r in c.ranges
                if r.tensor not in tables or batch == "batch"
            ),
        )
        for c in (alone, together)
    ]
    assert_same(drop[0], drop[1], 2e-6)


def test_repeated_rows_do_not_count() -> None:
    model = fixed(tiny_encoder(), 4, 8)
    items = texts(6, (8,))
    full = run(tiny_encoder(), batched(items, 6))
    first, last = batched(items[:4], 4)[0], batched([*items[4:], items[5], items[5]], 4)[0]
    shown = run(model, [first, Feeds(last.feeds, np.array([4, 5]))])
    assert_same(
        *(
            dataclasses.replace(
                c,
                ranges=tuple(
                    dataclasses.replace(r, channel_absmax=())
                    for r in c.ranges
                    if "position" not in r.tensor
                ),
            )
            for c in (full, shown)
        )
    )


def test_a_small_budget_changes_nothing() -> None:
    model = tiny_encoder()
    batches = batched(texts(8, (9,)), 8)
    plain = run(model, batches)
    assert_same(plain, run(model, batches, output_budget=200_000))  # pieces of the batch
    assert_same(plain, run(model, batches, output_budget=20_000))  # and of the taps


def test_a_convolutional_net_has_no_sequence() -> None:
    model = tiny_convnet()
    images = np.random.default_rng(0).normal(size=(4, 3, 16, 16)).astype(np.float32)
    assert_same(
        run(model, [Feeds({"image": images})]),
        run(model, [Feeds({"image": images[i : i + 1]}) for i in range(4)]),
    )


def test_implicit_intermediates_of_normalisation() -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 300))
    y = s.op("Gelu", s.layer_norm(x, "norm", 300), at="act", approximate="tanh")
    model = s.model(y=y)
    values = np.full((2, 300), 300.0, np.float32)
    values[:, ::2] = -300.0
    found = run(model, [Feeds({"x": values})]).by_tensor()
    squares = found["norm.LayerNormalization.sum_of_squares"]
    assert squares.implicit and squares.layer == "norm.LayerNormalization"
    assert squares.max == 300 * 300.0**2 and squares.count == 2
    assert squares.fp16_headroom < 1 < found["x"].fp16_headroom
    cube = found["act.Gelu.cube"]
    assert cube.implicit
    normal = next(r for t, r in found.items() if t.startswith("/norm"))
    assert cube.absmax == pytest.approx(normal.absmax**3)


def test_non_finite_values_count_apart() -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 4))
    model = s.model(y=s.op("Mul", x, s.number(2.0), at="twice"))
    feed = np.array([[1, np.nan, 3, np.inf], [1, 2, -3, 4]], np.float32)
    seen = run(model, [Feeds({"x": feed})]).by_tensor()["x"]
    assert (seen.count, seen.non_finite, seen.min, seen.max) == (6, 2, -3, 4)
    assert seen.channel_absmax == (1, 2, 3, 4)
    with pytest.raises(MeasurementError, match="every value of 'x', 'y' was NaN"):
        run(model, [Feeds({"x": feed[:1, 1:2].repeat(4, axis=1)})])


def test_constant_tensors_stay_valid() -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 4))
    model = s.model(y=s.op("Mul", x, s.number(0.0), at="none"))
    found = run(model, [Feeds({"x": np.full((3, 4), 2.5, np.float32)})]).by_tensor()
    assert (found["x"].std, found["x"].kurtosis) == (0, 0)
    assert found["y"].absmax == 0 and found["y"].fp16_headroom == np.inf


def test_missing_ranges_are_named() -> None:
    model = tiny_encoder()
    with pytest.raises(MeasurementError, match="saw no value of .*word_embeddings") as caught:
        run(model, [])
    assert str(caught.value).count("/") > 30
    masked = Feeds({k: np.zeros((2, 8), np.int64) for k in ("input_ids", "attention_mask")})
    with pytest.raises(MeasurementError, match="saw no value"):
        run(model, [masked])


def test_feeds_that_do_not_fit_name_both_sides() -> None:
    ids = np.ones((1, 4), np.int64)
    with pytest.raises(DataError, match="missing inputs 'attention_mask'.*'token_type_ids'"):
        run(tiny_encoder(), [Feeds({"input_ids": ids, "token_type_ids": ids})])


def test_an_edge_that_is_no_tensor_is_refused() -> None:
    use = Occurrence("MatMul", (), ("nowhere",), "embeding", (Edge("n", 0, "nowhere"),))
    layers = Layers((Layer("a", Kind.LINEAR, (use,)),), ())
    with pytest.raises(ModelError, match="'nowhere'.*'embeding' .did you mean 'embedding'"):
        calibrate(tiny_encoder(), layers, batched(texts(1, (4,)), 1), OrtSession)


def test_unclear_padding_is_refused() -> None:
    s = Sketch(0)
    ids = s.input("input_ids", ir.DataType.INT64, ("batch", "sequence"))
    mask = s.input("attention_mask", ir.DataType.INT64, ("batch", "sequence"))
    x = s.op("Cast", s.op("Add", ids, mask), to=ir.DataType.FLOAT)
    model = s.model(y=s.op("Relu", s.op("Concat", x, x, axis=1), at="both"))
    run(model, batched(texts(2, (4,)), 2))
    with pytest.raises(MeasurementError, match=r"\[batch, 2×sequence\].*equal length"):
        run(model, batched(texts(2, (4, 3)), 2))
