"""fp8: E4M3 activation, per tensor, and E4M3 weight, one scale an output channel.

Written as QuantizeLinear and DequantizeLinear over FLOAT8E4M3FN. ONNX Runtime on CPU has no
product of fp8: the rounding is real, the product is computed in fp32.

NOTE: its optimiser takes these pairs for pairs of integers. It makes an integer product of a MatMul
between two of them and then refuses the graph, and it drops a Relu before a QuantizeLinear, for
an unsigned integer has no negative numbers. A sum of one term on either side keeps it off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from qbench.formats import FORMATS
from qbench.lowering.base import Change, Refusal
from qbench.lowering.edit import GraphEditor
from qbench.lowering.linear import (
    check_operators,
    linear_forms,
    present,
    require_linear,
    swap_weight,
    unchanged,
)
from qbench.records import Layer

#: Largest number of E4M3.
FP8_MAX = 448.0


@dataclass(frozen=True)
class Fp8Lowering:
    """QuantizeLinear and DequantizeLinear in E4M3 around the activation and behind the weight.

    Attributes:
        bare: Whether nothing that ONNX Runtime needs stands beside the pairs.
    """

    bare: bool = False
    format = FORMATS["fp8"]

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
        zero: ir.Value | None = None
        for form in linear_forms(editor, uses):
            node = form.node
            if zero is None:
                zero = editor.constant("x_zero", np.array(0, ml_dtypes.float8_e4m3fn))
            clip = clips[form.tensor] or 1.0  # nothing but zeros was seen: any scale holds them
            scale = editor.constant("x_scale", np.array(clip / FP8_MAX, np.float32))
            x = form.x if self.bare else editor.op(node, "Sum", [form.x], "apart")[0]
            narrow = editor.op(node, "QuantizeLinear", [x, scale, zero], "quantize")[0]
            narrow.type = ir.TensorType(ir.DataType.FLOAT8E4M3FN)  # NumPy has no such type
            x = editor.op(node, "DequantizeLinear", [narrow, scale, zero], "dequantize")[0]
            x = x if self.bare else editor.op(node, "Sum", [x], "rounded")[0]
            if weight is None:
                small, scales = per_channel_fp8(form.weight)
                weight = editor.constant("weight", small), editor.constant("scale", scales)
            w = editor.op(
                node, "DequantizeLinear", weight, "dequantize_weight", attributes={"axis": 1}
            )
            node.replace_input_with(0, x)
            swap_weight(editor, node, w[0])
        return editor.change()

    def ensures(self, model: ir.Model, layer: Layer) -> str | None:
        """Return what is missing from the rewritten graph, or ``None``."""
        wanted = {"QuantizeLinear": "no QuantizeLinear", "DequantizeLinear": "no DequantizeLinear"}
        return check_operators(model, layer, wanted)


def per_channel_fp8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return W [K, N] as E4M3 with one scale an output channel.

    Returns:
        The rounded weight, float8_e4m3fn [K, N], and the scales, float32 [N].
    """
    scale = np.abs(weight).max(axis=0) / np.float32(FP8_MAX)
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    scaled = np.clip(weight / scale, -FP8_MAX, FP8_MAX)
    return scaled.astype(ml_dtypes.float8_e4m3fn), scale
