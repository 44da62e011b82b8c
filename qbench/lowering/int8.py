"""int8: static W8A8, S8S8, per-tensor activation, per-channel weight on the output axis.

Each MatMul gets a Q/DQ pair of its own: a pair shared by several products halves the number
that ONNX Runtime fuses. Bias, output, LayerNorm input and residual stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from qbench.formats import FORMATS
from qbench.lowering.base import Change, Refusal
from qbench.lowering.edit import GraphEditor
from qbench.lowering.linear import (
    check_operators,
    linear_forms,
    per_channel_int8,
    present,
    require_linear,
    swap_weight,
    unchanged,
)
from qbench.records import Layer


class Int8Lowering:
    """QuantizeLinear and DequantizeLinear around the activation, int8 weight behind a DQ."""

    format = FORMATS["int8"]

    def requires(self, model: ir.Model, layer: Layer) -> Refusal | None:
        """Return why the layer cannot take the format, or ``None``."""
        return require_linear(model, layer)

    def apply(self, model: ir.Model, layer: Layer, clips: Mapping[str, float]) -> Change:
        """Rewrite the graph in place; ``clips`` needs the layer's edge tensors.

        Raises:
            KeyError: If an edge tensor has no clip.
        """
        uses = present(model, layer)
        if not uses:
            return unchanged()
        editor = GraphEditor(model, layer.name)
        weight: tuple[ir.Value, ir.Value] | None = None
        for form in linear_forms(editor, uses):
            scale = editor.constant("x_scale", np.array(clips[form.tensor] / 127, np.float32))
            zero = editor.constant("x_zero", np.array(0, np.int8))
            quantized = editor.op(form.node, "QuantizeLinear", [form.x, scale, zero], "quantize")
            x = editor.op(form.node, "DequantizeLinear", [*quantized, scale, zero], "dequantize")
            if weight is None:
                int8, scales = per_channel_int8(form.weight)
                weight = editor.constant("weight", int8), editor.constant("scale", scales)
            w = editor.op(
                form.node, "DequantizeLinear", weight, "dequantize_weight", attributes={"axis": 1}
            )
            form.node.replace_input_with(0, x[0])
            swap_weight(editor, form, w[0])
        return editor.change()

    def ensures(self, model: ir.Model, layer: Layer) -> str | None:
        """Return what is missing from the rewritten graph, or ``None``."""
        wanted = {"QuantizeLinear": "no QuantizeLinear", "DequantizeLinear": "no DequantizeLinear"}
        return check_operators(model, layer, wanted)
