"""Node times of real sessions, and whose they are."""

from __future__ import annotations

import numpy as np
import pytest

from qbench.backends import backend_named
from qbench.engine.build import label_nodes, lower_graph
from qbench.engine.profiled import REST, layer_times
from qbench.graph.layers import find_layers
from qbench.records import Kind, Plan, PlanLayer
from qbench.runtime.ort import settings_for
from qbench.runtime.profiling import NodeTime, profile_nodes
from qbench.testing.graphs import tiny_encoder

CPU = backend_named("ort-cpu")


@pytest.mark.parametrize("form", ["fp32", "int8"])
def test_every_node_time_is_a_layers_or_the_rest(form: str) -> None:
    model = tiny_encoder()
    layers = find_layers(model)
    rows = tuple(
        PlanLayer(
            x.name,
            x.kind,
            form if x.kind is Kind.LINEAR else "fp32",
            clips={e.tensor: 3.0 for e in x.edges},
        )
        for x in layers.layers
    )
    graph = lower_graph(model, layers, Plan(1, "ort-cpu", "", "0" * 64, rows))
    label_nodes(graph, layers)
    ids = np.ones((2, 8), np.int64)
    batches = [{"input_ids": ids, "attention_mask": ids}] * 2
    profile = profile_nodes(graph, settings_for(CPU, 1), batches, repeats=2)
    assert [len(repeats) for repeats in profile] == [2, 2]
    times = layer_times(profile, graph, layers)
    assert set(times) == {*(x.name for x in layers.layers), REST}
    assert all(times[x.name].min() > 0 for x in layers.layers if x.kind is Kind.LINEAR)
    if form == "int8":
        names = {node.node for node in profile[0][0]}
        assert "encoder.layer.0.attention.self.query/quantize" in names
    whole = [min(sum(n.ms for n in run) for run in repeats) for repeats in profile]
    assert sum(times.values()) == pytest.approx(whole, rel=0.5)


def test_what_the_runtime_made_belongs_to_the_layer_before_it() -> None:
    model = tiny_encoder(layers=1)
    layers = find_layers(model)
    graph = model.clone()
    label_nodes(graph, layers)
    dense, other = "encoder.layer.0.intermediate.dense", "encoder.layer.0.output.dense"
    reshape = next(n.name for n in graph.graph if n.op_type == "Reshape")
    runs = [
        (
            NodeTime(f"{dense}/MatMul", "MatMul", 2.0),
            NodeTime("BiasGelu", "BiasGelu", 1.0),
            NodeTime(str(reshape), "Reshape", 0.5),
            NodeTime(f"{other}/quantize", "QuantizeLinear", 0.25),
        )
    ]
    times = layer_times([runs], graph, layers)
    assert times[dense].tolist() == [3.0]
    assert times[other].tolist() == [0.25]
    assert times[REST].tolist() == [0.5]
