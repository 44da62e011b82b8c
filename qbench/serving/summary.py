"""Statistics of a benchmark, derived from its raw latencies and its slices; pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qbench.errors import MeasurementError
from qbench.records import BenchSummary, Estimate, RequestLatency
from qbench.serving.request import STAGES

_LEAST_ROUNDS = 3
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


@dataclass(frozen=True, slots=True)
class Slice:
    """One engine's stretch of load; seconds after the benchmark began.

    Attributes:
        engine: Name of the engine.
        round: Index of the round; every engine has one slice in each.
        measured_from_s: When the warm-up ended.
        end_s: When clients stopped sending.
        cpu_s: CPU time of the process between the two.
        rejected: Requests refused between the two.
    """

    engine: str
    round: int
    measured_from_s: float
    end_s: float
    cpu_s: float
    rejected: int

    @property
    def measured_s(self) -> float:
        """Seconds measured."""
        return self.end_s - self.measured_from_s


def summarise(
    latencies: Sequence[RequestLatency], slices: Sequence[Slice], engines: Sequence[str]
) -> tuple[BenchSummary, ...]:
    """Return the statistics of each engine; the first one is the reference.

    Throughput counts the answers that arrived inside a slice's measured time; latencies are
    those of requests sent in it (their answers may come after its end, so that slow ones are
    not cut off).

    Raises:
        MeasurementError: If a slice holds no answer.
    """
    rates, finished = _finished(latencies, slices)
    reference = rates[engines[0]]
    return tuple(
        _summarise_engine(name, latencies, slices, (rates[name], reference), finished[name])
        for name in engines
    )


def _finished(
    latencies: Sequence[RequestLatency], slices: Sequence[Slice]
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Return answers a second [rounds] and the count of answers, by engine."""
    by_slice: dict[tuple[str, int], list[float]] = {}
    for one in latencies:
        by_slice.setdefault((one.engine, one.round), []).append(one.start_s + one.total_ms / 1e3)
    rates: dict[str, list[float]] = {}
    counts: Counter[str] = Counter()
    for piece in sorted(slices, key=lambda piece: piece.round):
        ends = np.asarray(by_slice.get((piece.engine, piece.round), []))
        count = int(np.sum((ends >= piece.measured_from_s) & (ends < piece.end_s)))
        if count == 0:
            raise MeasurementError(
                f"engine {piece.engine!r} answered no request within a slice of "
                f"{piece.measured_s:.2g} s; give a slice more seconds"
            )
        rates.setdefault(piece.engine, []).append(count / piece.measured_s)
        counts[piece.engine] += count
    return {name: np.asarray(values) for name, values in rates.items()}, dict(counts)


def _summarise_engine(
    name: str,
    latencies: Sequence[RequestLatency],
    slices: Sequence[Slice],
    rates: tuple[np.ndarray, np.ndarray],
    finished: int,
) -> BenchSummary:
    own = [one for one in latencies if one.engine == name and not one.warmup]
    pieces = [piece for piece in slices if piece.engine == name]
    if not own:
        raise MeasurementError(
            f"engine {name!r} was sent no request after the warm-up; give a slice more seconds"
        )
    p50, p95, p99 = np.percentile([one.total_ms for one in own], (50, 95, 99))
    return BenchSummary(
        engine=name,
        requests=len(own),
        throughput_rps=median_interval(rates[0]),
        speedup=paired_ratio(rates[0], rates[1]),
        p50_ms=float(p50),
        p95_ms=float(p95),
        p99_ms=float(p99),
        stages_ms={
            stage: float(np.mean([getattr(one, f"{stage}_ms") for one in own])) for stage in STAGES
        },
        batch_sizes=dict(sorted(Counter(one.batch_size for one in own).items())),
        cpu_ms_per_request=1e3 * sum(piece.cpu_s for piece in pieces) / finished,
        rejected=sum(piece.rejected for piece in pieces),
    )


def median_interval(values: np.ndarray, level: float = 0.95) -> Estimate:
    """Return the median of a few slices with a distribution-free interval.

    The order statistics ``k`` and ``n + 1 - k`` hold the median with probability
    ``1 - 2 * P(Binomial(n, 1/2) < k)``; the largest ``k`` that keeps ``level`` is taken. Below
    six values even the extremes do not reach 0.95; they are given with the level they have.

    Args:
        values: One number a slice, shape [n].
        level: Coverage asked for.
    """
    ordered, n = np.sort(values), len(values)
    below, tail = 1, 0.5**n  # rank k, and P(Binomial(n, 1/2) < k)
    term = tail
    while below < (n + 1) // 2:
        term *= (n - below + 1) / below
        if 1 - 2 * (tail + term) < level:
            break
        tail, below = tail + term, below + 1
    return Estimate(
        value=float(np.median(ordered)),
        low=float(ordered[below - 1]),
        high=float(ordered[n - below]),
        n=n,
        level=float(1 - 2 * tail),
        method="order_statistics",
    )


def paired_ratio(values: np.ndarray, reference: np.ndarray, level: float = 0.95) -> Estimate:
    """Return the geometric mean of paired ratios with Student's interval on their logarithms.

    Pairs come from one round, so that what slows the machine for a while cancels out. It is
    meant for few rounds: with n = 2 the interval is as wide as n = 2 deserves.

    Args:
        values: Numbers of the engine, shape [n].
        reference: Numbers of the reference in the same rounds, shape [n].
        level: Coverage of the interval.

    Raises:
        MeasurementError: If there are fewer than two pairs.
    """
    from scipy.special import stdtrit

    n = len(values)
    if n < 2 or n != len(reference):
        raise MeasurementError(
            f"a ratio with its interval needs two rounds or more, got {n} against {len(reference)}"
        )
    logs = np.log(values) - np.log(reference)
    centre = float(np.mean(logs))
    half = float(stdtrit(n - 1, 0.5 + level / 2) * np.std(logs, ddof=1) / np.sqrt(n))
    low, high = np.exp([centre - half, centre + half])
    return Estimate(float(np.exp(centre)), float(low), float(high), n, level, "paired_log_t")


def narrow_enough(
    latencies: Sequence[RequestLatency],
    slices: Sequence[Slice],
    engines: Sequence[str],
    enough: float,
) -> bool:
    """Return whether every engine's ratio to the first one is known well after some whole rounds.

    Args:
        latencies: What was measured so far.
        slices: As many of each engine.
        engines: The engines, the reference first.
        enough: Widest interval to either side, as a share of the ratio; 0 for never.
    """
    if enough <= 0 or len(slices) < _LEAST_ROUNDS * len(engines):
        return False
    rates, _ = _finished(latencies, slices)
    ratios = [paired_ratio(rates[name], rates[engines[0]]) for name in engines[1:]]
    return all(one.high <= one.value * (1 + enough) for one in ratios)


def describe_lengths(tokens: Sequence[int]) -> dict[str, float]:
    """Return count, least, mean, largest and percentiles of request lengths in tokens."""
    lengths = np.asarray(tokens)
    described = {
        "requests": float(len(lengths)),
        "min": float(lengths.min()),
        "mean": float(lengths.mean()),
        "max": float(lengths.max()),
    }
    for percent, value in zip(PERCENTILES, np.percentile(lengths, PERCENTILES), strict=True):
        described[f"p{percent}"] = float(value)
    return described
