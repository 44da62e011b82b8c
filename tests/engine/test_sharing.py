"""Tied weights: one storage in the engine, and its bytes counted as they are stored."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import backend_named
from qbench.engine.build import lower_graph
from qbench.engine.sharing import share_tied
from qbench.graph.layers import find_layers
from qbench.records import Plan, PlanLayer
from qbench.runtime.ort import open_session, settings_for
from qbench.testing.graphs import tiny_decoder

IDS = {"input_ids": np.arange(12, dtype=np.int64).reshape(2, 6)}


def stored(graph: ir.Model) -> int:
    return sum(v.const_value.nbytes for v in graph.graph.initializers.values() if v.const_value)


def logits(graph: ir.Model) -> np.ndarray:
    with open_session(graph, settings_for(backend_named("ort-cpu"), 1)) as session:
        return session.run(IDS, ["logits"])["logits"]


@pytest.mark.parametrize(("form", "bytes_each"), [("fp16", 2), ("w8a16", 1)])
def test_an_engine_stores_a_tied_table_once(
    form: str, bytes_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_decoder(tied=True)
    layers = find_layers(model)
    tied = [layer for layer in layers.layers if layer.tie]
    assert len(tied) == 2
    rows = tuple(
        PlanLayer(x.name, x.kind, form if x.tie else "fp32", clips={e.tensor: 3.0 for e in x.edges})
        for x in layers.layers
    )
    plan = Plan(1, "ort-cpu", "", "0" * 64, rows)
    graph = lower_graph(model, layers, plan)
    table = tied[0].weight_bytes // 4 * bytes_each
    scales = 0 if form == "fp16" else 4 * 100
    assert stored(model) - stored(graph) == tied[0].weight_bytes - table - scales
    with monkeypatch.context() as patch:
        patch.setattr("qbench.engine.build.share_tied", lambda graph, layers: 0)
        apart = lower_graph(model, layers, plan)
    assert stored(apart) == stored(graph) + table + scales
    np.testing.assert_array_equal(logits(graph), logits(apart))


def test_what_differs_stays_apart() -> None:
    model = tiny_decoder(tied=False)
    assert share_tied(model, find_layers(model)) == 0
