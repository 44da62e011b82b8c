"""Latencies: a histogram that keeps every percentile to 0.1 %, and intervals by bootstrap."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np

from qbench.errors import MeasurementError
from qbench.records import Estimate

_FINE = 2048  # microseconds up to here have a bucket each; above, 1024 buckets an octave
_HALF = _FINE // 2
_OCTAVES = 30
_BUCKETS = _FINE + _OCTAVES * _HALF
_LEAST_GROUPS = 4  # of blocks: fewer do not know their own spread


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

    Latencies near in time hang together (they wait in one queue): a thousand of them may tell no
    more than ten. So whole blocks are drawn anew (Künsch, 1989, for blocks without overlap), and
    neighbours are joined while that makes the spread of the share beyond the percentile larger,
    since a queue may remember longer than a block (Flyvjerg and Petersen, 1989). The spread tells
    as how many independent latencies all of them count, and the exact interval of so many follows
    (Korn and Graubard, 1998). Where they are too few to bound the percentile from above, the upper
    end is infinite.

    Args:
        blocks: Latencies in order of time, one array [n_i] for each stretch of it, any unit.
        percent: Which percentile, 0 to 100.
        level: Coverage of the interval.
        draws: Draws of the bootstrap.
        seed: Its seed.

    Raises:
        MeasurementError: If no block holds a latency.
    """
    from scipy.special import betaincinv

    filled = [block for block in blocks if len(block)]
    if not filled:
        raise MeasurementError("no latency to take a percentile of; measure for longer")
    ordered = np.sort(np.concatenate(filled))
    count, share = len(ordered), percent / 100
    value = float(ordered[max(math.ceil(count * share), 1) - 1])
    beyond = np.array([(np.sum(block > value), len(block)) for block in filled], dtype=float)
    worth = _independent(beyond, level, draws, np.random.default_rng(seed))
    below, tail = worth * share, (1 - level) / 2
    low = float(betaincinv(below, worth - below + 1, tail)) if below > 0 else 0.0
    high = float(betaincinv(below + 1, worth - below, 1 - tail)) if worth > below else 1.0
    first, last = max(math.ceil(count * low), 1) - 1, math.ceil(count * high) - 1
    upper = float(ordered[last]) if last < count - 1 or percent >= 100 else math.inf
    return Estimate(value, float(ordered[first]), upper, count, level, "block_bootstrap")


def _independent(beyond: np.ndarray, level: float, draws: int, rng: np.random.Generator) -> float:
    """Return as how many independent latencies all of them count.

    Args:
        beyond: Latencies beyond the percentile and latencies in all, by block, shape [blocks, 2].
        level: Coverage of the interval to come: few blocks know their own spread badly.
        draws: Draws of the bootstrap.
        rng: Random numbers.
    """
    from scipy.special import ndtri, stdtrit

    over, count = beyond.sum(axis=0)
    share = over / count
    if over == 0:
        return float(count)
    spread, groups = share * (1 - share) / count, int(count)
    least = max(min(_LEAST_GROUPS, len(beyond)), 2)
    while len(beyond) >= least:
        drawn = rng.multinomial(len(beyond), np.full(len(beyond), 1 / len(beyond)), size=draws)
        sums = drawn @ beyond
        found = float(np.var(sums[:, 0] / sums[:, 1])) * len(beyond) / (len(beyond) - 1)
        if found > spread:
            spread, groups = found, len(beyond)
        beyond = np.add.reduceat(beyond, np.arange(0, len(beyond), 2))
    certain = 0.5 + level / 2
    trust = (ndtri(certain) / stdtrit(max(groups - 1, 1), certain)) ** 2
    return float(min(share * (1 - share) / spread * trust, count))
