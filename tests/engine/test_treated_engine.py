"""Where the scale of a remedy goes in a whole engine: into a norm, or a Mul, as the plan allows."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.calibration.collect import calibrate
from qbench.engine.build import lower_graph
from qbench.graph.layers import find_layers
from qbench.records import Kind, Layers, Plan, PlanLayer, Treatment
from qbench.records.packed import pack, unpack
from qbench.runtime.ort import open_session, settings_for
from qbench.tasks.batches import Batch
from qbench.testing.graphs import tiny_decoder

SETTINGS = settings_for(BACKENDS["ort-cpu"], threads=1)
IDS = np.random.default_rng(0).integers(1, 99, (4, 9))
QKV = tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")


class Decoder:
    """A small decoder with its ranges, and plans for it."""

    def __init__(self) -> None:
        self.model = tiny_decoder()
        self.layers: Layers = find_layers(self.model)
        batch = Batch(np.arange(len(IDS)), {"input_ids": IDS}, IDS.size, IDS.size)
        seen = calibrate(
            self.model, self.layers, [batch], lambda graph: open_session(graph, SETTINGS)
        )
        self.ranges = seen.by_tensor()
        self.scale = pack(np.geomspace(0.5, 2, 32).astype(np.float32))

    def treatment(self, name: str) -> Treatment:
        tensor = self.layers.by_name()[name].edges[0].tensor
        top = np.array(self.ranges[tensor].channel_absmax) / unpack(self.scale)
        return Treatment("smoothquant:0.5", {tensor: float(top.max())}, {"scale": self.scale})

    def plan(self, formats: dict[str, str], treated: tuple[str, ...]) -> Plan:
        rows = tuple(
            PlanLayer(
                layer.name,
                layer.kind,
                formats.get(layer.name, "fp32"),
                clips={
                    e.tensor: self.ranges[e.tensor].absmax
                    for e in layer.edges
                    if e.tensor in self.ranges
                },
                treatment=self.treatment(layer.name) if layer.name in treated else None,
            )
            for layer in self.layers.layers
        )
        return Plan(1, "ort-cpu", "", "0" * 64, rows)

    def run(self, graph: ir.Model) -> np.ndarray:
        with open_session(graph, SETTINGS) as session:
            return session.run({"input_ids": IDS}, ["logits"])["logits"]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder()


def smoothing(graph: ir.Model) -> int:
    return sum("/smooth" in str(node.name) for node in graph.graph)


@pytest.mark.parametrize(
    ("formats", "treated", "products"),
    [
        (dict.fromkeys(QKV, "int8"), QKV, 0),  # one scale for all that reads the norm
        ({QKV[0]: "int8"}, QKV[:1], 0),  # the others stay in fp32 and take the scale
        (dict.fromkeys(QKV, "int8"), QKV[:1], 1),  # the others were calibrated without it
        ({QKV[0]: "int8", QKV[1]: "w8a16"}, QKV[:1], 1),
    ],
)
def test_a_scale_goes_into_the_norm_where_the_plan_allows(
    decoder: Decoder, formats: dict[str, str], treated: tuple[str, ...], products: int
) -> None:
    assert all(layer.kind is Kind.LINEAR for layer in decoder.layers.layers if layer.name in QKV)
    before = decoder.run(decoder.model)
    graph = lower_graph(decoder.model, decoder.layers, decoder.plan(formats, treated))
    assert smoothing(graph) == products
    after = decoder.run(graph)
    assert np.abs(after - before).max() < 0.05 * np.abs(before).max()
    again = lower_graph(decoder.model, decoder.layers, decoder.plan(formats, treated))
    assert ir.to_proto(again).SerializeToString() == ir.to_proto(graph).SerializeToString()


def test_a_treatment_of_another_format_does_nothing(decoder: Decoder) -> None:
    formats = {QKV[0]: "w8a16", QKV[1]: "int8"}
    edited = lower_graph(decoder.model, decoder.layers, decoder.plan(formats, QKV[:1]))
    plain = lower_graph(decoder.model, decoder.layers, decoder.plan(formats, ()))
    assert ir.to_proto(edited).SerializeToString() == ir.to_proto(plain).SerializeToString()
