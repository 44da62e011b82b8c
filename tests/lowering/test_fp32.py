"""fp32 beside fp16: layers that no island takes in, asked for or known to overflow."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.engine.build import lower_graph
from qbench.graph.layers import find_layers
from qbench.lowering import lowering_for
from qbench.lowering.fp32 import why_wide
from qbench.lowering.islands import make_islands
from qbench.lowering.overflow import find_overflow, keep_overflowing
from qbench.records import Kind, Layers, Plan, PlanLayer, Status, TensorRange
from qbench.runtime.ort import SessionSettings, open_session
from qbench.testing.graphs import decompose, tiny_decoder, tiny_encoder
from qbench.testing.lowerings import run_graph

IDS = np.random.default_rng(0).integers(1, 99, (2, 7))
FEEDS = {"input_ids": IDS, "attention_mask": np.array([[1] * 7, [1] * 5 + [0] * 2])}
HOT = ("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense")
TRT = BACKENDS["tensorrt"]


def overflowing(factor: float = 3e4) -> ir.Model:
    """Return an encoder whose first feed-forward passes 65504 and comes back."""
    model = tiny_encoder(layers=2)
    layers = find_layers(model).by_name()
    for name, by in (("intermediate.dense", factor), ("output.dense", 1 / factor)):
        layer = next(x for x in layers.values() if x.name.endswith(f"layer.0.{name}"))
        value = model.graph.initializers[layer.weight]
        value.const_value = ir.tensor(value.const_value.numpy() * np.float32(by), name=value.name)
    return model


def ranges_of(model: ir.Model) -> list[TensorRange]:
    """Return the range of every tensor, from one run of the graph as written."""
    tapped = model.clone()
    given = {v.name for v in tapped.graph.outputs}
    for node in tapped.graph:
        for value in node.outputs:
            if value.name not in given and value.dtype is ir.DataType.FLOAT:
                tapped.graph.outputs.append(value)
    values = {n: v for n, v in run_graph(tapped, FEEDS).items() if v.dtype == np.float32 and v.size}
    fills = -60000  # what masks give is in no range
    return [
        TensorRange(
            tensor=name,
            layer="",
            count=v.size,
            min=float(v.min()),
            max=float(v.max()),
            absmax=float(np.abs(v[v > fills]).max(initial=0.0)),
            mean=0.0,
            std=1.0,
            kurtosis=0.0,
            percentiles={},
            channel_absmax=(),
            fp16_headroom=1.0,
        )
        for name, v in values.items()
    ]


def halves(graph: ir.Model) -> dict[str, np.ndarray]:
    """Return every tensor in fp16, each node run as it stands."""
    tapped = graph.clone()
    given = {v.name for v in tapped.graph.outputs}
    for node in tapped.graph:
        for value in node.outputs:
            if value.dtype is ir.DataType.FLOAT16 and value.name not in given:
                tapped.graph.outputs.append(value)
    with open_session(tapped, SessionSettings("ort-cpu", 1, {}, None, False)) as session:
        return {n: v for n, v in session.run(FEEDS).items() if v.dtype == np.float16}


def plan_of(layers: Layers, wide: set[str]) -> Plan:
    rows = tuple(
        PlanLayer(x.name, x.kind, "fp32" if x.name in wide else "fp16") for x in layers.layers
    )
    return Plan(1, "tensorrt", "", "0" * 64, rows)


def test_layers_that_overflow_are_found_and_kept() -> None:
    model = overflowing()
    layers = find_layers(model)
    found = find_overflow(model, layers, ranges_of(model))
    assert {name.split("layer.0.")[-1] for name in found} == set(HOT)
    assert all("fp16 overflows" in why and "65504" in why for why in found.values())
    assert find_overflow(tiny_encoder(), layers, ranges_of(tiny_encoder())) == {}


def test_what_comes_near_is_kept_too_for_other_data_may_pass() -> None:
    model = tiny_encoder()
    layers = find_layers(model)
    hot = next(x for x in layers.layers if x.kind is Kind.LINEAR)
    for top, words in ((32_000.0, ""), (40_000.0, "may overflow"), (70_000.0, "fp16 overflows")):
        seen = TensorRange(
            hot.occurrences[0].output, "", 1, -top, top, top, 0.0, 1.0, 0.0, {}, (), 65504 / top
        )
        why = find_overflow(model, layers, [seen]).get(hot.name, "")
        assert words in why and bool(words) == bool(why)


def test_the_fp16_base_is_finite_with_them_and_infinite_without() -> None:
    model = overflowing()
    layers, before = find_layers(model), run_graph(model, FEEDS)["embedding"]
    found = find_overflow(model, layers, ranges_of(model))
    kept = lower_graph(model, layers, plan_of(layers, set(found)))
    values = halves(kept)
    assert len(values) > 20 and all(np.isfinite(v).all() for v in values.values())
    np.testing.assert_allclose(run_graph(kept, FEEDS)["embedding"], before, atol=0.02)
    rest = {name for name in found if not name.endswith("act_fn")}
    lost = lower_graph(model, layers, plan_of(layers, rest))
    assert not all(np.isfinite(v).all() for v in halves(lost).values())


def test_the_same_islands_come_of_marks_and_of_a_plan() -> None:
    model = overflowing()
    layers, ranges = find_layers(model), ranges_of(model)
    marked = keep_overflowing(model, layers, ranges, TRT)
    assert marked is not model and keep_overflowing(model, layers, ranges, BACKENDS["ort-cpu"])
    make_islands(marked, layers, {x.name: "fp16" for x in layers.layers}, whole=True)
    planned = lower_graph(model, layers, plan_of(layers, set(find_overflow(model, layers, ranges))))
    one, two = (run_graph(g, FEEDS)["embedding"] for g in (marked, planned))
    np.testing.assert_array_equal(one, two)


def test_only_backends_with_islands_keep_layers() -> None:
    model = overflowing()
    layers = find_layers(model)
    assert keep_overflowing(model, layers, ranges_of(model), BACKENDS["ort-cpu"]) is model


@pytest.mark.parametrize("kind", [Kind.LINEAR, Kind.LAYERNORM, Kind.SOFTMAX, Kind.EMBEDDING])
@pytest.mark.parametrize("spelled_out", [False, True])
def test_a_layer_in_fp32_has_casts_at_its_borders(kind: Kind, spelled_out: bool) -> None:
    model = decompose(tiny_encoder()) if spelled_out else tiny_encoder()
    layers, before = find_layers(model), run_graph(model, FEEDS)["embedding"]
    layer = next(x for x in layers.layers if x.kind is kind)
    lowering = lowering_for("fp32", backend=TRT)
    assert lowering.requires(model, layer) is None
    change = lowering.apply(model, layer, {})
    assert change.changed and change.weight_bytes == layer.weight_bytes
    make_islands(model, layers, {x.name: "fp16" for x in layers.layers}, whole=True)
    assert lowering.ensures(model, layer) is None
    nodes = {str(n.name): n for n in model.graph}
    kept = [nodes[name] for name in layer.nodes if name in nodes]
    inputs = [v for n in kept for v in n.inputs if v is not None]
    assert kept and not any(v.dtype is ir.DataType.FLOAT16 for v in inputs)
    np.testing.assert_allclose(run_graph(model, FEEDS)["embedding"], before, atol=0.05)


def test_keys_and_values_compute_nothing() -> None:
    model = tiny_encoder()
    layer = next(x for x in find_layers(model).layers if x.kind is Kind.KV)
    said = lowering_for("fp32", backend=TRT).requires(model, layer)
    assert said is not None and said.status is Status.NOT_APPLICABLE


def test_a_key_that_overflows_is_kept_with_what_reads_it() -> None:
    model = tiny_encoder()
    layers = find_layers(model)
    key = next(x for x in layers.layers if x.name.endswith("layer.0.attention.self.key"))
    for name in (key.weight, key.weight.replace("weight", "bias")):
        value = model.graph.initializers[name]
        value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1e5), name=value.name)
    found = find_overflow(model, layers, ranges_of(model))
    ends = {name.rpartition("attention.self.")[2] for name in found if "layer.0" in name}
    assert {"key", "k", "scores"} <= ends and "value" not in ends
    marked = keep_overflowing(model, layers, ranges_of(model), TRT)
    nodes = {str(n.name): n for n in marked.graph}
    cache = next(x for x in layers.layers if x.name in found and x.kind is Kind.KV)
    assert "overflows" in why_wide(nodes, cache)
    make_islands(marked, layers, {x.name: "fp16" for x in layers.layers}, whole=True)
    assert all(np.isfinite(v).all() for v in halves(marked).values())
    planned = lower_graph(model, layers, plan_of(layers, set(found)))
    assert all(np.isfinite(v).all() for v in halves(planned).values())


def test_what_shares_a_weight_is_kept_too() -> None:
    model = tiny_decoder(tied=True)
    layers = find_layers(model)
    table = next(x for x in layers.layers if x.kind is Kind.EMBEDDING)
    head = next(x for x in layers.layers if x.tie and x is not table)
    output = head.occurrences[0].output
    seen = TensorRange(output, "", 1, -7e4, 7e4, 7e4, 0.0, 1.0, 0.0, {}, (), 0.9)
    found = find_overflow(model, layers, [seen])
    assert set(found) == {table.name, head.name}
    assert head.name in found[table.name] and "shares" in found[table.name]
