"""The highest rate that keeps the SLA: searched by trials of open-loop load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from qbench.errors import ConfigError
from qbench.records import Estimate
from qbench.serving.openload import OpenResult

_LAG_SHARE = 0.1  # of the SLA: a generator later than this is told of
_DRIFT = 0.05  # seconds of latency gained a second: the server takes 5 % more time than there is


@dataclass(frozen=True, slots=True)
class Sla:
    """What users are promised: ``share`` of all requests are answered within ``limit_ms``.

    A request that is refused, fails or gets no answer was not answered within any limit.
    """

    limit_ms: float
    share: float = 0.99

    def __post_init__(self) -> None:
        """Refuse a promise that says nothing.

        Raises:
            ConfigError: If the limit or the share is out of its range.
        """
        if not 0 < self.limit_ms < float("inf"):
            raise ConfigError(f"sla_ms is {self.limit_ms}; allowed: more than 0 ms")
        if not 0 < self.share <= 1:
            raise ConfigError(f"share is {self.share}; allowed: more than 0, at most 1")


@dataclass(frozen=True, slots=True)
class RateTrial:
    """One rate that was tried.

    Attributes:
        rate: Requests a second that were offered.
        kept: Whether the SLA was kept.
        within: Share of all requests that were answered within the limit.
        goodput_rps: Answers a second.
        p50_ms: Median latency of answered requests, with its interval; ``None`` without any.
        p95_ms: 95th percentile, likewise.
        p99_ms: 99th percentile, likewise.
        statuses: Requests by what became of them.
        lag_p99_ms: How late the generator was.
        generator_late: Whether that is a tenth of the limit or more.
        offered_rps: Requests a second that were really due; arrivals at random are not exact.
        inconclusive: Whether the SLA was broken by the late generator alone: counted from when
            requests really were sent it was kept, so that the trial says nothing of the server.
    """

    rate: float
    kept: bool
    within: float
    goodput_rps: float
    p50_ms: Estimate | None
    p95_ms: Estimate | None
    p99_ms: Estimate | None
    statuses: Mapping[str, int]
    lag_p99_ms: float
    generator_late: bool
    offered_rps: float | None = None
    inconclusive: bool = False


def judge_rate(rate: float, result: OpenResult, sla: Sla, *, steady: bool = False) -> RateTrial:
    """Return whether a load kept the SLA.

    Args:
        rate: The rate that was asked for.
        result: What the load gave.
        sla: The promise.
        steady: Whether arrivals come at one rate all the time. A server that falls behind under
            such a load breaks every promise in the end, even if a short trial ends before.
    """
    within, answered = result.within(sla.limit_ms), result.statuses.get("ok", 0) > 0
    lag_ms = result.lag_p99_s * 1e3
    behind = steady and result.drift > _DRIFT
    kept = within >= sla.share and not behind
    late = lag_ms > _LAG_SHARE * sla.limit_ms
    sent_within = result.within(sla.limit_ms, from_sent=True)
    return RateTrial(
        rate=rate,
        kept=kept,
        within=within,
        goodput_rps=result.goodput_rps,
        p50_ms=result.percentile(50) if answered else None,
        p95_ms=result.percentile(95) if answered else None,
        p99_ms=result.percentile(99) if answered else None,
        statuses=dict(result.statuses),
        lag_p99_ms=lag_ms,
        generator_late=late,
        offered_rps=result.offered_rps,
        inconclusive=late and not kept and sent_within >= sla.share and not behind,
    )


class RateSearch:
    """Which rate to try next: a pure state machine that is fed with outcomes.

    It doubles, or falls in growing steps, until one rate keeps the SLA and a higher one does not,
    then halves the gap between the two (on a logarithmic scale) until they are near enough. A
    rate that failed once is tried once more: what else runs on a machine only makes trials fail.
    """

    def __init__(
        self,
        start: float,
        *,
        tolerance: float = 0.05,
        least: float = 0.05,
        most: float = 1e6,
    ) -> None:
        """Begin at a guess.

        Args:
            start: The first rate, requests a second.
            tolerance: The search ends where the lowest rate that failed is within this share
                above the highest one that held.
            least: No lower rate is tried.
            most: No higher rate is tried.

        Raises:
            ConfigError: If the first rate is not a rate.
        """
        if not 0 < start < float("inf"):
            raise ConfigError(f"start is {start}; allowed: more than 0 requests a second")
        self._start, self._tolerance = min(max(start, least), most), tolerance
        self._least, self._most, self._step = least, most, 2.0
        self._doubted: float | None = None
        self.kept: float | None = None
        self.failed: float | None = None

    def next_rate(self) -> float | None:
        """Return the rate to try next, or ``None`` where the search is over."""
        kept, failed = self.kept, self.failed
        if self._doubted is not None:
            return self._doubted
        if kept is None and failed is None:
            return self._start
        if failed is None:
            assert kept is not None
            return min(kept * 2, self._most) if kept < self._most else None
        if kept is None:
            return max(failed / self._step, self._least) if failed > self._least else None
        return None if failed <= kept * (1 + self._tolerance) else math.sqrt(kept * failed)

    def tell(self, rate: float, kept: bool) -> None:
        """Take the outcome of a trial.

        An outcome that contradicts an earlier one (a higher rate held, a lower one failed)
        moves the bracket: the later trial is believed.
        """
        if not kept and self._doubted != rate:
            self._doubted = rate
            return
        self._doubted = None
        if kept:
            self.kept = rate
            if self.failed is not None and self.failed <= rate:
                self.failed = None
            return
        if self.kept is None and self.failed is not None:
            self._step *= 2
        self.failed = rate
        if self.kept is not None and self.kept >= rate:
            self.kept = None


@dataclass(frozen=True, slots=True)
class RateFound:
    """What a search gave.

    Attributes:
        name: The engine.
        rate: Highest rate that kept the SLA, requests a second; 0 where none did.
        above: Lowest higher rate that did not; ``None`` where all did, or where the generator
            alone was too late there: the engine may carry more.
        trials: Every trial, in order.
    """

    name: str
    rate: float
    above: float | None
    trials: tuple[RateTrial, ...]

    @property
    def held(self) -> RateTrial | None:
        """The last trial of the highest rate that kept the SLA, if one did."""
        kept = [trial for trial in self.trials if trial.kept and trial.rate == self.rate]
        return kept[-1] if kept else None

    @property
    def generator_bound(self) -> bool:
        """Whether the generator, and not the engine, ended the search."""
        return self.above is None and any(trial.inconclusive for trial in self.trials)


#: Tries a rate on one engine.
Measure: TypeAlias = Callable[[float], RateTrial]


def search_rates(
    measures: Mapping[str, Measure],
    start: float,
    *,
    tolerance: float = 0.05,
    least: float = 0.05,
    most_trials: int = 16,
    on_trial: Callable[[str, RateTrial], None] | None = None,
) -> tuple[RateFound, ...]:
    """Search the highest rate of several engines in turns, trial by trial.

    In turns, so that a machine that slows down for a while slows all of them.

    Args:
        measures: Tries a rate, by the engine's name.
        start: The first rate of each.
        tolerance: As for ``RateSearch``.
        least: As for ``RateSearch``.
        most_trials: Most trials of one engine.
        on_trial: Hears of each trial.
    """
    searches = {name: RateSearch(start, tolerance=tolerance, least=least) for name in measures}
    trials: dict[str, list[RateTrial]] = {name: [] for name in measures}
    for _ in range(most_trials):
        for name, search in searches.items():
            rate = search.next_rate()
            if rate is None:
                continue
            trial = measures[name](rate)
            search.tell(rate, trial.kept)
            trials[name].append(trial)
            if on_trial is not None:
                on_trial(name, trial)
    return tuple(_found(name, trials[name], searches[name]) for name in searches)


def _found(name: str, trials: Sequence[RateTrial], search: RateSearch) -> RateFound:
    at_limit = [one for one in trials if one.rate == search.failed]
    blamed = bool(at_limit) and at_limit[-1].inconclusive
    return RateFound(name, search.kept or 0.0, None if blamed else search.failed, tuple(trials))


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Trials of both engines at one rate, pair by pair.

    Pairs in which both keep the SLA, or both break it, tell nothing. Were the engines alike, each
    would be the better one of a pair that tells as often as the other: that five of five say the
    same comes with a probability of 1/32 (sign test).

    Attributes:
        rate: Requests a second, between what the reference and the engine were found to carry.
        reference: The reference's trials.
        engine: The engine's, of the same pairs.
    """

    rate: float
    reference: tuple[RateTrial, ...]
    engine: tuple[RateTrial, ...]

    @property
    def shown(self) -> int:
        """Pairs in which the engine kept the SLA and the reference broke it."""
        return sum(map(_tells, self.reference, self.engine))

    @property
    def against(self) -> int:
        """Pairs in which the reference kept the SLA and the engine broke it."""
        return sum(map(_tells, self.engine, self.reference))

    @property
    def holds(self) -> bool:
        """Whether five pairs show the gain, and none the opposite."""
        return self.shown >= PAIRS and not self.against


#: Pairs that a confirmation needs, and pairs at most.
PAIRS, MOST_PAIRS = 5, 10


def confirm(
    reference: tuple[RateFound, Measure],
    engine: tuple[RateFound, Measure],
    on_trial: Callable[[str, RateTrial], None] | None = None,
) -> Confirmation | None:
    """Try both engines in pairs at a rate that the engine should carry and the reference not.

    It ends where five pairs show it, one shows the opposite, or too many told nothing.

    Args:
        reference: What the search found of the reference, and what tries a rate on it.
        engine: The same of the engine.
        on_trial: Hears of each trial.

    Returns:
        The pairs; ``None`` where the search itself shows no gain.
    """
    (slow, _), (quick, _) = reference, engine
    if slow.above is None or quick.rate < slow.above or 0 < slow.rate <= quick.rate <= slow.above:
        return None
    rate = math.sqrt(slow.above * quick.rate)
    found: dict[str, tuple[RateTrial, ...]] = {slow.name: (), quick.name: ()}
    for done in range(1, MOST_PAIRS + 1):
        for one, measure in (engine, reference):
            trial = measure(rate)
            found[one.name] += (trial,)
            if on_trial is not None:
                on_trial(one.name, trial)
        pairs = Confirmation(rate, found[slow.name], found[quick.name])
        if pairs.holds or pairs.against or pairs.shown + MOST_PAIRS - done < PAIRS:
            break
    return pairs


def _tells(worse: RateTrial, better: RateTrial) -> bool:
    return better.kept and not worse.kept and not worse.inconclusive
