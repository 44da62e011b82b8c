"""A narrow floating-point format on a backend that computes in fp32: rounding at every border.

Weights are stored in the narrow type. What enters a node of the layer and what leaves it is
rounded to it (a pair of Casts); a value beyond its largest number becomes infinite there, as it
does in hardware. A pattern that spells out one operator (a LayerNorm in primitives) is rounded at
the pattern's borders, as that operator is: so both graphs give the same numbers.

The fill of a mask is taken as the least finite number of the type: as −∞ a row that is nothing but
fill would have no softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnx_ir as ir

from qbench.formats import Format
from qbench.graph.lint import FP16_MAX
from qbench.graph.segments import BORDER_KEY
from qbench.lowering.base import Change, Refusal
from qbench.lowering.constants import constant_of, source_of, stored_constant
from qbench.lowering.edit import GraphEditor
from qbench.lowering.linear import check_operators, present, unchanged
from qbench.records import Kind, Layer, Occurrence, Rewritten, Status

_FLOAT = {"to": int(ir.DataType.FLOAT)}


@dataclass(frozen=True, slots=True)
class Narrow:
    """A floating-point type narrower than fp32.

    Attributes:
        dtype: The type of ONNX.
        numpy: The type of NumPy.
        top: Its largest finite number.
    """

    dtype: ir.DataType
    numpy: np.dtype
    top: float

    @property
    def cast(self) -> dict[str, int]:
        """Attributes of a Cast to it."""
        return {"to": int(self.dtype)}


#: Eight bits of ones, as far up as fp32 reaches.
BF16_MAX = (2 - 2**-7) * 2.0**127
#: The type of each narrow floating-point format.
NARROW = {
    "fp16": Narrow(ir.DataType.FLOAT16, np.dtype(np.float16), FP16_MAX),
    "bf16": Narrow(ir.DataType.BFLOAT16, np.dtype(ml_dtypes.bfloat16), BF16_MAX),
}


class RoundedLowering:
    """Narrow weights, and rounding at the borders of a layer's nodes.

    Attributes:
        format: The format.
        narrow: Its type.
    """

    format: Format
    narrow: Narrow

    def requires(self, model: ir.Model, layer: Layer) -> Refusal | None:
        """Return why the layer cannot take the format, or ``None``."""
        other = _other_dtype(model, layer, self.narrow)
        if other is not None:
            return other
        masks = {mask.constant for mask in layer.masks} | {mask.tensor for mask in layer.masks}
        for name, tensor in _weights_of(model, layer):
            top = _absmax(tensor)
            if top > self.narrow.top and name not in masks:
                return Refusal(
                    Status.INVALID,
                    f"its weight {name!r} reaches {top:.6g}, beyond {self.format.name}'s "
                    f"{self.narrow.top:.6g}",
                    "keep the layer in fp32",
                )
        return None

    def apply(self, model: ir.Model, layer: Layer, clips: Mapping[str, float]) -> Change:
        """Rewrite the graph in place; no clips are needed."""
        uses = present(model, layer)
        if not uses:
            return unchanged()
        rounder = Rounder(GraphEditor(model, layer.name), self.narrow, filled_tensors(layer))
        for use in uses:
            if layer.kind is Kind.KV:
                rounder.round_edges(use)
            elif layer.kind is Kind.EMBEDDING:
                rounder.round_table(use)
            else:
                for unit in _units(layer, use):
                    rounder.round_unit(unit, use)
        rewritten = rewritten_masks(layer, self.narrow)
        return rounder.editor.change(masks_told(rewritten, self.format.name), rewritten)

    def ensures(self, model: ir.Model, layer: Layer) -> str | None:
        """Return what is missing from the rewritten graph, or ``None``."""
        return check_operators(model, layer, {"Cast": f"no Cast to {self.format.name}"})


def filled_tensors(layer: Layer) -> frozenset[str]:
    """Return the tensors of a layer whose fill of a mask is taken as a finite number."""
    return frozenset(mask.tensor for mask in layer.masks if not mask.kept)


def rewritten_masks(layer: Layer, narrow: Narrow) -> tuple[Rewritten, ...]:
    """Return what a layer in a narrow type takes the constants of masks as."""
    return tuple(
        Rewritten(
            layer.name,
            mask.tensor,
            mask.constant,
            mask.value,
            mask.value if mask.kept else -narrow.top,
        )
        for mask in layer.masks
    )


def rewritten_in(layer: Layer, format_name: str) -> tuple[Rewritten, ...]:
    """Return what a layer takes the constants of masks as in a format; nothing in most."""
    narrow = NARROW.get(format_name)
    return () if narrow is None else rewritten_masks(layer, narrow)


def masks_told(rewritten: tuple[Rewritten, ...], format_name: str) -> str:
    """Return in words what became of the constants of masks, each constant once."""
    by_constant = {item.constant: item for item in rewritten}
    words = [
        f"{item.constant!r} ({item.value:.6g}) stays: rows of nothing else are caught behind"
        if item.becomes == item.value
        else f"{item.constant!r} ({item.value:.6g}) enters as {item.becomes:.6g}, the least "
        f"number of {format_name}"
        for item in by_constant.values()
    ]
    return f"mask constant {'; '.join(words)}" if words else ""


def _other_dtype(model: ir.Model, layer: Layer, narrow: Narrow) -> Refusal | None:
    """Return the refusal of a layer that does not compute in float32, or ``None``."""
    own = set(layer.nodes) | {edge.node for edge in layer.edges}
    values = [v for node in model.graph if node.name in own for v in (*node.inputs, *node.outputs)]
    found = {v.dtype for v in values if v is not None}
    for dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE):
        if dtype in found and ir.DataType.FLOAT not in found:
            already = dtype is narrow.dtype
            status = Status.NOT_APPLICABLE if already else Status.NOT_YET
            remedy = "" if already else "export the model in float32"
            return Refusal(status, f"it computes in {dtype}", remedy)
    return None


def _weights_of(model: ir.Model, layer: Layer) -> list[tuple[str, ir.TensorProtocol]]:
    names = {name for use in layer.occurrences for name in (*use.inputs, layer.weight)}
    found = [(name, stored_constant(model, name)) for name in sorted(filter(None, names))]
    return [(name, tensor) for name, tensor in found if tensor is not None]


def _absmax(tensor: ir.TensorProtocol) -> float:
    array = tensor.numpy()
    if array.dtype.kind != "f" or not array.size:
        return 0.0
    return float(max(abs(float(array.max())), abs(float(array.min()))))


def _units(layer: Layer, use: Occurrence) -> list[tuple[str, ...]]:
    """Return the groups of nodes at whose borders values are rounded."""
    if layer.kind in (Kind.LINEAR, Kind.CONV):
        return [(name,) for name in use.nodes]
    return [use.nodes]


def _is_float(value: ir.Value) -> bool:
    return value.dtype in (None, ir.DataType.FLOAT)


@dataclass
class Rounder:
    """Puts roundings into one graph for one layer.

    Attributes:
        editor: What edits the graph.
        narrow: The type to round to.
        filled: Tensors that carry the fill of a mask, which is taken as the least finite number.
        halves: Narrow copies of constants by the constant's name.
    """

    editor: GraphEditor
    narrow: Narrow
    filled: frozenset[str] = frozenset()
    halves: dict[str, ir.Value] = field(default_factory=dict)
    _least: ir.Value | None = None

    def round(
        self, anchor: ir.Node, value: ir.Value, after: bool = False, filled: bool | None = None
    ) -> ir.Value:
        """Return the value rounded, by nodes right before or right after ``anchor``.

        NOTE: the sum of one term keeps the Casts from what reads them. ONNX Runtime takes a Cast
        from fp16 into the LayerNormalization that it makes of primitives, next to fp32 weights,
        and then refuses to load the graph.
        """
        if (str(value.name) in self.filled) if filled is None else filled:
            anchor, value = self._add(anchor, value, "Max", "fill", after, [self._least_value()])
        for op, stem, attributes in (
            ("Cast", "narrow", self.narrow.cast),
            ("Cast", "to_float", _FLOAT),
            ("Sum", "rounded", {}),
        ):
            anchor, value = self._add(anchor, value, op, stem, after, attributes=attributes)
            if attributes.get("to") == int(ir.DataType.BFLOAT16):  # NumPy has no such type
                value.type = ir.TensorType(ir.DataType.BFLOAT16)
        return value

    def _add(
        self,
        anchor: ir.Node,
        value: ir.Value,
        op: str,
        stem: str,
        after: bool,
        others: list[ir.Value] | None = None,
        attributes: Mapping[str, int | float] | None = None,
    ) -> tuple[ir.Node, ir.Value]:
        inputs = [value, *(others or [])]
        made = self.editor.op(anchor, op, inputs, stem, after=after, attributes=attributes)[0]
        producer = made.producer()
        assert producer is not None
        return producer if after else anchor, made

    def _least_value(self) -> ir.Value:
        if self._least is None:
            least = np.array(-self.narrow.top, np.float32)
            self._least = self.editor.constant("least", least)
            self.editor.stored_bytes -= least.nbytes  # no weight, and no scale of one
        return self._least

    def round_edges(self, use: Occurrence) -> None:
        """Round the tensors of a use's edges for the readers that are the layer's."""
        done: dict[ir.Value, ir.Value] = {}
        for edge in use.edges:
            node = self.editor.nodes.get(edge.node)
            value = node.inputs[edge.index] if node is not None else None
            if node is None or value is None:
                continue
            if value not in done:
                producer = value.producer()
                anchor = self.editor.graph[0] if producer is None else producer
                done[value] = self.round(anchor, value, after=producer is not None)
            node.replace_input_with(edge.index, done[value])
        give_out(self.editor, done)

    def round_table(self, use: Occurrence) -> None:
        """Look rows up in a narrow table."""
        node = self.editor.nodes[use.nodes[0]]
        table = node.inputs[0]
        array = constant_of(table)
        if table is None or array is None:
            return
        key = str(table.name)
        if key not in self.halves:
            self.halves[key] = self.editor.constant("table", array.astype(self.narrow.numpy))
        axis = {"axis": node.attributes.get_int("axis", 0)}
        inputs = [self.halves[key], node.inputs[1]]
        rows = self.editor.op(node, "Gather", inputs, "rows", attributes=axis)
        wide = self.editor.op(node, "Cast", [rows[0]], "to_float", attributes=_FLOAT)[0]
        self.editor.replace_uses(node.outputs[0], wide)
        self.editor.drop_unused([node])

    def round_unit(self, unit: tuple[str, ...], use: Occurrence) -> None:
        """Round what enters and leaves a group of nodes, and narrow its constants."""
        nodes = [self.editor.nodes[name] for name in unit if name in self.editor.nodes]
        inside = {value for node in nodes for value in node.outputs}
        rounded: dict[ir.Value, ir.Value] = {}
        single = len(nodes) == 1
        for node in nodes:
            for index, value in enumerate(node.inputs):
                if value is None or value in inside or not _is_float(value):
                    continue
                array = constant_of(value)
                if array is not None:
                    if single or source_of(value).name in use.inputs:
                        self._narrow_constant(node, index, array)
                    continue
                if value not in rounded:
                    rounded[value] = self.round(node, value)
                node.replace_input_with(index, rounded[value])
        for node in nodes:
            for value in node.outputs:
                readers = [reader for reader, _ in value.uses() if reader not in nodes]
                if (readers or value.is_graph_output()) and _is_float(value):
                    self._round_output(node, value, nodes)

    def _round_output(self, node: ir.Node, value: ir.Value, nodes: list[ir.Node]) -> None:
        readers = [reader for reader, _ in value.uses()]
        rounded = self.round(node, value, after=True)
        first = [reader for reader, _ in value.uses() if reader not in readers]
        self.editor.replace_uses(value, rounded, keep=[*nodes, *first])

    def _narrow_constant(self, node: ir.Node, index: int, array: np.ndarray) -> None:
        if array.dtype != np.float32:
            return
        value = node.inputs[index]
        assert value is not None
        key = str(value.name)
        if key not in self.halves:
            if key in self.filled:
                array = np.maximum(array, np.float32(-self.narrow.top))
            self.halves[key] = self.editor.constant("weight", array.astype(self.narrow.numpy))
        inputs = [self.halves[key]]
        wide = self.editor.op(node, "Cast", inputs, "weight_to_float", attributes=_FLOAT)[0]
        producer = value.producer()
        node.replace_input_with(index, wide)
        if producer is not None:
            self.editor.drop_unused([producer])
        else:
            self.editor.drop_initializer(value)


def give_out(editor: GraphEditor, done: Mapping[ir.Value, ir.Value]) -> None:
    """Make a cache that the graph gives out hold what attention reads.

    What merely crosses the border of a segment is read by others, who get it as it was.
    """
    for value, rounded in done.items():
        if value.is_graph_output() and BORDER_KEY not in value.metadata_props:
            editor.replace_uses(value, rounded, keep=[reader for reader, _ in value.uses()])
