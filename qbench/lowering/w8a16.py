"""w8a16: 8-bit symmetric weight, floating-point activation.

A linear weight is cut in blocks of 128 along K; an embedding table has one scale a row, and the
looked-up rows alone are scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from qbench.formats import FORMATS
from qbench.lowering.base import Change, Refusal
from qbench.lowering.constants import constant_of
from qbench.lowering.edit import GraphEditor
from qbench.lowering.linear import (
    check_operators,
    present,
    require_linear,
    require_table,
    unchanged,
)
from qbench.lowering.weight_only import apply_blocks, require_block
from qbench.records import Kind, Layer


@dataclass(frozen=True)
class W8A16Lowering:
    """int8 weight behind a DequantizeLinear; int8 table behind Gather and a scale.

    Attributes:
        block: Elements of K that share a scale; ``None`` for 128 or what divides K.
    """

    block: int | None = None
    format = FORMATS["w8a16"]

    def requires(self, model: ir.Model, layer: Layer) -> Refusal | None:
        """Return why the layer cannot take the format, or ``None``."""
        if layer.kind is Kind.EMBEDDING:
            return require_table(model, layer)
        return require_linear(model, layer) or require_block(model, layer, self.block)

    def apply(self, model: ir.Model, layer: Layer, clips: Mapping[str, float]) -> Change:
        """Rewrite the graph in place; no clips are needed."""
        if layer.kind is Kind.EMBEDDING:
            return _apply_table(model, layer)
        return apply_blocks(model, layer, 8, self.block, choosing=False)

    def ensures(self, model: ir.Model, layer: Layer) -> str | None:
        """Return what is missing from the rewritten graph, or ``None``."""
        op = "Gather" if layer.kind is Kind.EMBEDDING else "DequantizeLinear"
        return check_operators(model, layer, {op: f"no {op}"})


def _apply_table(model: ir.Model, layer: Layer) -> Change:
    uses = present(model, layer)
    if not uses:
        return unchanged()
    editor = GraphEditor(model, layer.name)
    table: tuple[ir.Value, ir.Value] | None = None
    for use in uses:
        node = editor.nodes[use.nodes[0]]
        if table is None:
            table = _quantized_table(editor, node.inputs[0])
        rows = editor.op(node, "Gather", [table[0], node.inputs[1]], "rows")[0]
        scales = editor.op(node, "Gather", [table[1], node.inputs[1]], "row_scales")[0]
        to_float = {"to": int(ir.DataType.FLOAT)}
        wide = editor.op(node, "Cast", [rows], "to_float", attributes=to_float)[0]
        editor.replace_uses(node.outputs[0], editor.op(node, "Mul", [wide, scales], "rescale")[0])
        editor.drop_unused([node])
    return editor.change()


def _quantized_table(editor: GraphEditor, value: ir.Value | None) -> tuple[ir.Value, ir.Value]:
    table = constant_of(value)
    assert table is not None
    scale = np.abs(table).max(axis=1, keepdims=True).astype(np.float32) / np.float32(127)
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    rows = np.clip(np.rint(table / scale), -127, 127).astype(np.int8)
    return editor.constant("table", rows), editor.constant("scale", scale)
