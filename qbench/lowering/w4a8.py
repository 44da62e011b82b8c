"""w4a8: 4-bit weight in blocks along K, activation rounded to 8 bits block by block as it runs.

It is MatMulNBits of ONNX Runtime at accuracy level 4, which multiplies in int8. The level is
written on the node: an engine may hold w4a16 layers beside it, whose level is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    unchanged,
)
from qbench.lowering.weight_only import choose_block, quantize_blocks, require_block
from qbench.records import Layer

#: Operators of ONNX Runtime's own.
CONTRIB = "com.microsoft"
#: The accuracy level of MatMulNBits that computes in int8.
INT8_LEVEL = 4


@dataclass(frozen=True)
class W4A8Lowering:
    """MatMulNBits of 4 bits at accuracy level 4.

    Attributes:
        block: Elements of K that share a scale; ``None`` to choose it from the weight.
    """

    block: int | None = None
    format = FORMATS["w4a8"]

    def requires(self, model: ir.Model, layer: Layer) -> Refusal | None:
        """Return why the layer cannot take the format, or ``None``."""
        return require_linear(model, layer) or require_block(model, layer, self.block, ragged=True)

    def apply(self, model: ir.Model, layer: Layer, clips: Mapping[str, float]) -> Change:
        """Rewrite the graph in place; no clips are needed."""
        uses = present(model, layer)
        if not uses:
            return unchanged()
        editor = GraphEditor(model, layer.name)
        model.graph.opset_imports.setdefault(CONTRIB, 1)
        packed: tuple[ir.Value, ir.Value] | None = None
        shape, block, remark = (0, 0), 0, ""
        for form in linear_forms(editor, uses):
            if packed is None:
                shape = (form.weight.shape[0], form.weight.shape[1])
                block, remark = choose_block(form.weight, 4, self.block, ragged=True)
                packed = _stored(editor, form.weight, block)
            attributes = {
                "K": shape[0],
                "N": shape[1],
                "bits": 4,
                "block_size": block,
                "accuracy_level": INT8_LEVEL,
            }
            product = editor.op(
                form.node,
                "MatMulNBits",
                [form.x, *packed],
                "product",
                attributes=attributes,
                domain=CONTRIB,
            )[0]
            editor.replace_uses(form.node.outputs[0], product)
            editor.drop_unused([form.node])
        return editor.change(remark, block=block)

    def ensures(self, model: ir.Model, layer: Layer) -> str | None:
        """Return what is missing from the rewritten graph, or ``None``."""
        return check_operators(model, layer, {"MatMulNBits": "no MatMulNBits"})


def _stored(editor: GraphEditor, weight: np.ndarray, block: int) -> tuple[ir.Value, ir.Value]:
    """Store W [K, N] as MatMulNBits reads it: uint8 [N, blocks, block / 2], scales [N · blocks].

    Two elements of K share a byte, the first in its lower half; 8 is zero.
    """
    k, n = weight.shape
    integers, scales = quantize_blocks(weight, 4, block)
    blocks = -(-k // block)
    rows = np.full((blocks * block, n), 8, np.uint8)
    rows[:k] = (integers + 8).astype(np.uint8)
    by_channel = rows.T.reshape(n, blocks, block // 2, 2)
    packed = by_channel[..., 0] | (by_channel[..., 1] << 4)
    return (
        editor.constant("packed", packed),
        editor.constant("packed_scale", scales.T.reshape(-1)),
    )
