"""What the pattern finders give to one another: layers in the making."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from qbench.graph.layers.view import Origin
from qbench.records import Edge, Kind, Occurrence

Scalar = float | int | str


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """One use of a layer, still tied to graph objects.

    Attributes:
        kind: What it is.
        op: Canonical operator.
        nodes: Its nodes in topological order; none for ``kv``.
        reads: What the canonical operator reads; ``None`` for an absent input.
        output: What it gives.
        edges: Node and input index of each edge that carries the format.
        anchor: The node that names it and places it in the order.
        role: Part of an attention: ``scores``, ``softmax``, ``context``, ``k``, ``v``, or "".
        attributes: Attributes of the canonical operator.
        weight: Where its weight comes from.
        bias: Where its bias comes from.
    """

    kind: Kind
    op: str
    nodes: tuple[ir.Node, ...]
    reads: tuple[ir.Value | None, ...]
    output: ir.Value
    edges: tuple[tuple[ir.Node, int], ...]
    anchor: ir.Node
    role: str = ""
    attributes: Mapping[str, Scalar] = field(default_factory=dict)
    weight: Origin | None = None
    bias: Origin | None = None

    def occurrence(self) -> Occurrence:
        """Return the record of this use."""
        return Occurrence(
            op=self.op,
            nodes=tuple(name_of(node) for node in self.nodes),
            inputs=tuple("" if value is None else name_of(value) for value in self.reads),
            output=name_of(self.output),
            edges=tuple(
                Edge(name_of(node), index, name_of(node.inputs[index]))
                for node, index in self.edges
            ),
            attributes=dict(self.attributes),
        )


class Claims:
    """Which node belongs to which layer, and why others belong to none.

    Attributes:
        found: Every layer so far, in the order of its finding.
        reasons: Why a node is in no layer, for nodes that a finder passed judgement on.
    """

    def __init__(self) -> None:
        """Start with nothing claimed."""
        self.found: list[Found] = []
        self.reasons: dict[ir.Node, str] = {}
        self._owner: dict[ir.Node, Found] = {}

    def add(self, layer: Found) -> bool:
        """Claim the nodes of a layer; refuse and return ``False`` if one is taken."""
        if any(node in self._owner for node in layer.nodes):
            return False
        self.found.append(layer)
        self._owner.update(dict.fromkeys(layer.nodes, layer))
        return True

    def swap(self, old: Found, new: Found) -> None:
        """Put a layer of the same nodes in the place of another."""
        self.found[self.found.index(old)] = new
        self._owner.update(dict.fromkeys(new.nodes, new))

    def owner(self, node: ir.Node | None) -> Found | None:
        """Return the layer that a node belongs to, or ``None``."""
        return None if node is None else self._owner.get(node)

    def say(self, nodes: Iterable[ir.Node], reason: str) -> None:
        """Record why nodes are in no layer; the first reason stays."""
        for node in nodes:
            self.reasons.setdefault(node, reason)

    def of(self, *kinds: Kind) -> list[Found]:
        """Return the layers of some kinds, in the order of their finding."""
        return [layer for layer in self.found if layer.kind in kinds]


def name_of(thing: ir.Node | ir.Value | None) -> str:
    """Return the name of a node or value; "" for none."""
    return "" if thing is None else thing.name or ""


def edges_into(nodes: Iterable[ir.Node], value: ir.Value) -> tuple[tuple[ir.Node, int], ...]:
    """Return every (node, input index) among ``nodes`` that reads ``value``."""
    return tuple(
        (node, index) for node in nodes for index, read in enumerate(node.inputs) if read is value
    )


def plain_attributes(node: ir.Node) -> dict[str, Scalar]:
    """Return the attributes of a node; lists of numbers become comma-separated text."""
    plain: dict[str, Scalar] = {}
    for name, attr in node.attributes.items():
        if attr.type in (ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING):
            plain[name] = attr.value
        elif attr.type in (ir.AttributeType.INTS, ir.AttributeType.FLOATS):
            plain[name] = ",".join(str(item) for item in attr.value)
    return plain
