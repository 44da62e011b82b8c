"""Tied weights: one storage in the engine, and its bytes counted as they are stored."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import backend_named
from qbench.engine.build import lower_graph
from qbench.engine.sharing import share_tied
from qbench.graph.layers import find_layers
from qbench.records import Layers, Plan, PlanLayer
from qbench.runtime.optimised import kernel_name, optimised_graph
from qbench.runtime.ort import open_session, settings_for
from qbench.testing.graphs import Sketch, tiny_decoder
from qbench.testing.lowerings import run_graph

IDS = {"input_ids": np.arange(12, dtype=np.int64).reshape(2, 6)}
ROWS = 150


def stored(graph: ir.Model) -> int:
    return sum(v.const_value.nbytes for v in graph.graph.initializers.values() if v.const_value)


def logits(graph: ir.Model) -> np.ndarray:
    with open_session(graph, settings_for(backend_named("ort-cpu"), 1)) as session:
        return session.run(IDS, ["logits"])["logits"]


def head(width: int) -> ir.Model:
    """Return a table of 150 rows whose transpose is the output projection."""
    s = Sketch(0)
    ids = s.input("input_ids", ir.DataType.INT64, ("batch", "sequence"))
    table = s.weight("embed.weight", ROWS, width, scale=0.5)
    x = s.layer_norm(s.op("Gather", table, ids, at="embed", axis=0), "norm", width)
    turned = s.op("Transpose", table, at="lm_head", perm=[1, 0])
    return s.model(logits=s.op("MatMul", x, turned, at="lm_head"))


def plan_of(layers: Layers, form: str, backend: str = "ort-cpu") -> Plan:
    high = backend_named(backend).high_precision
    rows = tuple(
        PlanLayer(x.name, x.kind, form if x.tie else high, clips={e.tensor: 3.0 for e in x.edges})
        for x in layers.layers
    )
    return Plan(1, backend, "", "0" * 64, rows)


@pytest.mark.parametrize(("form", "bytes_each"), [("fp16", 2), ("w8a16", 1), ("int8", 1)])
def test_an_engine_stores_a_tied_table_once(
    form: str, bytes_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_decoder(tied=True)
    layers = find_layers(model)
    tied = [layer for layer in layers.layers if layer.tie]
    assert len(tied) == 2
    graph = lower_graph(model, layers, plan_of(layers, form))
    table = tied[0].weight_bytes // 4 * bytes_each
    scales = 0 if form == "fp16" else 4 * 100
    beside = 4 + 1 + 8 if form == "int8" else 0  # the activation's scale and zero, an axis
    assert stored(model) - stored(graph) == tied[0].weight_bytes - table - scales - beside
    with monkeypatch.context() as patch:
        patch.setattr("qbench.engine.build.share_tied", lambda graph, layers: 0)
        apart = lower_graph(model, layers, plan_of(layers, form))
    assert stored(apart) == stored(graph) + table + scales
    np.testing.assert_array_equal(logits(graph), logits(apart))


@pytest.mark.parametrize("width", [64, 100, 131, 256, 300, 768])
@pytest.mark.parametrize(("form", "kernel"), [("w8a16", "MatMulNBits"), ("int8", "MatMulInteger")])
def test_a_wide_tied_table_is_stored_once_and_multiplied_natively(
    form: str, kernel: str, width: int
) -> None:
    model = head(width)
    layers, before = find_layers(model), run_graph(model, IDS)["logits"]
    graph = lower_graph(model, layers, plan_of(layers, form))
    large = [v for v in graph.graph.initializers.values() if v.const_value.size >= ROWS * width]
    assert [(v.dtype, v.const_value.size) for v in large] == [(ir.DataType.INT8, ROWS * width)]
    scales = sum(v.const_value.nbytes for v in graph.graph.initializers.values()) - ROWS * width
    assert scales < 4 * ROWS * (1 + width / 64) + 16 * width + 64
    after = logits(graph)
    assert np.abs(after - before).max() < 0.1 * np.abs(before).max()
    settings = settings_for(backend_named("ort-cpu"), 1)
    made = Counter(kernel_name(n) for n in optimised_graph(graph, settings).graph.all_nodes())
    if form == "int8" or width % 32 == 0:  # the runtime's own blocks are powers of two
        assert any(name.startswith(kernel) for name in made), made


def test_an_untied_table_keeps_a_scale_a_column_in_int8_and_a_row_in_w8a16() -> None:
    model = tiny_decoder(tied=False)
    layers = find_layers(model)
    table = next(x for x in layers.layers if x.kind == "embedding")
    rows, width = table.weight_shape
    for form, count in (("int8", width), ("w8a16", rows)):
        wanted = [PlanLayer(x.name, x.kind, "fp32") for x in layers.layers if x is not table]
        own = PlanLayer(table.name, table.kind, form)
        graph = lower_graph(model, layers, Plan(1, "ort-cpu", "", "0" * 64, (own, *wanted)))
        (scale,) = (v for n, v in graph.graph.initializers.items() if n == f"{table.name}/scale")
        assert scale.const_value.size == count


def test_scales_in_fp16_are_shared_too() -> None:
    model = head(256)
    layers = find_layers(model)
    graph = lower_graph(model, layers, plan_of(layers, "w8a16", "ort-cuda"))
    halves = [
        v.const_value.size
        for v in graph.graph.initializers.values()
        if v.dtype is ir.DataType.FLOAT16 and v.const_value.size >= ROWS
    ]
    assert sorted(halves) == [256, 256, 2 * ROWS]  # the norm's two vectors, the scales once


def test_what_differs_stays_apart() -> None:
    model = tiny_decoder(tied=False)
    assert share_tied(model, find_layers(model)) == 0
