"""Clipping the blocks of a 4-bit weight where that costs less than it gains.

A block shares one scale, set by its largest magnitude. Clipping that magnitude makes all other
steps finer. How much an element's error matters is the mean square of what it is multiplied with.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qbench.lowering.weight_only import quantize_blocks

#: Shares of a block's largest magnitude at which it may be clipped, 1 first: it wins a draw.
RATIOS = tuple(round(1 - 0.05 * step, 2) for step in range(11))


def clip_blocks(
    weight: npt.NDArray[np.float32], importance: npt.NDArray[np.float32], bits: int, block: int
) -> npt.NDArray[np.float32]:
    """Return W [K, N] with each block clipped where its weighted squared error is least.

    The result is quantized afterwards as any weight is: a block's largest magnitude is then its
    clip. For each block along K and each output the ratio r of ``RATIOS`` is taken that minimises
    ``Σ importance · (w − Q_r(w))²``, where Q_r clips at r times the largest magnitude and rounds.

    Args:
        weight: Shape [K, N]; the last block may be a part of one.
        importance: Mean square of each channel of the activation, shape [K].
        bits: Bits of an element.
        block: Elements that share a scale.
    """
    k, n = weight.shape
    blocks = np.pad(weight, ((0, -k % block), (0, 0))).reshape(-1, block, n)
    top = np.abs(blocks).max(axis=1, keepdims=True)
    weigh = np.pad(importance.astype(np.float64), (0, -k % block)).reshape(-1, block, 1)
    best = np.full((len(blocks), 1, n), np.inf)
    chosen = np.ones((len(blocks), 1, n), np.float32)
    for ratio in RATIOS:
        clip = top * np.float32(ratio)
        flat = np.clip(blocks, -clip, clip).reshape(-1, n)
        error = blocks - dequantized(flat, bits, block).reshape(blocks.shape)
        cost = (weigh * np.square(error, dtype=np.float64)).sum(axis=1, keepdims=True)
        better = cost < best
        best, chosen = np.where(better, cost, best), np.where(better, np.float32(ratio), chosen)
    clip = top * chosen
    clipped: npt.NDArray[np.float32] = np.clip(blocks, -clip, clip).reshape(-1, n)[:k]
    return clipped


def dequantized(weight: npt.NDArray[np.float32], bits: int, block: int) -> npt.NDArray[np.float32]:
    """Return the numbers that W stands for after block-wise rounding, shape [K, N]."""
    integers, scale = quantize_blocks(weight, bits, block)
    wide: npt.NDArray[np.float32] = integers.astype(np.float32)
    wide *= np.repeat(scale, block, axis=0)[: len(weight)]
    return wide
