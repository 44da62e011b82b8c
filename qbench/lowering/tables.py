"""Lookup tables as int8 rows: a row is looked up first, and scaled then.

A table that another layer multiplies by (``Layer.tie``) takes that product's numbers, so that the
engine stores one table: for ``int8`` one scale a row, for ``w8a16`` one scale a block of the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from qbench.lowering.base import Change
from qbench.lowering.constants import constant_of
from qbench.lowering.edit import GraphEditor
from qbench.lowering.linear import per_channel_int8, present, unchanged
from qbench.lowering.weight_only import BLOCKS, block_for, quantize_blocks
from qbench.records import Layer

#: Integer rows, their scales, and which scale each element of a row takes where there are several.
_Made: TypeAlias = tuple[ir.Value, ir.Value, ir.Value | None]


def apply_table(model: ir.Model, layer: Layer, asked: int | None = None) -> Change:
    """Put a table behind Gather and a scale: one a row, or one a block of it where it is tied.

    Args:
        model: The graph; it is rewritten in place.
        layer: The table.
        asked: Elements of a row that share a scale, as a plan says.
    """
    width = layer.weight_shape[1]
    block = block_for(width, asked or BLOCKS[0]) if layer.tie or asked else None
    editor = _looked_up(model, layer, lambda own, table: _blocked(own, table, block or width))
    return unchanged() if editor is None else editor.change(block=block)


def apply_rows_table(model: ir.Model, layer: Layer) -> Change:
    """Put a table behind Gather and one scale a row, the scales as a vector."""

    def made(editor: GraphEditor, table: np.ndarray) -> _Made:
        integers, scale = per_channel_int8(table.astype(np.float32).T)
        return editor.constant("table", integers.T), editor.constant("scale", scale), None

    editor = _looked_up(model, layer, made)
    return unchanged() if editor is None else editor.change()


def _looked_up(
    model: ir.Model, layer: Layer, make: Callable[[GraphEditor, np.ndarray], _Made]
) -> GraphEditor | None:
    """Put what ``make`` makes of a table behind each of its lookups; ``None`` where it has none."""
    uses = present(model, layer)
    if not uses:
        return None
    editor = GraphEditor(model, layer.name)
    table = constant_of(editor.nodes[uses[0].nodes[0]].inputs[0])
    assert table is not None
    made = make(editor, table)
    for use in uses:
        _scale_rows(editor, editor.nodes[use.nodes[0]], *made)
    return editor


def _blocked(editor: GraphEditor, table: np.ndarray, block: int) -> _Made:
    """Return int8 rows [V, K], scales [V, ⌈K / block⌉], and which scale each element takes."""
    integers, scale = quantize_blocks(table.astype(np.float32).T, 8, block)
    spread = None
    if len(scale) > 1:
        spread = editor.constant("block_of", np.arange(table.shape[1], dtype=np.int32) // block)
    return editor.constant("table", integers.T), editor.constant("scale", scale.T), spread


def _scale_rows(
    editor: GraphEditor, node: ir.Node, table: ir.Value, scale: ir.Value, spread: ir.Value | None
) -> None:
    """Replace a lookup by one in integers and one of the scales, multiplied."""
    ids = node.inputs[1]
    rows = editor.op(node, "Gather", [table, ids], "rows")[0]
    scales = editor.op(node, "Gather", [scale, ids], "row_scales")[0]
    if scale.shape is not None and scale.shape.rank() == 1:
        last = editor.constant("last_axis", np.array([-1], np.int64))
        scales = editor.op(node, "Unsqueeze", [scales, last], "row_scale")[0]
    if spread is not None:
        scales = editor.op(node, "Gather", [scales, spread], "scales", attributes={"axis": -1})[0]
    to_float = {"to": int(ir.DataType.FLOAT)}
    wide = editor.op(node, "Cast", [rows], "to_float", attributes=to_float)[0]
    editor.replace_uses(node.outputs[0], editor.op(node, "Mul", [wide, scales], "rescale")[0])
    editor.drop_unused([node])
