from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qbench.backends import BACKENDS
from qbench.graph.layers import find_layers
from qbench.graph.segments import (
    BORDER_KEY,
    TensorFact,
    choose_cuts,
    inside_layers,
    live_sets,
    make_segments,
    node_costs,
    segment_model,
)
from qbench.runtime.ort import open_session, settings_for
from qbench.runtime.probe import annotate, probe_tensors
from qbench.testing.graphs import Sketch, tiny_encoder
from qbench.testing.lowerings import graph_text, run_graph

SETTINGS = settings_for(BACKENDS["ort-cpu"], threads=1)

GRAPH = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[n, 2] x, float[n, 2] z) => (float[n, 2] y, float[n, 2] b)
<float[2, 2] w = {1.0, 2.0, 3.0, 4.0}>
{
    [one] a = MatMul(x, w)
    [two] b = Relu(a)
    [three] c = Add(a, z)
    [four] d = MatMul(c, w)
    [five] y = Mul(d, b)
}
"""
BRANCH = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[n] x, bool c) => (float[n] y)
{
    [one] a = Relu(x)
    [two] b = Neg(a)
    [three] y = If(c) <
        then_branch = t () => (float[n] u) { u = Add(a, b) },
        else_branch = e () => (float[n] v) { v = Sub(a, x) }
    >
}
"""


def graph(text: str) -> ir.Model:
    return ir.from_onnx_text(text)


def test_what_is_live_is_what_is_read_later_or_given_out() -> None:
    sets = [sorted(s) for s in live_sets(graph(GRAPH))]
    assert sets == [[], ["a"], ["a", "b"], ["b", "c"], ["b", "d"], ["b", "y"]]


def test_branches_read_what_lies_outside() -> None:
    sets = [sorted(s) for s in live_sets(graph(BRANCH))]
    assert sets == [[], ["a"], ["a", "b"], ["y"]]


def test_segments_know_what_crosses_their_borders() -> None:
    first, second, third = make_segments(graph(GRAPH), [2, 4])
    assert first.nodes == ("one", "two") and third.nodes == ("five",)
    assert first.inputs == ("x",) and first.outputs == ("a", "b")
    assert second.inputs == ("a", "z") and second.outputs == ("d",)
    assert third.inputs == ("d", "b") and third.outputs == ("y",)


@pytest.mark.parametrize("text", [GRAPH, BRANCH])
@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 2]])
def test_segments_run_one_after_another(text: str, cuts: list[int]) -> None:
    model = graph(text)
    x = np.float32([[1, -2], [3, 4]])
    feeds = {"x": x, "z": x.T} if text is GRAPH else {"x": x[0], "c": np.array(False)}
    expected = run_graph(model, feeds)
    annotate(model, probe_tensors(model, feeds, SETTINGS))
    before, values = graph_text(model), dict(feeds)
    for segment in make_segments(model, cuts):
        with open_session(segment_model(model, segment), SETTINGS) as session:
            assert session.outputs == segment.outputs
            values.update(session.run(values))
    for name, value in expected.items():
        np.testing.assert_array_equal(values[name], value)
    assert graph_text(model) == before


def test_borders_are_marked_and_outputs_of_the_graph_are_not() -> None:
    model = graph(GRAPH)
    first = segment_model(model, make_segments(model, [3])[0])
    assert {v.name: BORDER_KEY in v.metadata_props for v in first.graph.outputs} == {
        "b": False,
        "c": True,
    }
    assert not any(v.metadata_props for n in model.graph for v in n.outputs)


def test_weights_are_shared_and_nodes_are_copies() -> None:
    model = graph(GRAPH)
    part = segment_model(model, make_segments(model, [3])[0])
    weight = model.graph.initializers["w"].const_value
    assert part.graph.initializers["w"].const_value is weight
    next(iter(part.graph)).name = "renamed"
    assert next(iter(model.graph)).name == "one"


def test_positions_inside_a_layer_are_those_between_its_nodes() -> None:
    model = tiny_encoder(layers=1)
    order = [n.name for n in model.graph]
    inner = inside_layers(model, find_layers(model))
    for layer in find_layers(model).layers:
        for use in layer.occurrences:
            own = [order.index(n) for n in (*use.nodes, *(e.node for e in use.edges))]
            assert all(p in inner for p in range(min(own) + 1, max(own) + 1))
    assert len(inner) < len(order)


def test_costs_follow_the_length_of_sums() -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, (2, 8))
    a = s.op("MatMul", x, s.weight("a", 8, 4))
    b = s.op("Gemm", a, s.weight("b", 16, 4), transB=1)
    model = s.model(y=s.op("Relu", b))
    facts = {str(v.name): TensorFact("float32", 2, 100) for n in model.graph for v in n.outputs}
    assert node_costs(model, facts) == [800.0, 400.0, 100.0]


def test_cuts_go_where_little_is_live() -> None:
    live = [0, 9, 1, 9, 9, 1, 9, 3, 9, 0]
    assert choose_cuts([1.0] * 9, live) == [2, 5]
    assert choose_cuts([1.0] * 9, live, forbidden=[2]) == [5]


def test_of_a_plateau_the_last_position_is_cut() -> None:
    assert choose_cuts([1.0] * 6, [0, 9, 1, 1, 1, 9, 0]) == [4]
    assert choose_cuts([1.0] * 6, [0, 9, 1, 1, 1, 9, 0], forbidden=[4]) == [3]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_graph_of_few_nodes_needs_no_cut(count: int) -> None:
    assert choose_cuts([1.0] * count, [0.0] * (count + 1)) == []


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_cuts_are_ascending_allowed_and_few(data) -> None:
    n = data.draw(st.integers(1, 40))
    costs = data.draw(st.lists(st.floats(0, 1e6), min_size=n, max_size=n))
    live = [0.0, *data.draw(st.lists(st.integers(0, 50), min_size=n - 1, max_size=n - 1)), 0.0]
    forbidden = data.draw(st.sets(st.integers(0, n)))
    most = data.draw(st.integers(1, 12))
    cuts = choose_cuts(costs, live, forbidden, most)
    assert cuts == sorted(set(cuts)) and not set(cuts) & forbidden
    assert all(0 < cut < n and live[cut] > 0 for cut in cuts)
    assert len(cuts) + 1 <= most or sum(costs) == 0
