"""int8_dynamic: per-channel int8 weight, activation quantized per tensor at run time.

The activation's scale is taken over the whole batch, so an answer depends on its batch-mates.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    unchanged,
)
from qbench.records import Layer


class Int8DynamicLowering:
    """DynamicQuantizeLinear and MatMulInteger, scaled back to floating point."""

    format = FORMATS["int8_dynamic"]

    def requires(self, model: ir.Model, layer: Layer) -> Refusal | None:
        """Return why the layer cannot take the format, or ``None``."""
        return require_linear(model, layer)

    def apply(self, model: ir.Model, layer: Layer, clips: Mapping[str, float]) -> Change:
        """Rewrite the graph in place; no clips are needed."""
        uses = present(model, layer)
        if not uses:
            return unchanged()
        editor = GraphEditor(model, layer.name)
        weight: tuple[ir.Value, ir.Value] | None = None
        for form in linear_forms(editor, uses):
            node = form.node
            if weight is None:
                int8, scales = per_channel_int8(form.weight)
                weight = editor.constant("weight", int8), editor.constant("scale", scales)
            x, x_scale, x_zero = editor.op(
                node, "DynamicQuantizeLinear", [form.x], "quantize", outputs=3
            )
            scale = editor.op(node, "Mul", [x_scale, weight[1]], "scales")[0]
            product = editor.op(node, "MatMulInteger", [x, weight[0], x_zero], "product")[0]
            cast = editor.op(
                node, "Cast", [product], "to_float", attributes={"to": int(ir.DataType.FLOAT)}
            )[0]
            result = editor.op(node, "Mul", [cast, scale], "rescale")[0]
            editor.replace_uses(node.outputs[0], result)
            editor.drop_unused([node])
        return editor.change()

    def ensures(self, model: ir.Model, layer: Layer) -> str | None:
        """Return what is missing from the rewritten graph, or ``None``."""
        return check_operators(model, layer, {"MatMulInteger": "no MatMulInteger"})
