"""Which tensors of a layer can leave a format's range: edges, outputs, and what lies between.

Running a graph in a high precision never shows that a narrow format would overflow. So the ranges
of everything that a layer computes are kept, of values that no tensor of the graph carries too:
a fused LayerNormalization sums squares inside, a tanh GELU cubes its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import onnx_ir as ir

from qbench.records import Layer, Occurrence

#: Operators that move elements and compute none: their outputs have the range of their inputs.
MOVEMENT = frozenset(
    {
        "Concat",
        "Expand",
        "Flatten",
        "Gather",
        "Identity",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)


class Quantity(StrEnum):
    """What is computed inside an operator and carried by no tensor."""

    SUM_OF_SQUARES = "sum_of_squares"
    CUBE = "cube"


@dataclass(frozen=True, slots=True)
class Implicit:
    """An intermediate inside an operator.

    Attributes:
        name: ``<layer>.<quantity>``: the name of its range.
        source: The tensor that it is computed from.
        quantity: What is computed.
        axis: First normalised axis (``SUM_OF_SQUARES``).
        centred: Whether the mean over the normalised axes is taken off before squaring.
    """

    name: str
    source: str
    quantity: Quantity
    axis: int = -1
    centred: bool = False


def implicit_of(layer: Layer) -> tuple[Implicit, ...]:
    """Return the intermediates inside the operators of a layer, one for each of its uses.

    NOTE: softmax has none: after its maximum is taken off, exponentials are at most 1 and their
    sum is at most the number of keys.
    """
    found = (_implicit(layer.name, use) for use in layer.occurrences if use.inputs)
    return tuple(item for item in found if item is not None)


def tensors_of(layer: Layer, nodes: Mapping[str, ir.Node]) -> tuple[str, ...]:
    """Return the tensors of the graph whose ranges say whether a layer fits a format.

    These are its edges, then what its nodes compute (operators that only move elements left out),
    then its outputs. Weights are left out: they are known without running anything.

    Args:
        layer: The layer.
        nodes: The nodes of the main graph by name.
    """
    names = [edge.tensor for edge in layer.edges]
    computed = [nodes[name] for name in layer.nodes if name in nodes]
    names += [str(v.name) for node in computed for v in _numbers(node)]
    names += [use.output for use in layer.occurrences]
    weights = {
        str(v.name) for node in computed for v in node.inputs if v is not None and _is_constant(v)
    }
    return tuple(name for name in dict.fromkeys(names) if name and name not in weights)


def nodes_by_name(graph: ir.Graph) -> dict[str, ir.Node]:
    """Return the nodes of the main graph by name."""
    return {str(node.name): node for node in graph}


def _implicit(layer: str, use: Occurrence) -> Implicit | None:
    source, attributes = use.inputs[0], use.attributes
    if use.op in ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"):
        name = f"{layer}.{Quantity.SUM_OF_SQUARES}"
        axis = int(attributes.get("axis", -1))
        return Implicit(name, source, Quantity.SUM_OF_SQUARES, axis, use.op == "LayerNormalization")
    if use.op == "FastGelu" or (use.op == "Gelu" and attributes.get("approximate") == "tanh"):
        return Implicit(f"{layer}.{Quantity.CUBE}", source, Quantity.CUBE)
    return None


def _numbers(node: ir.Node) -> Iterable[ir.Value]:
    """Yield what a node computes; the statistics that LayerNormalization may give are left out."""
    if node.op_type in MOVEMENT or not node.outputs:
        return
    first = node.outputs[0]
    if first.dtype is None or first.dtype.is_floating_point():
        yield first


def _is_constant(value: ir.Value) -> bool:
    return value.is_initializer() or value.const_value is not None
