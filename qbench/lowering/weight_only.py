"""Weight-only blocks: what ``w8a16`` and ``w4a16`` share.

A block of consecutive elements of K shares one symmetric scale. The weight is a signed integer
initializer [K, N] behind ``DequantizeLinear(axis=0, block_size=…)`` with scales
[K / block, N]; ONNX Runtime turns that and the MatMul into MatMulNBits by itself.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from qbench.lowering.base import Change
from qbench.lowering.edit import GraphEditor
from qbench.lowering.linear import linear_forms, present, swap_weight, unchanged
from qbench.records import Layer


def block_for(k: int, wanted: int) -> int:
    """Return the block size for a sum of length ``k``.

    ``wanted`` where it divides ``k``; else the largest power of two from ``wanted`` down to 16
    that does; else the largest divisor of ``k`` up to ``wanted`` that is at least 8; else ``k``.
    """
    size = wanted
    while size >= 16:
        if k % size == 0:
            return size
        size //= 2
    divisors = [d for d in range(8, min(wanted, k) + 1) if k % d == 0]
    return max(divisors, default=k)


def quantize_blocks(weight: np.ndarray, bits: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return W [K, N] rounded to symmetric integers, block by block along K.

    Returns:
        Integers as int8 [K, N] in ±(2^(bits−1) − 1), and the scales, float32 [K / block, N].
    """
    k, n = weight.shape
    top = np.float32(2 ** (bits - 1) - 1)
    blocks = weight.reshape(k // block, block, n)
    scale = np.abs(blocks).max(axis=1) / top
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    rounded = np.clip(np.rint(blocks / scale[:, None, :]), -top, top)
    return rounded.reshape(k, n).astype(np.int8), scale


def apply_blocks(model: ir.Model, layer: Layer, bits: int, wanted_block: int) -> Change:
    """Put each use's weight behind a blocked DequantizeLinear of ``bits`` bits."""
    uses = present(model, layer)
    if not uses:
        return unchanged()
    editor = GraphEditor(model, layer.name)
    weight: tuple[ir.Value, ir.Value] | None = None
    block = wanted_block
    for form in linear_forms(editor, uses):
        if weight is None:
            block = block_for(form.weight.shape[0], wanted_block)
            integers, scales = quantize_blocks(form.weight, bits, block)
            if bits == 4:
                integers = integers.astype(ml_dtypes.int4)
            weight = editor.constant("weight", integers), editor.constant("scale", scales)
        dequantized = editor.op(
            form.node,
            "DequantizeLinear",
            weight,
            "dequantize_weight",
            attributes={"axis": 0, "block_size": block},
        )
        swap_weight(editor, form, dequantized[0])
    remark = "" if block == wanted_block else f"block {block}: {wanted_block} does not divide K"
    return editor.change(remark)
