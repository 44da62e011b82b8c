"""Engines that are not what they should be: the self-test names the layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.engine.bisect import Side, find_parting, layer_outputs
from qbench.engine.build import label_nodes, lower_graph, write_engine
from qbench.engine.selftest import self_test
from qbench.errors import MeasurementError
from qbench.graph.layers import find_layers
from qbench.graph.model import Model, save_graph, store_model
from qbench.graph.normal import normalise
from qbench.records import Kind, Plan, PlanLayer
from qbench.runtime.ort import settings_for
from qbench.tasks.batches import Batch
from qbench.testing.graphs import tiny_encoder

IDS = np.random.default_rng(0).integers(1, 99, (3, 7))
TOKENS = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
BATCH = Batch(np.arange(3), TOKENS, 21, 21)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return store_model(normalise(tiny_encoder()), tmp_path_factory.mktemp("m"), "tiny", {})


def plan_of(model: Model, backend: str, formats: tuple[str, ...]) -> Plan:
    layers = find_layers(model.ir).layers
    rows = tuple(
        PlanLayer(
            x.name,
            x.kind,
            formats[i % len(formats)]
            if x.kind is Kind.LINEAR
            else BACKENDS[backend].high_precision,
            clips={e.tensor: 4.0 for e in x.edges},
        )
        for i, x in enumerate(layers)
    )
    options = dict(BACKENDS[backend].session_options)
    return Plan(1, backend, "tiny", model.sha256, rows, session_options=options)


def lowered(model: Model, plan: Plan) -> ir.Model:
    layers = find_layers(model.ir)
    graph = lower_graph(model.ir, layers, plan)
    label_nodes(graph, layers)
    return graph


def planted(path: Path, layer: str, folder: Path) -> Path:
    """Return a copy of an engine in which the scales of one layer's weight are doubled."""
    graph = ir.load(path)
    nodes = [
        n
        for n in graph.graph
        if n.op_type == "DequantizeLinear" and n.metadata_props.get("qbench.layer") == layer
    ]
    scale = next(n.inputs[1] for n in nodes if n.inputs[0].const_value is not None)
    array = scale.const_value.numpy()
    scale.const_value = ir.tensor((array * 2).astype(array.dtype), name=scale.name)
    folder.mkdir()
    save_graph(graph, folder / path.name)
    return folder / path.name


@pytest.mark.parametrize("backend", ["ort-cpu", "tensorrt-rtx"])
@pytest.mark.parametrize("which", [0, 1, 2, 5, 7, -1])
def test_a_wrong_scale_in_one_layer_is_bisected_to_it(model, backend, which, tmp_path) -> None:
    plan = plan_of(model, backend, ("int8", "w4a16"))
    settings = settings_for(BACKENDS[backend], threads=1)
    path, _ = write_engine(model, find_layers(model.ir), plan, "hash", tmp_path / "engine")

    def test(file: Path) -> str:
        return self_test(
            file, model.path, [BATCH], settings, model.output, lambda: lowered(model, plan)
        ).text

    assert "under default session options" in test(path)
    layer = [row.name for row in plan.layers if row.kind is Kind.LINEAR][which]
    with pytest.raises(MeasurementError, match=f"lowerings give.*first at layer '{layer}'"):
        test(planted(path, layer, tmp_path / "wrong"))


def test_default_options_are_told_apart(model, tmp_path) -> None:
    """Without the plan's accuracy level MatMulNBits multiplies in int8."""
    plan = plan_of(model, "ort-cpu", ("w4a16",))
    settings = settings_for(BACKENDS["ort-cpu"], threads=1)
    path, _ = write_engine(model, find_layers(model.ir), plan, "hash", tmp_path)
    other = replace(settings, entries={"session.qdq_matmulnbits_accuracy_level": "4"})
    told = self_test(
        path, model.path, [BATCH], settings, model.output, lambda: lowered(model, plan)
    )
    unlike = self_test(path, model.path, [BATCH], other, model.output, lambda: lowered(model, plan))
    assert "under default session options off by at most 0.00" in told.text
    assert "serve it under the plan's" in told.text
    assert "the same bit for bit under default session options" in unlike.text


def test_equal_graphs_do_not_part(model) -> None:
    graph = lowered(model, plan_of(model, "ort-cpu", ("int8",)))
    side = Side(graph, settings_for(BACKENDS["ort-cpu"], threads=1))
    assert find_parting(side, side, TOKENS, 1e-6) is None
    linear = {x.name for x in find_layers(model.ir).layers if x.kind is Kind.LINEAR}
    assert linear <= {layer for layer, _ in layer_outputs(graph)}
