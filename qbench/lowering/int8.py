"""int8: static W8A8, S8S8, per-tensor activation, per-channel weight on the output axis.

Each reader gets a Q/DQ pair of its own: a pair shared by several products halves the number that
ONNX Runtime fuses. A layer's kind says which of its tensors are quantized:

- linear, convolution: what enters it, and the weight by output channel;
- embedding: the table, one scale a column, for rows are looked up and columns are its output; one
  scale a row where the table is a product's weight too, whose outputs its rows are;
- attention scores: Q; keys and values: K or V; attention context: the probabilities;
- softmax: what it gives, in steps of 1/127; layer normalisation: what enters it.

Bias, output and residual stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from qbench.formats import FORMATS
from qbench.lowering.base import Change, Refusal
from qbench.lowering.channels import CONVS, channels_of, quantize_channels, require_conv
from qbench.lowering.constants import constant_of
from qbench.lowering.edges import (
    SOFTMAX_CLIP,
    quantize_edges,
    quantize_output,
    quantized,
    require_edges,
    require_softmax,
)
from qbench.lowering.edit import GraphEditor
from qbench.lowering.linear import (
    check_operators,
    linear_forms,
    per_channel_int8,
    present,
    require_linear,
    require_table,
    swap_weight,
    unchanged,
)
from qbench.lowering.tables import apply_rows_table
from qbench.records import Kind, Layer, Occurrence

_PAIR = {"QuantizeLinear": "no QuantizeLinear", "DequantizeLinear": "no DequantizeLinear"}


@dataclass(frozen=True)
class Int8Lowering:
    """QuantizeLinear and DequantizeLinear around the activation, int8 weight behind a DQ.

    Attributes:
        bare: Whether nothing that ONNX Runtime needs stands beside the pairs.
    """

    bare: bool = False
    format = FORMATS["int8"]

    def requires(self, model: ir.Model, layer: Layer) -> Refusal | None:
        """Return why the layer cannot take the format, or ``None``."""
        match layer.kind:
            case Kind.LINEAR | Kind.ACTIVATION | Kind.RESIDUAL_ADD:
                return require_linear(model, layer)
            case Kind.CONV:
                return require_conv(model, layer)
            case Kind.EMBEDDING:
                return require_table(model, layer)
            case Kind.SOFTMAX:
                return require_softmax(model, layer)
            case _:
                return require_edges(model, layer)

    def apply(self, model: ir.Model, layer: Layer, clips: Mapping[str, float]) -> Change:
        """Rewrite the graph in place; ``clips`` needs the layer's edge tensors.

        Raises:
            KeyError: If an edge tensor has no clip.
        """
        uses = present(model, layer)
        if not uses:
            return unchanged()
        editor = GraphEditor(model, layer.name)
        match layer.kind:
            case Kind.LINEAR:
                _apply_linear(editor, uses, clips)
            case Kind.CONV:
                _apply_conv(editor, uses, clips)
            case Kind.EMBEDDING:
                if layer.tie:
                    return apply_rows_table(model, layer)
                _apply_table(editor, uses)
            case Kind.SOFTMAX:
                for use in uses:
                    quantize_output(editor, use, SOFTMAX_CLIP, self.bare)
            case _:
                for use in uses:
                    quantize_edges(editor, use, clips, self.bare)
                editor.stored_bytes += layer.weight_bytes  # a norm's weight stays beside them
        return editor.change()

    def ensures(self, model: ir.Model, layer: Layer) -> str | None:
        """Return what is missing from the rewritten graph, or ``None``."""
        if layer.kind is Kind.EMBEDDING:
            wanted = "Mul" if layer.tie else "DequantizeLinear"
            return check_operators(model, layer, {wanted: f"no {wanted}"})
        keeps_weight = layer.kind not in (Kind.LINEAR, Kind.CONV)
        return check_operators(model, layer, _PAIR, keeps_weight)


def _apply_linear(editor: GraphEditor, uses: list[Occurrence], clips: Mapping[str, float]) -> None:
    weight: tuple[ir.Value, ir.Value] | None = None
    for form in linear_forms(editor, uses):
        x = quantized(editor, form.node, form.x, clips[form.tensor])
        if weight is None:
            int8, scales = per_channel_int8(form.weight)
            weight = editor.constant("weight", int8), editor.constant("scale", scales)
        w = editor.op(
            form.node, "DequantizeLinear", weight, "dequantize_weight", attributes={"axis": 1}
        )
        form.node.replace_input_with(0, x)
        swap_weight(editor, form.node, w[0])


def _apply_conv(editor: GraphEditor, uses: list[Occurrence], clips: Mapping[str, float]) -> None:
    weight: tuple[ir.Value, ir.Value] | None = None
    axis = 0
    for use in uses:
        node = next(editor.nodes[n] for n in use.nodes if editor.nodes[n].op_type in CONVS)
        x, kernel = node.inputs[0], constant_of(node.inputs[1])
        assert x is not None and kernel is not None
        if weight is None:
            channels = channels_of(node, kernel)
            axis = channels.axis
            int8, scales = quantize_channels(channels)
            weight = editor.constant("weight", int8), editor.constant("scale", scales)
        w = editor.op(
            node, "DequantizeLinear", weight, "dequantize_weight", attributes={"axis": axis}
        )
        node.replace_input_with(0, quantized(editor, node, x, clips[use.edges[0].tensor]))
        swap_weight(editor, node, w[0])


def _apply_table(editor: GraphEditor, uses: list[Occurrence]) -> None:
    table: tuple[ir.Value, ir.Value] | None = None
    for use in uses:
        node = editor.nodes[use.nodes[0]]
        if table is None:
            array = constant_of(node.inputs[0])
            assert array is not None
            int8, scales = per_channel_int8(array.astype(np.float32))
            table = editor.constant("table", int8), editor.constant("scale", scales)
        rows = editor.op(node, "Gather", [table[0], node.inputs[1]], "rows")[0]
        wide = editor.op(
            node, "DequantizeLinear", [rows, table[1]], "dequantize", attributes={"axis": -1}
        )
        editor.replace_uses(node.outputs[0], wide[0])
        editor.drop_unused([node])
