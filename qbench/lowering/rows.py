"""int8_dynamic with a scale of its own for each row of the activation (a token, mostly).

An answer then depends neither on its batch-mates nor on padding, and an outlier costs its own
row alone. It is written in plain operators: ``DynamicQuantizeLinear`` knows one scale a tensor.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qbench.lowering.base import Change
from qbench.lowering.edit import GraphEditor
from qbench.lowering.linear import LinearForm, linear_forms, per_channel_int8, present, unchanged
from qbench.records import Layer

#: A row of zeros is divided by this.
_SMALLEST = 1e-30


def apply_rows(model: ir.Model, layer: Layer) -> Change:
    """Multiply in int8, each row of the activation scaled by its own largest magnitude."""
    uses = present(model, layer)
    if not uses:
        return unchanged()
    editor = GraphEditor(model, layer.name)
    weight: tuple[ir.Value, ir.Value] | None = None
    for form in linear_forms(editor, uses):
        if weight is None:
            int8, scales = per_channel_int8(form.weight)
            weight = editor.constant("weight", int8), editor.constant("scale", scales)
        result = _product(editor, form, weight)
        editor.replace_uses(form.node.outputs[0], result)
        editor.drop_unused([form.node])
    return editor.change()


def _product(editor: GraphEditor, form: LinearForm, weight: tuple[ir.Value, ir.Value]) -> ir.Value:
    node = form.node
    magnitude = editor.op(node, "Abs", [form.x], "magnitude")[0]
    last = editor.constant("last_axis", np.array([-1], np.int64))
    top = editor.op(node, "ReduceMax", [magnitude, last], "row_top", attributes={"keepdims": 1})[0]
    floor = editor.constant("row_floor", np.array(_SMALLEST, np.float32))
    seen = editor.op(node, "Max", [top, floor], "row_seen")[0]
    steps = editor.constant("row_steps", np.array(127, np.float32))
    scale = editor.op(node, "Div", [seen, steps], "row_scale")[0]
    scaled = editor.op(node, "Div", [form.x, scale], "row_scaled")[0]
    one = editor.constant("one", np.array(1, np.float32))
    zero = editor.constant("zero", np.array(0, np.int8))
    x = editor.op(node, "QuantizeLinear", [scaled, one, zero], "quantize")[0]
    product = editor.op(node, "MatMulInteger", [x, weight[0]], "product")[0]
    to_float = {"to": int(ir.DataType.FLOAT)}
    wide = editor.op(node, "Cast", [product], "to_float", attributes=to_float)[0]
    by_row = editor.op(node, "Mul", [wide, scale], "rescale_rows")[0]
    return editor.op(node, "Mul", [by_row, weight[1]], "rescale")[0]
