"""Blocks along K: what ``w8a16``, ``w4a16`` and ``w4a8`` share.

A block of consecutive elements of K shares one symmetric scale. The weight is a signed integer
initializer [K, N] behind ``DequantizeLinear(axis=0, block_size=…)`` with scales
[K / block, N]; ONNX Runtime turns that and the MatMul into MatMulNBits by itself.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from qbench.formats import format_named
from qbench.lowering.base import Change, Refusal
from qbench.lowering.edit import GraphEditor
from qbench.lowering.linear import (
    linear_forms,
    present,
    summed_length,
    swap_weight,
    unchanged,
)
from qbench.records import Kind, Layer, Status

#: Block sizes to choose from, the usual one first.
BLOCKS = (128, 64, 32)
#: Formats whose last block of K may be a part of one.
RAGGED = frozenset({"w4a8"})
#: Columns of a weight on which block sizes are compared.
_COMPARED = 256
#: Bits of a scale.
_SCALE_BITS = 32


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


def choose_block(
    weight: np.ndarray, bits: int, asked: int | None = None, ragged: bool = False
) -> tuple[int, str]:
    """Return the block size of a weight, and in words why it is not the usual one.

    A smaller block costs bits for its scales. It is taken where it lowers the squared error of
    the weight by more than those bits would buy elsewhere: a factor of four a bit, as uniform
    rounding gives.

    Args:
        weight: W [K, N].
        bits: Bits of an element.
        asked: The block that a plan asks for; ``None`` to choose.
        ragged: Whether the last block of K may be a part of one.
    """
    k = weight.shape[0]
    if asked is not None and (ragged or k % asked == 0):
        return asked, "" if asked == BLOCKS[0] else f"block {asked}, as planned"
    fitting = [b for b in BLOCKS if (b < 2 * k or b == BLOCKS[-1] if ragged else k % b == 0)]
    if not fitting:
        block = block_for(k, BLOCKS[0])
        return block, f"block {block}: {BLOCKS[0]} does not divide K"
    sample = weight[:, :: max(1, weight.shape[1] // _COMPARED)]
    errors = {block: _block_error(sample, bits, block) for block in fitting}
    prices = {b: errors[b] * 4.0 ** (_SCALE_BITS * -(-k // b) / k) for b in fitting}
    block = min(fitting, key=lambda b: (prices[b], -b))
    return block, _block_words(block, fitting[0], errors)


def own_block(weight: np.ndarray, format_name: str) -> int:
    """Return the block size that a format's lowering chooses for W [K, N] by itself."""
    bits = format_named(format_name).weight_bits
    return choose_block(weight, bits, ragged=format_name in RAGGED)[0]


def require_block(
    model: ir.Model, layer: Layer, block: int | None, ragged: bool = False
) -> Refusal | None:
    """Return why the block size that a plan asks for cannot be had, or ``None``."""
    if block is None or layer.kind is not Kind.LINEAR:
        return None
    k = summed_length(model, layer)
    whole = block >= 16 and block & (block - 1) == 0
    if whole if ragged else (k is None or k % block == 0):
        return None
    allowed = "a power of two from 16 on" if ragged else f"a divisor of K, which is {k}"
    return Refusal(Status.INVALID, f"got block {block}; allowed: {allowed}", "delete `block`")


def _block_words(block: int, usual: int, errors: dict[int, float]) -> str:
    if block != usual:
        less = 1 - errors[block] / errors[usual]
        return f"block {block}: the error of its weight is {less:.0%} below that of {usual}"
    return "" if block == BLOCKS[0] else f"block {block}: {BLOCKS[0]} does not divide K"


def _block_error(weight: np.ndarray, bits: int, block: int) -> float:
    """Return the squared error of W [K, N] rounded in blocks."""
    integers, scales = quantize_blocks(weight, bits, block)
    rounded = integers * np.repeat(scales, block, axis=0)[: len(weight)]
    return float(np.square(rounded - weight, dtype=np.float64).sum())


def quantize_blocks(weight: np.ndarray, bits: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return W [K, N] rounded to symmetric integers, block by block along K.

    Returns:
        Integers as int8 [K, N] in ±(2^(bits−1) − 1), and the scales, float32 [⌈K / block⌉, N].
    """
    k, n = weight.shape
    top = np.float32(2 ** (bits - 1) - 1)
    blocks = np.pad(weight, ((0, -k % block), (0, 0))).reshape(-1, block, n)
    scale = np.abs(blocks).max(axis=1) / top
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    rounded = np.clip(np.rint(blocks / scale[:, None, :]), -top, top)
    return rounded.reshape(-1, n)[:k].astype(np.int8), scale


def apply_blocks(
    model: ir.Model, layer: Layer, bits: int, asked: int | None = None, choosing: bool = True
) -> Change:
    """Put each use's weight behind a blocked DequantizeLinear of ``bits`` bits.

    Args:
        model: The graph.
        layer: The layer.
        bits: Bits of an element.
        asked: The block size of the plan; ``None`` where none is written down.
        choosing: Whether a smaller block than the usual one may be chosen for its error.
    """
    uses = present(model, layer)
    if not uses:
        return unchanged()
    editor = GraphEditor(model, layer.name)
    weight: tuple[ir.Value, ir.Value] | None = None
    block, remark = BLOCKS[0], ""
    for form in linear_forms(editor, uses):
        if weight is None:
            usual = None if choosing else block_for(form.weight.shape[0], BLOCKS[0])
            wanted = usual if asked is None else asked
            block, remark = choose_block(form.weight, bits, wanted)
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
        swap_weight(editor, form.node, dequantized[0])
    return editor.change(remark, block=block)
