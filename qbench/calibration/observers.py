"""Observations: what has been seen of a tensor, as frozen values that merge in any order.

An observation has the same size after one element and after 10¹²: extremes, central moments, the
largest magnitude of each channel, and a histogram of magnitudes that needs no range in advance.

A bin of the histogram is the magnitude's float32 bit pattern without its low 16 bits: sign,
exponent and 7 bits of mantissa, as in bfloat16. There are 32,768 of them, each at most 1/128 of its
value wide, and the last 128 hold what is not finite. Counts are integers, so merging is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qbench.graph.lint import FP16_MAX
from qbench.records import TensorRange

PERCENTILES: tuple[str, ...] = ("99", "99.9", "99.99", "99.999")

Floats = npt.NDArray[np.floating]
Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]

_DROPPED_BITS = 16
_INFINITY_BIN = 0x7F80  # float32 infinity, shifted; NaNs lie above
_MAGNITUDE = 0x7FFF  # all bits of a bin; the one above is the sign
_CHUNK = 1 << 16  # elements; two float64 arrays of it fit a core's cache


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sums of powers of the distance to the mean, in double precision."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    m3: float = 0.0
    m4: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """What has been seen of one tensor.

    Attributes:
        moments: Moments of the finite elements.
        min: Smallest finite element; ``inf`` before the first.
        max: Largest finite element; ``-inf`` before the first.
        non_finite: Elements that were NaN or infinite.
        histogram: Bins in ascending order and their counts, shape [2, occupied bins].
        channel_absmax: Largest magnitude a channel, shape [channels]; empty where not asked for.
    """

    moments: Moments
    min: float
    max: float
    non_finite: int
    histogram: Counts
    channel_absmax: npt.NDArray[np.float64]

    @property
    def absmax(self) -> float:
        """Largest finite magnitude; 0 before the first element."""
        return max(self.max, -self.min, 0.0)


def nothing() -> Observation:
    """Return the observation of no element: the neutral value of ``merge``."""
    empty = np.zeros((2, 0), np.int64)
    return Observation(Moments(), math.inf, -math.inf, 0, empty, np.zeros(0))


def observe(values: Floats, keep: Bools | None = None, *, channels: bool = False) -> Observation:
    """Return the observation of one array.

    Args:
        values: Elements, shape [..., channels].
        keep: Which positions count, shape of the leading axes of ``values``; all where ``None``.
        channels: Whether the last axis has channels, whose magnitudes are then kept apart.
    """
    kept = values if keep is None else values[keep]
    kept = np.ascontiguousarray(kept, dtype=np.float32)
    if kept.size == 0:
        return nothing()
    histogram = _histogram(kept.reshape(-1))
    finite = histogram[0] < _INFINITY_BIN
    non_finite = int(histogram[1, ~finite].sum())
    rows = kept.reshape(-1, kept.shape[-1]) if channels and kept.ndim else kept.reshape(-1, 1)
    flat = kept.reshape(-1)
    if non_finite:
        flat = flat[np.isfinite(flat)]
        rows = np.where(np.isfinite(rows), rows, np.float32(0))
    if flat.size == 0:
        return Observation(
            Moments(), math.inf, -math.inf, non_finite, histogram[:, finite], np.zeros(0)
        )
    per_channel = _channel_absmax(rows) if channels else np.zeros(0)
    return Observation(
        _moments(flat),
        float(flat.min()),
        float(flat.max()),
        non_finite,
        histogram[:, finite],
        per_channel,
    )


def merge(first: Observation, second: Observation) -> Observation:
    """Return the observation of everything that either has seen; the order does not matter."""
    return Observation(
        merge_moments(first.moments, second.moments),
        min(first.min, second.min),
        max(first.max, second.max),
        first.non_finite + second.non_finite,
        merge_histograms(first.histogram, second.histogram),
        _merge_channels(first, second),
    )


def to_range(
    seen: Observation, tensor: str, layer: str = "", *, implicit: bool = False
) -> TensorRange:
    """Return an observation as the record that other stages read.

    The kurtosis of a constant is 0, the headroom of all zeros is infinite.

    Raises:
        ValueError: If no finite element was seen.
    """
    moments = seen.moments
    if moments.count == 0:
        raise ValueError(f"nothing finite was seen of {tensor!r}")
    variance = moments.m2 / moments.count
    fourth = moments.m4 / moments.count
    absmax = seen.absmax
    constant = seen.min == seen.max or variance * variance == 0.0
    return TensorRange(
        tensor=tensor,
        layer=layer,
        count=moments.count,
        min=seen.min,
        max=seen.max,
        absmax=absmax,
        mean=moments.mean,
        std=0.0 if constant else math.sqrt(variance),
        kurtosis=0.0 if constant else fourth / (variance * variance) - 3.0,
        percentiles={
            name: percentile_of(seen.histogram, float(name), absmax) for name in PERCENTILES
        },
        channel_absmax=tuple(float(value) for value in seen.channel_absmax),
        fp16_headroom=FP16_MAX / absmax if absmax > 0 else math.inf,
        implicit=implicit,
        non_finite=seen.non_finite,
    )


def percentile_of(histogram: Counts, percentile: float, absmax: float = math.inf) -> float:
    """Return a percentile of magnitude, interpolated inside its bin, at most ``absmax``.

    The rank is ``percentile / 100 × (count − 1)``; elements of a bin are taken to lie evenly in it.

    Args:
        histogram: Bins and counts, shape [2, occupied bins].
        percentile: In [0, 100].
        absmax: Largest magnitude seen, the upper end of the last bin.

    Raises:
        ValueError: If the histogram is empty or the percentile is out of bounds.
    """
    bins, counts = histogram
    total = int(counts.sum())
    if total == 0:
        raise ValueError("an empty histogram has no percentile")
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile {percentile:g} is out of bounds; allowed: 0 to 100")
    if percentile == 100:
        return min(absmax, float(bin_edges(bins[-1:])[1, 0]))
    rank = percentile / 100 * (total - 1)
    below = np.cumsum(counts) - counts
    index = int(np.searchsorted(below, rank, side="right")) - 1
    if bins[index] == 0:  # zeros, and subnormal numbers below 2⁻¹³³
        return 0.0
    low, high = (float(edge) for edge in bin_edges(bins[index : index + 1])[:, 0])
    share = min((rank - float(below[index]) + 0.5) / float(counts[index]), 1.0)
    high = min(high, absmax)
    return min(low + share * (high - low), absmax)


def bin_edges(bins: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Return the lower and upper magnitude of histogram bins, shape [2, bins]."""
    both = np.stack([bins, bins + 1]).astype(np.uint32) << _DROPPED_BITS
    edges: npt.NDArray[np.float64] = both.view(np.float32).astype(np.float64)
    return edges


def merge_histograms(first: Counts, second: Counts) -> Counts:
    """Return the sum of two histograms, each of shape [2, occupied bins]."""
    if first.shape[1] == 0:
        return second
    if second.shape[1] == 0:
        return first
    size = int(max(first[0, -1], second[0, -1])) + 1
    dense = np.zeros(size, np.int64)
    dense[first[0]] = first[1]
    dense[second[0]] += second[1]
    return _sparse(dense)


def merge_moments(first: Moments, second: Moments) -> Moments:
    """Return the moments of two sets together.

    Formulas: Chan, Golub and LeVeque (1979) for the second moment; Pébay, "Formulas for Robust,
    One-Pass Parallel Computation of Covariances and Arbitrary-Order Statistical Moments" (2008),
    for the third and fourth.
    """
    if first.count == 0:
        return second
    if second.count == 0:
        return first
    a, b = float(first.count), float(second.count)
    n = a + b
    delta = second.mean - first.mean
    step = delta / n
    across = delta * step * a * b
    m3 = across * step * (a - b) + 3 * step * (a * second.m2 - b * first.m2)
    m4 = (
        across * step * step * (a * a - a * b + b * b)
        + 6 * step * step * (a * a * second.m2 + b * b * first.m2)
        + 4 * step * (a * second.m3 - b * first.m3)
    )
    return Moments(
        count=first.count + second.count,
        mean=(a * first.mean + b * second.mean) / n,
        m2=first.m2 + second.m2 + across,
        m3=first.m3 + second.m3 + m3,
        m4=first.m4 + second.m4 + m4,
    )


def _moments(flat: Floats) -> Moments:
    total = Moments()
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK].astype(np.float64)
        mean = float(chunk.mean())
        chunk -= mean
        squared = chunk * chunk
        part = Moments(
            chunk.size,
            mean,
            float(squared.sum()),
            float(np.einsum("i,i->", squared, chunk)),
            float(np.einsum("i,i->", squared, squared)),
        )
        total = merge_moments(total, part)
    return total


def _histogram(flat: npt.NDArray[np.float32]) -> Counts:
    total = np.zeros(0, np.int64)
    for start in range(0, flat.size, _CHUNK):
        bins = flat[start : start + _CHUNK].view(np.uint32) >> _DROPPED_BITS
        bins &= _MAGNITUDE
        counts = np.bincount(bins)
        small, total = sorted((counts, total), key=len)
        total[: small.size] += small
    return _sparse(total)


def _sparse(dense: Counts) -> Counts:
    bins = np.flatnonzero(dense != 0)  # truth values take numpy's fast way
    return np.stack([bins, dense[bins]])


def _channel_absmax(rows: Floats) -> npt.NDArray[np.float64]:
    largest = np.maximum(rows.max(axis=0), -rows.min(axis=0)).astype(np.float64)
    unsigned: npt.NDArray[np.float64] = np.abs(largest)  # no negative zero
    return unsigned


def _merge_channels(first: Observation, second: Observation) -> npt.NDArray[np.float64]:
    """Return the larger magnitudes; none where the number of channels is not fixed."""
    if first.moments.count == 0:
        return second.channel_absmax
    if second.moments.count == 0:
        return first.channel_absmax
    if first.channel_absmax.shape != second.channel_absmax.shape:
        return np.zeros(0)
    return np.maximum(first.channel_absmax, second.channel_absmax)
