"""Clips found by search over a histogram: least squared error, or least loss of information."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qbench.calibration.observers import bin_edges

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: Steps of a signed 8-bit magnitude, zero left out.
STEPS = 127
#: Equal bins that the entropy search works on, and how far apart its candidates are.
_EQUAL_BINS, _STRIDE = 2048, 8
#: Probability of a bin that Q has nothing in: what was cut off may stand alone in the last one.
_LEAST = 1e-8
#: Clips that the squared-error search tries, as shares of the largest magnitude.
_SHARES = np.linspace(0.01, 1.0, 199)
#: Points that stand for the elements of one bin.
_POINTS = 4


def least_error_clip(histogram: Counts, absmax: float) -> float:
    """Return the clip that minimises the mean squared error of symmetric 8-bit rounding.

    Elements of a bin are taken to lie evenly in it. Of equal clips the largest is taken.

    Args:
        histogram: Bins (``observers.bin_edges``) and counts, shape [2, occupied bins].
        absmax: Largest magnitude seen, > 0.
    """
    low, high = _edges(histogram, absmax)
    places = (np.arange(_POINTS) + 0.5) / _POINTS
    points = low[:, None] + (high - low)[:, None] * places
    counts = histogram[1].astype(np.float64)[:, None]
    best, best_clip = np.inf, absmax
    for share in _SHARES[::-1]:
        clip = absmax * float(share)
        step = clip / STEPS
        error = points - np.rint(np.minimum(points, clip) / step) * step
        cost = float((counts * np.square(error)).sum())
        if cost < best:
            best, best_clip = cost, clip
    return best_clip


def least_entropy_clip(histogram: Counts, absmax: float) -> float:
    """Return the clip whose 128 levels keep most of the distribution of magnitudes.

    The clipped distribution P (what is cut off counts in its last bin) is compared with Q, which
    has the mass of each level spread evenly over the level's occupied bins; the clip minimises
    KL(P ‖ Q). The method is that of S. Migacz, "8-bit Inference with TensorRT" (GTC 2017).

    Args:
        histogram: Bins (``observers.bin_edges``) and counts, shape [2, occupied bins].
        absmax: Largest magnitude seen, > 0.
    """
    equal = _equal_bins(histogram, absmax)
    levels = STEPS + 1
    best, best_bins = np.inf, _EQUAL_BINS
    for bins in range(_EQUAL_BINS, levels - 1, -_STRIDE):
        loss = _information_lost(equal, bins, levels)
        if loss < best:
            best, best_bins = loss, bins
    return absmax * best_bins / _EQUAL_BINS


def _information_lost(equal: Floats, bins: int, levels: int) -> float:
    kept = equal[:bins]
    cut = float(equal[bins:].sum())
    clipped = kept.copy()
    clipped[-1] += cut
    level = np.arange(bins) * levels // bins
    occupied = kept > 0
    mass = np.bincount(level, kept, levels)
    width = np.bincount(level, occupied, levels)
    spread = np.where(occupied, mass[level] / np.maximum(width[level], 1), 0.0)
    if not spread.sum():
        return float("inf")
    p, q = clipped / clipped.sum(), np.maximum(spread / spread.sum(), _LEAST)
    there = p > 0
    return float((p[there] * np.log(p[there] / q[there])).sum())


def _equal_bins(histogram: Counts, absmax: float) -> Floats:
    """Return the histogram over equal bins from 0 to ``absmax``, shape [_EQUAL_BINS]."""
    low, high = _edges(histogram, absmax)
    counts = histogram[1].astype(np.float64)
    scale = _EQUAL_BINS / absmax
    below = np.concatenate([[0.0], np.cumsum(counts)])
    grid = np.arange(_EQUAL_BINS + 1, dtype=np.float64)
    # NOTE: bins that nothing fell in lie between occupied ones; their share is none.
    places = np.stack([low * scale, high * scale], axis=1).reshape(-1)
    totals = np.stack([below[:-1], below[1:]], axis=1).reshape(-1)
    cumulated = np.interp(grid, places, totals, left=0.0, right=below[-1])
    cumulated[0] = 0.0
    equal: Floats = np.diff(cumulated)
    return equal


def _edges(histogram: Counts, absmax: float) -> tuple[Floats, Floats]:
    low, high = bin_edges(histogram[0])
    return np.minimum(low, absmax), np.minimum(high, absmax)


def cut_off(histogram: Counts, absmax: float, clip: float) -> tuple[float, float]:
    """Return what a clip cuts off: the share of elements, and of the sum of squares.

    The second is ``Σ (v − clip)² / Σ v²`` over the magnitudes v beyond the clip, and over all.

    Args:
        histogram: Bins (``observers.bin_edges``) and counts, shape [2, occupied bins].
        absmax: Largest magnitude seen.
        clip: The clipping magnitude.
    """
    low, high = _edges(histogram, absmax)
    counts = histogram[1].astype(np.float64)
    middle = (low + high) / 2
    beyond = np.clip((high - clip) / np.maximum(high - low, 1e-300), 0.0, 1.0)
    error = counts * beyond * np.square(np.maximum((np.maximum(low, clip) + high) / 2 - clip, 0.0))
    total = float((counts * np.square(middle)).sum())
    share = float((counts * beyond).sum() / counts.sum()) if counts.sum() else 0.0
    return share, float(error.sum()) / total if total > 0 else 0.0
