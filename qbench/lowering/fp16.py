"""fp16 on a backend without fp16 kernels: rounding at every border, arithmetic in fp32.

Weights are stored as fp16. What enters a node of the layer and what leaves it is rounded to fp16
(a pair of Casts); a value beyond 65504 becomes infinite there, as it does in hardware. A pattern
that spells out one operator (a LayerNorm in primitives) is rounded at the pattern's borders, as
that operator is: so both graphs give the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from qbench.formats import FORMATS
from qbench.graph.lint import FP16_MAX
from qbench.graph.segments import BORDER_KEY
from qbench.lowering.base import Change, Refusal
from qbench.lowering.edit import GraphEditor
from qbench.lowering.linear import check_operators, constant_of, present, source_of, unchanged
from qbench.records import Kind, Layer, Occurrence, Status

_HALF = {"to": int(ir.DataType.FLOAT16)}
_FLOAT = {"to": int(ir.DataType.FLOAT)}


class Fp16Lowering:
    """fp16 weights and fp16 rounding at the borders of a layer's nodes."""

    format = FORMATS["fp16"]

    def requires(self, model: ir.Model, layer: Layer) -> Refusal | None:
        """Return why the layer cannot take the format, or ``None``."""
        other = _other_dtype(model, layer)
        if other is not None:
            return other
        for name in _weights_of(model, layer):
            value = model.graph.initializers[name]
            top = 0.0 if value.const_value is None else _absmax(value.const_value)
            if top > FP16_MAX:
                return Refusal(
                    Status.INVALID,
                    f"its weight {name!r} reaches {top:.6g}, beyond fp16's 65504",
                    "keep the layer in fp32",
                )
        return None

    def apply(self, model: ir.Model, layer: Layer, clips: Mapping[str, float]) -> Change:
        """Rewrite the graph in place; no clips are needed."""
        uses = present(model, layer)
        if not uses:
            return unchanged()
        editor = GraphEditor(model, layer.name)
        halves: dict[str, ir.Value] = {}
        for use in uses:
            if layer.kind is Kind.KV:
                _round_edges(editor, use)
            elif layer.kind is Kind.EMBEDDING:
                _round_table(editor, use, halves)
            else:
                for unit in _units(layer, use):
                    _round_unit(editor, unit, use, halves)
        return editor.change()

    def ensures(self, model: ir.Model, layer: Layer) -> str | None:
        """Return what is missing from the rewritten graph, or ``None``."""
        return check_operators(model, layer, {"Cast": "no Cast to fp16"})


def _other_dtype(model: ir.Model, layer: Layer) -> Refusal | None:
    """Return the refusal of a layer that does not compute in float32, or ``None``."""
    own = set(layer.nodes) | {edge.node for edge in layer.edges}
    values = [v for node in model.graph if node.name in own for v in (*node.inputs, *node.outputs)]
    found = {v.dtype for v in values if v is not None}
    for dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE):
        if dtype in found and ir.DataType.FLOAT not in found:
            already = dtype is ir.DataType.FLOAT16
            status = Status.NOT_APPLICABLE if already else Status.NOT_YET
            remedy = "" if already else "export the model in float32"
            return Refusal(status, f"it computes in {dtype}", remedy)
    return None


def _weights_of(model: ir.Model, layer: Layer) -> list[str]:
    names = {name for use in layer.occurrences for name in (*use.inputs, layer.weight)}
    return sorted(name for name in names if name in model.graph.initializers)


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


def _round(editor: GraphEditor, anchor: ir.Node, value: ir.Value, after: bool = False) -> ir.Value:
    """Return the value rounded to fp16, by nodes right before or right after ``anchor``.

    NOTE: the sum of one term keeps the Casts from what reads them. ONNX Runtime takes a Cast from
    fp16 into the LayerNormalization that it makes of primitives, next to fp32 weights, and then
    refuses to load the graph.
    """
    for op, stem, attributes in (
        ("Cast", "to_half", _HALF),
        ("Cast", "to_float", _FLOAT),
        ("Sum", "rounded", {}),
    ):
        value = editor.op(anchor, op, [value], stem, after=after, attributes=attributes)[0]
        producer = value.producer()
        assert producer is not None
        anchor = producer if after else anchor
    return value


def _round_edges(editor: GraphEditor, use: Occurrence) -> None:
    done: dict[ir.Value, ir.Value] = {}
    for edge in use.edges:
        node = editor.nodes.get(edge.node)
        value = node.inputs[edge.index] if node is not None else None
        if node is None or value is None:
            continue
        if value not in done:
            producer = value.producer()
            first = editor.graph[0]
            anchor = first if producer is None else producer
            done[value] = _round(editor, anchor, value, after=producer is not None)
        node.replace_input_with(edge.index, done[value])
    for value, rounded in done.items():
        # A cache that the graph gives out holds what attention reads; what merely crosses the
        # border of a segment is read by others, who get it as it was.
        if value.is_graph_output() and BORDER_KEY not in value.metadata_props:
            editor.replace_uses(value, rounded, keep=[reader for reader, _ in value.uses()])


def _round_table(editor: GraphEditor, use: Occurrence, halves: dict[str, ir.Value]) -> None:
    node = editor.nodes[use.nodes[0]]
    table = node.inputs[0]
    array = constant_of(table)
    if table is None or array is None:
        return
    key = str(table.name)
    if key not in halves:
        halves[key] = editor.constant("table", array.astype(np.float16))
    attributes = {"axis": node.attributes.get_int("axis", 0)}
    rows = editor.op(node, "Gather", [halves[key], node.inputs[1]], "rows", attributes=attributes)
    wide = editor.op(node, "Cast", [rows[0]], "to_float", attributes=_FLOAT)[0]
    editor.replace_uses(node.outputs[0], wide)
    editor.drop_unused([node])


def _is_float(value: ir.Value) -> bool:
    return value.dtype in (None, ir.DataType.FLOAT)


def _round_unit(
    editor: GraphEditor, unit: tuple[str, ...], use: Occurrence, halves: dict[str, ir.Value]
) -> None:
    nodes = [editor.nodes[name] for name in unit if name in editor.nodes]
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
                    _halve_constant(editor, node, index, array, halves)
                continue
            if value not in rounded:
                rounded[value] = _round(editor, node, value)
            node.replace_input_with(index, rounded[value])
    for node in nodes:
        for value in node.outputs:
            readers = [reader for reader, _ in value.uses() if reader not in nodes]
            if (readers or value.is_graph_output()) and _is_float(value):
                _round_output(editor, node, value, nodes)


def _round_output(
    editor: GraphEditor, node: ir.Node, value: ir.Value, nodes: list[ir.Node]
) -> None:
    readers = [reader for reader, _ in value.uses()]
    rounded = _round(editor, node, value, after=True)
    first = [reader for reader, _ in value.uses() if reader not in readers]
    editor.replace_uses(value, rounded, keep=[*nodes, *first])


def _halve_constant(
    editor: GraphEditor, node: ir.Node, index: int, array: np.ndarray, halves: dict[str, ir.Value]
) -> None:
    if array.dtype != np.float32:
        return
    value = node.inputs[index]
    assert value is not None
    key = str(value.name)
    if key not in halves:
        halves[key] = editor.constant("weight", array.astype(np.float16))
    wide = editor.op(node, "Cast", [halves[key]], "weight_to_float", attributes=_FLOAT)[0]
    producer = value.producer()
    node.replace_input_with(index, wide)
    if producer is not None:
        editor.drop_unused([producer])
    else:
        editor.drop_initializer(value)
