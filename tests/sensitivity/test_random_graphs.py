"""Cuts on any graph: chained equals whole, and a replayed cell equals the changed whole graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import onnx_ir as ir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qbench.backends import BACKENDS, applicable_formats
from qbench.graph.layers import find_layers
from qbench.graph.normal import normalise
from qbench.graph.segments import inside_layers, make_segments, segment_model
from qbench.lowering import lowering_for
from qbench.runtime.ort import open_session, settings_for
from qbench.runtime.probe import annotate, probe_tensors
from qbench.sensitivity.replay import Replay
from qbench.tasks.batches import Batch

BACKEND = BACKENDS["ort-cpu"]
#: As written: with optimisation, what is fused would differ at the cuts, and rounding with it.
SETTINGS = replace(settings_for(BACKEND, threads=1), optimise=False)
QUICK = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
WIDTH = 4
_SHAPE = f"float[n, {WIDTH}]"

#: How a node reads ``a``, ``b`` and the outer value ``o``; ``k`` makes the names of its own.
OPERATORS = (
    "{k} = Tanh({a})",
    "{k} = Relu({a})",
    "{k} = Identity({a})",
    "{k} = Add({a}, {b})",
    "{k} = Mul({a}, {b})",
    "{k} = MatMul({a}, w1)",
    "{k} = MatMul({a}, w2)",
    "{k}m = MatMul({a}, w2) [{k}_bias] {k} = Add({k}m, bias)",
    "{k} = Clip({a}, , top)",
    "{k} = LayerNormalization <axis = -1> ({a}, gain)",
    "{k}, , {k}deviation = LayerNormalization <axis = -1> ({a}, gain, bias)",
    "{k}left, {k}right = Split <axis = 1, num_outputs = 2> ({a}) "
    "[{k}_join] {k} = Concat <axis = 1> ({k}right, {k}left)",
    "{k} = If (flag) <then_branch = {k}then () => (" + _SHAPE + " {k}t) "
    "{{ {k}t = Add({a}, {o}) }}, else_branch = {k}else () => (" + _SHAPE + " {k}e) "
    "{{ {k}i = MatMul({b}, w1) {k}e = Sub({k}i, {o}) }}>",
    "{k} = Loop (twice, , {a}) <body = {k}body (int64 {k}n, bool {k}c, " + _SHAPE + " {k}s) "
    "=> (bool {k}d, " + _SHAPE + " {k}u) {{ {k}d = Identity({k}c) {k}v = Add({k}s, {o}) "
    "{k}u = Tanh({k}v) }}>",
)


@dataclass(frozen=True)
class RandomGraph:
    """A graph in text, its inputs and the output that is scored."""

    text: str
    feeds: dict[str, np.ndarray]
    output: str

    @property
    def model(self) -> ir.Model:
        return ir.from_onnx_text(self.text)


@st.composite
def random_graphs(draw: st.DrawFn, most: int = 12) -> RandomGraph:
    """Draw a graph of several inputs and outputs, with edges that skip far."""
    inputs = [f"x{i}" for i in range(draw(st.integers(1, 3)))]
    values, lines = list(inputs), []
    for index in range(draw(st.integers(2, most))):
        recent = st.sampled_from(values[-2:])
        any_of = st.sampled_from(values)
        read = {name: draw(st.one_of(recent, any_of)) for name in ("a", "b", "o")}
        line = draw(st.sampled_from(OPERATORS)).format(k=f"v{index}", **read)
        lines.append(f"[node{index}] {line}")
        values.append(f"v{index}")
    made = draw(st.lists(st.sampled_from(values[len(inputs) :]), max_size=3, unique=True))
    made = list(dict.fromkeys([*made, values[-1]]))  # one of them in the middle, often
    through = draw(st.sampled_from([[], ["x0"], ["w1"], ["x0", "w1"]]))
    text = _text(inputs, [*through, *made], lines)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    feeds = {name: rng.normal(size=(3, WIDTH)).astype(np.float32) for name in inputs}
    feeds["flag"] = np.array(draw(st.booleans()))
    return RandomGraph(text, feeds, draw(st.sampled_from(made)))


def _text(inputs: list[str], outputs: list[str], lines: list[str]) -> str:
    shapes = {"w1": f"float[{WIDTH}, {WIDTH}]"}
    takes = ", ".join([*(f"{_SHAPE} {name}" for name in inputs), "bool flag"])
    gives = ", ".join(f"{shapes.get(name, _SHAPE)} {name}" for name in outputs)
    rng = np.random.default_rng(0)
    constants = [
        _constant(f"float[{WIDTH}, {WIDTH}] w1", rng.normal(size=WIDTH * WIDTH)),
        _constant(f"float[{WIDTH}, {WIDTH}] w2", rng.normal(size=WIDTH * WIDTH)),
        _constant(f"float[{WIDTH}] bias", rng.normal(size=WIDTH)),
        _constant(f"float[{WIDTH}] gain", 1 + rng.normal(size=WIDTH)),
        "float top = {0.5}",
        "int64 twice = {2}",
    ]
    body = "\n    ".join(lines)
    return (
        '<ir_version: 10, opset_import: ["" : 21]>\n'
        f"g ({takes}) => ({gives})\n<{', '.join(constants)}>\n{{\n    {body}\n}}\n"
    )


def _constant(name: str, numbers: np.ndarray) -> str:
    return f"{name} = {{{', '.join(f'{x:.4f}' for x in numbers)}}}"


def whole(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with open_session(model, SETTINGS) as session:
        return session.run(feeds)


@QUICK
@given(random_graphs(), st.data())
def test_chained_segments_give_what_the_whole_graph_gives(graph, data) -> None:
    model = normalise(graph.model)
    expected = whole(model, graph.feeds)
    annotate(model, probe_tensors(model, graph.feeds, SETTINGS))
    positions = st.integers(1, max(len(model.graph) - 1, 1))
    cuts = sorted(data.draw(st.sets(positions, max_size=len(model.graph) - 1)))
    values = dict(graph.feeds)
    for segment in make_segments(model, cuts):
        with open_session(segment_model(model, segment), SETTINGS) as session:
            assert session.outputs == segment.outputs
            values.update(session.run(values))
    constants = {n: v.const_value.numpy() for n, v in model.graph.initializers.items()}
    for name, value in expected.items():
        np.testing.assert_array_equal({**constants, **values}[name], value)


@QUICK
@given(random_graphs(most=9), st.sets(st.integers(1, 14)))
def test_replayed_cells_give_what_the_changed_graph_gives(graph, wanted) -> None:
    model = normalise(graph.model)
    layers = find_layers(model)
    batches = (Batch(np.arange(3), graph.feeds, 3, 3),)
    expected = whole(model, graph.feeds)[graph.output]

    def choose(costs, live_bytes, forbidden=(), max_segments=32):
        return [i for i in range(1, len(costs)) if i in wanted and i not in forbidden]

    with mock.patch("qbench.sensitivity.chain.choose_cuts", choose):
        replay = Replay(model, layers, batches, SETTINGS, graph.output)
    assert set(replay.cuts).isdisjoint(inside_layers(replay.model, layers))
    try:
        np.testing.assert_array_equal(replay.run_reference(), expected)
        clips = {edge.tensor: 2.0 for layer in layers.layers for edge in layer.edges}
        for layer in layers.layers:
            for name in applicable_formats(layer.kind, BACKEND):
                check_cell(replay, layer, name, clips, graph)
    finally:
        replay.close()


def check_cell(replay, layer, name, clips, graph) -> None:
    if name == BACKEND.high_precision:
        return
    lowering = lowering_for(name)
    if lowering.requires(replay.model, layer) is not None:
        return
    changed = replay.change(layer, lambda m, own: lowering.apply(m, own, clips))
    try:
        got = replay.run_changed(changed)
    finally:
        changed.close()
    lowered = replay.model.clone()
    lowering.apply(lowered, layer, clips)
    np.testing.assert_array_equal(got, whole(lowered, graph.feeds)[graph.output])
