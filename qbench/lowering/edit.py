"""Editing a graph: constants, nodes before or after an anchor, re-wired inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from qbench.lowering.base import Change
from qbench.records import Rewritten

#: Metadata key of a node: the layer whose lowering made it.
LAYER_KEY = "qbench.layer"


class GraphEditor:
    """Adds nodes and constants to one graph under names that start with the layer's.

    Args:
        model: The graph to edit in place.
        prefix: Name of the layer; every new name starts with it, and new nodes carry it in
            their metadata. Names already taken get a number.
    """

    def __init__(self, model: ir.Model, prefix: str) -> None:
        """Index the graph's nodes and names."""
        self.graph = model.graph
        self.prefix = prefix
        self.nodes: dict[str, ir.Node] = {str(n.name): n for n in self.graph}
        self._taken = set(self.nodes) | set(self.graph.initializers)
        self._taken |= {str(v.name) for n in self.graph.all_nodes() for v in n.outputs}
        self._taken |= {str(v.name) for v in self.graph.inputs}
        self.stored_bytes = 0
        self.made_nodes = 0

    def change(
        self, remark: str = "", rewritten: tuple[Rewritten, ...] = (), block: int | None = None
    ) -> Change:
        """Return what was done so far."""
        return Change(self.made_nodes > 0, self.stored_bytes, remark, rewritten, block)

    def _free(self, stem: str) -> str:
        name, number = stem, 1
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._taken.add(name)
        return name

    def constant(self, stem: str, array: np.ndarray, dtype: ir.DataType | None = None) -> ir.Value:
        """Register an initializer; its bytes are added to ``stored_bytes``."""
        name = self._free(f"{self.prefix}/{stem}")
        tensor = ir.Tensor(np.asarray(array, order="C"), dtype=dtype, name=name)
        value = ir.Value(
            name=name,
            const_value=tensor,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(tensor.dtype),
        )
        self.graph.register_initializer(value)
        self.stored_bytes += tensor.nbytes
        return value

    def op(
        self,
        anchor: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        stem: str,
        *,
        after: bool = False,
        attributes: Mapping[str, int | float] | None = None,
        outputs: int = 1,
        domain: str = "",
    ) -> tuple[ir.Value, ...]:
        """Insert a node before (or after) ``anchor`` and return its outputs."""
        made = dict(attributes or {})
        node = ir.node(op_type, inputs, attributes=made, num_outputs=outputs, domain=domain)
        node.name = self._free(f"{self.prefix}/{stem}")
        node.metadata_props[LAYER_KEY] = self.prefix
        self.nodes[node.name] = node
        self.made_nodes += 1
        for index, value in enumerate(node.outputs):
            value.name = self._free(f"{node.name}:{index}")
        if after:
            self.graph.insert_after(anchor, node)
        else:
            self.graph.insert_before(anchor, node)
        return tuple(node.outputs)

    def replace_uses(self, old: ir.Value, new: ir.Value, keep: Iterable[ir.Node] = ()) -> None:
        """Make every reader of ``old`` read ``new`` instead, but for the nodes in ``keep``.

        A graph output keeps its name: ``new`` takes the name over.
        """
        kept = set(keep)
        new.type, new.shape = new.type or old.type, new.shape or old.shape
        for node, index in list(old.uses()):
            if node not in kept:
                node.replace_input_with(index, new)
        for index, value in enumerate(self.graph.outputs):
            if value is old:
                name = old.name
                old.name = self._free(f"{self.prefix}/inner")
                new.name = name
                self.graph.outputs[index] = new

    def drop_unused(self, nodes: Iterable[ir.Node]) -> None:
        """Remove nodes that nothing reads, and then what only they read, and unused weights."""
        outputs = {id(v) for v in self.graph.outputs}
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node.graph is None:
                continue
            if any(v.uses() or id(v) in outputs for v in node.outputs):
                continue
            feeding = [v for v in node.inputs if v is not None]
            self.graph.remove(node, safe=True)
            self.nodes.pop(str(node.name), None)
            for value in feeding:
                producer = value.producer()
                if producer is not None:
                    pending.append(producer)
                elif value.is_initializer() and not value.uses() and id(value) not in outputs:
                    self.graph.initializers.pop(str(value.name), None)

    def drop_initializer(self, value: ir.Value | None) -> None:
        """Remove an initializer that nothing reads any more."""
        if value is None or not value.is_initializer() or value.uses():
            return
        if not value.is_graph_output():
            self.graph.initializers.pop(str(value.name), None)
