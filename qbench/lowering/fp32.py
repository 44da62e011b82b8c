"""fp32 beside fp16: a layer that no island of fp16 takes in.

Where the high precision is fp16 the nodes of such a layer are marked and nothing else is done to
them. ``islands`` leaves marked nodes alone, and puts a Cast where a tensor passes from them to the
nodes around.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from qbench.formats import FORMATS
from qbench.lowering.base import Change, Refusal
from qbench.records import Layer, Status

#: Metadata key of a node that stays in fp32 whatever surrounds it.
WIDE_KEY = "qbench.fp32"


class Fp32Lowering:
    """A layer is computed in fp32, with Casts at its borders where fp16 surrounds it."""

    format = FORMATS["fp32"]

    def requires(self, model: ir.Model, layer: Layer) -> Refusal | None:
        """Return why the layer cannot be kept in fp32, or ``None``."""
        if layer.nodes:
            return None
        return Refusal(
            Status.NOT_APPLICABLE,
            f"{layer.kind} is a tensor between layers and computes nothing",
            "keep the layers that give it and read it in fp32",
        )

    def apply(self, model: ir.Model, layer: Layer, clips: Mapping[str, float]) -> Change:
        """Mark the layer's nodes in place; no clips are needed."""
        marked = mark_wide(model, [(layer, "asked for")])
        return Change(marked > 0, layer.weight_bytes if marked else 0)

    def ensures(self, model: ir.Model, layer: Layer) -> str | None:
        """Return which node of the layer computes in fp16, or ``None``.

        Before islands are made no node does; after them none may.
        """
        own = set(layer.nodes)
        for node in model.graph:
            if str(node.name) in own and any(v.dtype is ir.DataType.FLOAT16 for v in node.outputs):
                return f"node {node.name!r} gives fp16"
        return None


def mark_wide(model: ir.Model, layers: Iterable[tuple[Layer, str]]) -> int:
    """Mark the nodes of layers that stay in fp32, in place; return how many there are.

    Of a layer that is a tensor alone the inputs that carry it are marked, in what reads them.

    Args:
        model: The graph.
        layers: Each layer with the reason, which the marks tell.
    """
    nodes = {str(node.name): node for node in model.graph}
    marks = [
        (node, key, why) for layer, why in layers for node, key in _places(layer) if node in nodes
    ]
    for node, key, why in marks:
        nodes[node].metadata_props[key] = why
    return len(marks)


def why_wide(nodes: Mapping[str, ir.Node], layer: Layer) -> str:
    """Return the reason that the marks of a layer tell, or "" where it has none."""
    told = (nodes[n].metadata_props.get(key, "") for n, key in _places(layer) if n in nodes)
    return next(filter(None, told), "")


def _places(layer: Layer) -> list[tuple[str, str]]:
    own = [(name, WIDE_KEY) for name in layer.nodes]
    return own or [(edge.node, wide_input(edge.index)) for edge in layer.edges]


def wide_input(index: int) -> str:
    """Return the metadata key of a node that says that one of its inputs stays in fp32."""
    return f"{WIDE_KEY}:{index}"
