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
        weight: Shape [K, N]; block divides K.
        importance: Mean square of each channel of the activation, shape [K].
        bits: Bits of an element.
        block: Elements that share a scale.
    """
    k, n = weight.shape
    blocks = weight.reshape(k // block, block, n)
    top = np.abs(blocks).max(axis=1, keepdims=True)
    weigh = importance.astype(np.float64).reshape(k // block, block, 1)
    best = np.full((k // block, 1, n), np.inf)
    chosen = np.ones((k // block, 1, n), np.float32)
    for ratio in RATIOS:
        clip = top * np.float32(ratio)
        error = blocks - dequantized(np.clip(blocks, -clip, clip).reshape(k, n), bits, block)
        cost = (weigh * np.square(error, dtype=np.float64)).sum(axis=1, keepdims=True)
        better = cost < best
        best, chosen = np.where(better, cost, best), np.where(better, np.float32(ratio), chosen)
    clip = top * chosen
    clipped: npt.NDArray[np.float32] = np.clip(blocks, -clip, clip).reshape(k, n)
    return clipped


def dequantized(weight: npt.NDArray[np.float32], bits: int, block: int) -> npt.NDArray[np.float32]:
    """Return the numbers that W [K, N] stands for after block-wise rounding, as blocks.

    Returns:
        Shape [K / block, block, N].
    """
    integers, scale = quantize_blocks(weight, bits, block)
    blocks = integers.reshape(len(scale), block, -1).astype(np.float32)
    wide: npt.NDArray[np.float32] = blocks * scale[:, None, :]
    return wide
