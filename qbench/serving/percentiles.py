"""Latencies: a histogram that keeps every percentile to 0.1 %, and intervals by bootstrap."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from qbench.errors import MeasurementError
from qbench.records import Estimate

_FINE = 2048  # microseconds up to here have a bucket each; above, 1024 buckets an octave
_HALF = _FINE // 2
_OCTAVES = 30
_BUCKETS = _FINE + _OCTAVES * _HALF


class Histogram:
    """Counts of latencies in buckets as wide as 1/1024 of their value, or a microsecond.

    The layout is that of high dynamic range histograms: linear within each octave. A million
    latencies take as much memory as one, and no latency is cut off below 12 days.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._counts = array("Q", bytes(8 * _BUCKETS))
        self.count = 0
        self.total_s = self.largest_s = 0.0

    def record(self, seconds: float) -> None:
        """Add one latency."""
        self._counts[bucket_of(seconds)] += 1
        self.count += 1
        self.total_s += seconds
        if seconds > self.largest_s:
            self.largest_s = seconds

    def add(self, other: Histogram) -> None:
        """Add all latencies of another histogram."""
        mine = np.frombuffer(self._counts, dtype=np.uint64)
        mine += np.frombuffer(other._counts, dtype=np.uint64)
        self.count += other.count
        self.total_s += other.total_s
        self.largest_s = max(self.largest_s, other.largest_s)

    def copy(self) -> Histogram:
        """Return the same counts, apart."""
        twin = Histogram()
        twin.add(self)
        return twin

    def percentile_s(self, percent: float) -> float:
        """Return the latency that ``percent`` of all do not exceed, seconds; NaN if empty."""
        if not self.count:
            return float("nan")
        wanted = max(int(np.ceil(self.count * percent / 100)), 1)
        below = np.cumsum(np.frombuffer(self._counts, dtype=np.uint64))
        bucket = int(np.searchsorted(below, wanted))
        return min(float(middle_of(np.array([bucket]))[0]), self.largest_s)

    def at_most(self, bounds_s: Sequence[float]) -> list[int]:
        """Return how many latencies are at most each bound (as Prometheus wants them)."""
        below = np.cumsum(np.frombuffer(self._counts, dtype=np.uint64))
        return [int(below[bucket_of(bound)]) for bound in bounds_s]


def bucket_of(seconds: float) -> int:
    """Return the bucket of a latency."""
    micros = max(int(seconds * 1e6), 0)
    if micros < _FINE:
        return micros
    octave = micros.bit_length() - 11
    if octave > _OCTAVES:
        return _BUCKETS - 1
    return _FINE + (octave - 1) * _HALF + (micros >> octave) - _HALF


def middle_of(buckets: np.ndarray) -> np.ndarray:
    """Return the middles of buckets, seconds, shape as given."""
    above = np.maximum(buckets - _FINE, 0)
    octave = np.where(buckets < _FINE, 0, above // _HALF + 1)
    first = np.where(buckets < _FINE, buckets, above % _HALF + _HALF)
    return (first + 0.5) * np.exp2(octave) / 1e6


def percentile_interval(
    blocks: Sequence[np.ndarray],
    percent: float,
    *,
    level: float = 0.95,
    draws: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Return a percentile of latencies with a bootstrap interval over blocks of time.

    Latencies near in time hang together (they wait in one queue), so that not requests are
    drawn anew, but whole blocks (Künsch, 1989, for blocks without overlap).

    Args:
        blocks: Latencies, one array [n_i] for each stretch of time, seconds or any unit.
        percent: Which percentile, 0 to 100.
        level: Coverage of the interval.
        draws: Draws of the bootstrap.
        seed: Its seed.

    Raises:
        MeasurementError: If no block holds a latency.
    """
    filled = [block for block in blocks if len(block)]
    if not filled:
        raise MeasurementError("no latency to take a percentile of; measure for longer")
    values, places = np.unique(np.concatenate(filled), return_inverse=True)
    owner = np.repeat(np.arange(len(filled)), [len(block) for block in filled])
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(len(filled), np.full(len(filled), 1 / len(filled)), size=draws)
    found = np.empty(draws)
    for index, weight in enumerate(weights):
        below = np.cumsum(np.bincount(places, weights=weight[owner], minlength=len(values)))
        found[index] = values[np.searchsorted(below, below[-1] * percent / 100)]
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(found, (tail, 100 - tail))
    value = float(np.percentile(np.concatenate(filled), percent, method="inverted_cdf"))
    count = sum(len(block) for block in filled)
    return Estimate(
        value, min(float(low), value), max(float(high), value), count, level, "block_bootstrap"
    )
