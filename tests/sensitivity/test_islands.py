"""Cells over an fp16 base: what a backend with fp16 kernels is measured on, run by ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

from qbench.backends import BACKENDS
from qbench.engine.build import lower_graph
from qbench.graph.layers import find_layers
from qbench.lowering import lowering_for
from qbench.records import Kind, Plan, PlanLayer
from qbench.runtime.ort import open_session, settings_for
from qbench.sensitivity.replay import Replay
from qbench.sensitivity.timing import NOT_TIMED, paired_latency
from qbench.tasks.batches import Batch
from qbench.testing.graphs import decompose, tiny_decoder, tiny_encoder

BACKEND = BACKENDS["tensorrt-rtx"]
SETTINGS = settings_for(BACKEND, threads=1)
IDS = np.random.default_rng(0).integers(1, 99, (3, 7))
MASK = np.ones_like(IDS)
MASK[1, 4:] = 0
FEEDS = {"input_ids": IDS, "attention_mask": MASK}


def plan_of(layers, formats) -> Plan:
    rows = tuple(
        PlanLayer(
            x.name, x.kind, formats.get(x.name, "fp16"), clips={e.tensor: 4.0 for e in x.edges}
        )
        for x in layers.layers
    )
    return Plan(1, BACKEND.name, "tiny", "0" * 64, rows)


def whole(graph, layers, formats, output):
    lowered = lower_graph(graph, layers, plan_of(layers, formats))
    with open_session(lowered, SETTINGS) as session:
        return session.run(FEEDS, [output])[output]


@pytest.mark.parametrize(
    ("make", "output"),
    [
        (tiny_encoder, "embedding"),
        (lambda: decompose(tiny_encoder()), "embedding"),
        (tiny_decoder, "logits"),
    ],
    ids=["encoder", "decomposed", "decoder"],
)
def test_a_cell_is_the_engine_with_that_layer_over_its_fp16_base(make, output) -> None:
    graph = make()
    layers = find_layers(graph)
    replay = Replay(graph, layers, [Batch(np.arange(3), FEEDS, 18, 21)], SETTINGS, output)
    base = replay.run_reference()
    assert len(replay.segments) > 1 and replay.holds_half
    top = np.abs(base).max()
    assert np.abs(base - whole(graph, layers, {}, output)).max() < 1e-2 * top
    with open_session(graph, SETTINGS) as session:
        plain = session.run(FEEDS, [output])[output]
    assert 0 < np.abs(base - plain).max() < 0.05 * top  # the base is fp16, and near the model
    linear = [x for x in layers.layers if x.kind is Kind.LINEAR]
    for layer, name in ((linear[0], "int8"), (linear[-1], "w4a16"), (linear[2], "w4a16")):
        lowering = lowering_for(name, backend=BACKEND)
        clips = {edge.tensor: 4.0 for edge in layer.edges}
        if lowering.requires(replay.model, layer) is not None:
            continue
        changed = replay.change(layer, lambda m, x, low=lowering, c=clips: low.apply(m, x, c))
        got = replay.run_changed(changed)
        assert paired_latency(replay, changed) == NOT_TIMED
        assert not [w for m in changed.models.values() if (w := lowering.ensures(m, layer))]
        changed.close()
        engine = whole(graph, layers, {layer.name: name}, output)
        moved = np.abs(engine - base).max()
        assert moved > 0 and np.abs(got - engine).max() < 0.25 * moved + 2e-3 * top
    replay.close()


def test_every_operator_of_such_a_segment_is_one_that_its_backend_reads() -> None:
    graph = tiny_encoder(layers=1)
    layers = find_layers(graph)
    replay = Replay(graph, layers, [Batch(np.arange(3), FEEDS, 18, 21)], SETTINGS, "embedding")
    replay.run_reference()
    layer = next(x for x in layers.layers if x.kind is Kind.LINEAR)
    lowering = lowering_for("int8", backend=BACKEND)
    clips = {edge.tensor: 4.0 for edge in layer.edges}
    changed = replay.change(layer, lambda m, x: lowering.apply(m, x, clips))
    (part,) = changed.models.values()
    assert {node.domain for node in part.graph.all_nodes()} == {""}
    changed.close()
    replay.close()
