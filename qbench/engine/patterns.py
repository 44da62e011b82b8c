"""Patterns of an engine: what a builder meets of a plan, each distinct one once, as a small graph.

Layers of one kind, format, block and weight shape are one pattern: what does not build for one of
them does not build for any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.convenience import extract

from qbench.graph.shapes import infer_shapes
from qbench.lowering.constants import is_constant
from qbench.lowering.edit import LAYER_KEY
from qbench.records import Kind, Layers, Plan


@dataclass(frozen=True, slots=True, order=True)
class Pattern:
    """What a builder meets.

    Attributes:
        kind: Kind of the layers.
        format: Their format.
        shape: Shape of their weight; empty where they have none.
        block: Elements that share a scale, where the plan says so.
    """

    kind: Kind
    format: str
    shape: tuple[int, ...]
    block: int | None = None

    def __str__(self) -> str:
        """Return the pattern in words."""
        size = " × ".join(map(str, self.shape))
        words = [str(self.kind), *([size] if size else []), f"in {self.format}"]
        return " ".join([*words, *([f"with blocks of {self.block}"] if self.block else [])])


def patterns_of(plan: Plan, layers: Layers, high_precision: str) -> dict[Pattern, tuple[str, ...]]:
    """Return the layers of each pattern of a plan, those in high precision left out."""
    found: dict[Pattern, list[str]] = {}
    known = layers.by_name()
    for entry in plan.layers:
        if entry.format == high_precision or entry.name not in known:
            continue
        layer = known[entry.name]
        pattern = Pattern(layer.kind, entry.format, tuple(layer.weight_shape), entry.block)
        found.setdefault(pattern, []).append(entry.name)
    return {pattern: tuple(names) for pattern, names in found.items()}


def layer_graph(graph: ir.Model, names: Sequence[str]) -> ir.Model | None:
    """Return what computes the first of some layers that a labelled engine has nodes of.

    Its inputs are the tensors that the layer reads from others; its constants are the engine's.
    """
    if any(v.shape is None for node in graph.graph for v in node.outputs):
        infer_shapes(graph)
    for name in names:
        nodes = [n for n in graph.graph if n.metadata_props.get(LAYER_KEY) == name]
        if nodes:
            return _part(graph, nodes)
    return None


def _part(graph: ir.Model, nodes: Sequence[ir.Node]) -> ir.Model:
    inside = set(nodes)
    reads = {
        str(value.name): value
        for node in nodes
        for value in node.inputs
        if value is not None and not is_constant(value) and value.producer() not in inside
    }
    gives = {
        str(value.name)
        for node in nodes
        for value in node.outputs
        if value.is_graph_output() or any(user not in inside for user, _ in value.uses())
    }
    part = extract(graph.graph, list(reads), sorted(gives))
    part.opset_imports.update(graph.graph.opset_imports)
    return ir.Model(part, ir_version=graph.ir_version)
