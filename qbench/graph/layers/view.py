"""A graph prepared for pattern matching: readers, constants, ancestors, descendants."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from qbench.graph.layers.operators import (
    CASTS,
    GIVES_BOOL,
    GIVES_INT,
    QUANTIZERS,
    RANDOM,
    VIEWS,
)

#: Constants of at least this many elements are never read by value.
SMALL = 4096

FLOATS = frozenset(
    {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
)
_DTYPE_INPUT = {"Where": 1, "CastLike": 1, "OneHot": 2, "DequantizeLinear": 1}
_TO_WEIGHT = VIEWS | QUANTIZERS


@dataclass(frozen=True, slots=True)
class Origin:
    """The initializer that a constant operand is read from.

    Attributes:
        value: The initializer, or the output of a Constant node.
        tensor: Its tensor; only its dtype, shape and size are looked at.
        nodes: Nodes between it and the operand, last first.
        shape: Shape of the operand, or ``None`` where a reshape hides it.
    """

    value: ir.Value
    tensor: ir.TensorProtocol
    nodes: tuple[ir.Node, ...]
    shape: tuple[int, ...] | None

    @property
    def ops(self) -> tuple[str, ...]:
        """Operators between the initializer and the operand."""
        return tuple(node.op_type for node in self.nodes)

    @property
    def transposed(self) -> bool:
        """Whether an odd number of transpositions lies between."""
        return self.ops.count("Transpose") % 2 == 1

    @property
    def quantized(self) -> bool:
        """Whether the operand is the result of a quantizer, or is no float at all."""
        return bool(QUANTIZERS & set(self.ops))

    @property
    def is_float(self) -> bool:
        """Whether the initializer holds floating-point numbers."""
        return self.tensor.dtype in FLOATS


class View:
    """Look-ups on the main graph of a model; the graph is not changed.

    Attributes:
        model: The model.
        nodes: Nodes of the main graph in topological order.
        position: Index of a node in ``nodes``.
    """

    def __init__(self, model: ir.Model) -> None:
        """Index the main graph of ``model``."""
        self.model = model
        self.nodes = tuple(model.graph)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self._outputs = frozenset(id(value) for value in model.graph.outputs)
        self._dtypes: dict[int, ir.DataType | None] = {}
        self._static: set[int] = set()
        for node in self.nodes:
            self._index(node)

    def _index(self, node: ir.Node) -> None:
        read = [value for value in node.inputs if value is not None]
        static = node.op_type in ("Shape", "Size") or all(self.static(value) for value in read)
        random = node.op_type in RANDOM or any(
            attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
            for attr in node.attributes.values()
        )
        for value in node.outputs:
            self._dtypes[id(value)] = value.dtype or self._guess_dtype(node)
            if static and not random:
                self._static.add(id(value))

    def _guess_dtype(self, node: ir.Node) -> ir.DataType | None:
        op = node.op_type
        if op == "Cast":
            return ir.DataType(node.attributes.get_int("to", 1))
        if op in GIVES_BOOL:
            return ir.DataType.BOOL
        if op in GIVES_INT:
            return ir.DataType.INT64
        if op == "QuantizeLinear":
            return ir.DataType.INT8
        if op in ("Constant", "ConstantOfShape"):
            attribute = node.attributes.get("value")
            return ir.DataType.FLOAT if attribute is None else attribute.as_tensor().dtype
        index = _DTYPE_INPUT.get(op, 0)
        value = node.inputs[index] if index < len(node.inputs) else None
        return None if value is None else self.dtype(value)

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """Return the data type of a value, worked out from its producer where none is written."""
        known = value.dtype
        if known is None and value.const_value is not None:
            known = value.const_value.dtype
        return known or self._dtypes.get(id(value))

    def is_float(self, value: ir.Value) -> bool:
        """Whether a value is a floating-point tensor; unknown types count as floating point."""
        dtype = self.dtype(value)
        return dtype is None or dtype in FLOATS

    def constant(self, value: ir.Value | None) -> ir.TensorProtocol | None:
        """Return the tensor of an initializer or of a Constant node, else ``None``."""
        if value is None:
            return None
        node = value.producer()
        if node is None:
            return value.const_value if value.is_initializer() else None
        if node.op_type != "Constant" or node.domain:
            return None
        return value.const_value or ir.convenience.get_const_tensor(value)

    def static(self, value: ir.Value | None) -> bool:
        """Whether a value depends on constants and shapes alone."""
        return value is None or id(value) in self._static or self.constant(value) is not None

    def origin(self, value: ir.Value | None) -> Origin | None:
        """Return the initializer behind casts, transpositions and reshapes, or ``None``."""
        nodes: list[ir.Node] = []
        while value is not None and (tensor := self.constant(value)) is None:
            node = value.producer()
            if node is None or node.op_type not in _TO_WEIGHT or node.domain:
                return None
            nodes.append(node)
            value = node.inputs[0]
        if value is None:
            return None
        assert tensor is not None
        return Origin(value, tensor, tuple(nodes), _shape_after(tensor, nodes))

    def numbers(self, value: ir.Value | None) -> np.ndarray | None:
        """Return a small constant by value, looking through casts and reshapes, or ``None``."""
        origin = self.origin(value)
        if origin is None or origin.tensor.size >= SMALL or origin.quantized:
            return None
        return origin.tensor.numpy()

    def number(self, value: ir.Value | None) -> float | None:
        """Return a constant of one element, or ``None``."""
        array = self.numbers(value)
        if array is None or array.size != 1 or array.dtype.kind in "OSU":
            return None
        return float(array.reshape(()))

    def users(self, value: ir.Value) -> list[tuple[ir.Node, int]]:
        """Return the readers of a value with the input index, in topological order."""
        end = len(self.nodes)
        uses = [(use.node, use.idx) for use in value.uses()]
        return sorted(uses, key=lambda use: (self.position.get(use[0], end), use[1]))

    def only_user(self, value: ir.Value) -> ir.Node | None:
        """Return the one node that reads a value that is no graph output, or ``None``."""
        consumers = {node for node, _ in self.users(value)}
        if len(consumers) != 1 or self.is_output(value):
            return None
        (node,) = consumers
        return node if node in self.position else None

    def is_output(self, value: ir.Value) -> bool:
        """Whether a value is an output of the graph."""
        return id(value) in self._outputs

    def producer(self, value: ir.Value | None, *ops: str) -> ir.Node | None:
        """Return the producer of a value if it is one of the standard operators ``ops``."""
        node = None if value is None else value.producer()
        return node if node is not None and node.op_type in ops and not node.domain else None

    def sort(self, nodes: Iterable[ir.Node]) -> tuple[ir.Node, ...]:
        """Return nodes without repetition in topological order."""
        return tuple(sorted(set(nodes), key=self.position.__getitem__))

    def closed(self, nodes: Iterable[ir.Node], output: ir.Value) -> bool:
        """Whether nothing outside ``nodes`` reads what they give, save ``output``."""
        members = set(nodes)
        return all(
            value is output
            or (not self.is_output(value) and all(user in members for user, _ in self.users(value)))
            for node in members
            for value in node.outputs
        )

    def axes(self, node: ir.Node) -> tuple[int, ...] | None:
        """Return the axes of a reduction, given as an attribute or as a constant input."""
        given = node.attributes.get("axes")
        if given is not None:
            return tuple(given.as_ints())
        array = self.numbers(node.inputs[1]) if len(node.inputs) > 1 else None
        return None if array is None else tuple(int(axis) for axis in array.reshape(-1))

    @functools.cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each node the set of its ancestors and itself, as a bit mask over positions.

        A tensor does not descend from those whose shape alone it depends on.
        """
        masks: list[int] = []
        for index, node in enumerate(self.nodes):
            mask = 1 << index
            for parent in self.parents(node):
                mask |= masks[parent]
            masks.append(mask)
        return tuple(masks)

    @functools.cached_property
    def descendants(self) -> tuple[int, ...]:
        """For each node the set of its descendants and itself: the inverse of ``ancestors``."""
        masks = [1 << index for index in range(len(self.nodes))]
        for index in range(len(self.nodes) - 1, -1, -1):
            for parent in self.parents(self.nodes[index]):
                masks[parent] |= masks[index]
        return tuple(masks)

    def parents(self, node: ir.Node) -> Iterator[int]:
        """Yield the positions of the nodes whose results, not only their shapes, a node reads."""
        for value in () if node.op_type in ("Shape", "Size") else node.inputs:
            parent = None if value is None else value.producer()
            if parent is not None and parent in self.position:
                yield self.position[parent]

    def mask(self, nodes: Iterable[ir.Node]) -> int:
        """Return nodes as a bit mask over positions."""
        mask = 0
        for node in nodes:
            mask |= 1 << self.position[node]
        return mask

    def after(self, value: ir.Value) -> int:
        """Return the nodes that depend on a value as a bit mask over positions."""
        mask = 0
        for node, _ in self.users(value):
            if node in self.position and node.op_type not in ("Shape", "Size"):
                mask |= self.descendants[self.position[node]]
        return mask


def _shape_after(tensor: ir.TensorProtocol, nodes: Iterable[ir.Node]) -> tuple[int, ...] | None:
    shape = tuple(int(size) for size in tensor.shape.numpy())
    for node in reversed(tuple(nodes)):
        if node.op_type == "Transpose":
            perm = node.attributes.get_ints("perm") or range(len(shape))[::-1]
            shape = tuple(shape[axis] for axis in perm)
        elif node.op_type not in CASTS | QUANTIZERS:
            known = node.outputs[0].shape
            if known is None or not known.is_static():
                return None
            shape = tuple(int(size) for size in known.numpy())
    return shape


def behind_casts(value: ir.Value) -> tuple[ir.Value, list[ir.Node]]:
    """Return the value behind casts and identities, and the nodes that were passed."""
    passed: list[ir.Node] = []
    node = value.producer()
    while node is not None and node.op_type in CASTS and node.inputs[0] is not None:
        passed.append(node)
        value = node.inputs[0]
        node = value.producer()
    return value, passed


def swaps_last_axes(node: ir.Node) -> bool:
    """Whether a Transpose swaps the last two axes and leaves the others where they are."""
    perm = list(node.attributes.get_ints("perm") or [])
    if len(perm) < 2:
        return False
    rest = list(range(len(perm)))
    return perm == [*rest[:-2], rest[-1], rest[-2]]
