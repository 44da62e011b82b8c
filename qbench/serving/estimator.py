"""The estimator: which token budget serves most requests a second within the SLA and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from qbench.serving.cost import BatchCost, BatchMemory

_CANDIDATES = tuple(sorted({int(base * 2**power) for base in (32, 48) for power in range(10)}))
#: NOTE: by simulation (as in ``batcher._REACH``) 256 tokens serve 1 % less than 384, with a 99th
#: percentile 7 % shorter; the model gives 384 another 2 %, for batches that are always full.
_NEAR_BEST = 0.96
_MEMORY_SHARE = 0.8
_KEPT_LENGTHS = 64
_LOAD = 0.7  # of what the lanes carry: the load at which latencies are told
_TIGHT = "the SLA is too tight"


@dataclass(frozen=True, slots=True)
class Sizing:
    """A token budget, and what the model expects of it.

    Attributes:
        token_budget: Most padded tokens of a batch.
        requests_per_s: Expected throughput of all lanes.
        worst_batch_ms: Expected time of the slowest full batch.
        p99_ms: Expected bound of the 99th percentile: the wait for a fuller batch, the batch
            that holds the lane, and its own.
        queues: Whether that bound does not hold at 70 % load, because one request in a hundred
            waits for a lane for longer than a batch takes.
        within_sla: Whether that is within the SLA.
        within_memory: Whether all lanes' batches keep to 80 % of the free memory.
        reason: What limited it, in words.
    """

    token_budget: int
    requests_per_s: float
    worst_batch_ms: float
    p99_ms: float
    queues: bool
    within_sla: bool
    within_memory: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of the engine.

    Attributes:
        lengths: Tokens of the user's requests.
        lanes: Lanes that run at once.
        max_wait_s: Longest wait for a fuller batch, seconds.
        sla_s: Limit of the 99th percentile, seconds; ``None`` for none.
        most_tokens: No larger budget is tried: beyond what was measured the model guesses.
        most_rows: No batch holds more requests, whatever the budget.
        memory: What a batch needs, where that is known.
        free_bytes: Memory that all lanes' batches may share.
    """

    lengths: tuple[int, ...]
    lanes: int = 1
    max_wait_s: float = 0.005
    sla_s: float | None = None
    most_tokens: int = 1024
    most_rows: int = 1 << 20
    memory: BatchMemory | None = None
    free_bytes: int = 0
    _picked: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        """Keep evenly spaced ranks of the lengths: the model is asked for each of them often."""
        ordered = np.sort(np.maximum(np.asarray(self.lengths, dtype=np.int64), 1))
        ranks = np.linspace(0, len(ordered) - 1, min(len(ordered), _KEPT_LENGTHS))
        picked = tuple(int(ordered[int(rank)]) for rank in ranks)
        object.__setattr__(self, "_picked", picked)

    def fits(self, batch: int, length: int) -> bool:
        """Whether such batches on all lanes keep to 80 % of the free memory."""
        if self.memory is None:
            return True
        return self.memory.need(batch, length) * self.lanes <= _MEMORY_SHARE * self.free_bytes

    @property
    def picked(self) -> tuple[int, ...]:
        """Up to 64 lengths at evenly spaced ranks, the shortest and the longest among them."""
        return self._picked


def size_batches(
    cost: BatchCost, demand: Demand, candidates: Sequence[int] = _CANDIDATES
) -> Sizing:
    """Return the smallest token budget within 4 % of the best throughput that keeps all limits.

    Of such budgets those come first that keep their expected latency at 70 % load: a smaller one
    would answer no sooner, because requests then wait for lanes and not for batches. Where no
    budget keeps the SLA, the one with the lowest expected latency is returned, and says so; memory
    is never traded for speed.
    """
    least = min(demand.picked)
    tried = [one for one in candidates if least <= one <= max(demand.most_tokens, least)]
    found = [expect(cost, demand, budget) for budget in tried or [least]]
    fitting = [one for one in found if one.within_memory] or found[:1]
    good = [one for one in fitting if one.within_sla]
    if not good:
        return min(fitting, key=lambda one: one.p99_ms)
    enough = _NEAR_BEST * max(one.requests_per_s for one in good)
    near = [one for one in good if one.requests_per_s >= enough]
    return next((one for one in near if not one.queues), near[0])


def largest_within_memory(demand: Demand, budget: int) -> int:
    """Return a budget, or the largest below it whose batches of the known lengths fit.

    A single request is served whatever it needs, so that no budget is below the shortest.
    """
    while budget > demand.picked[0] and not all(
        demand.fits(min(max(budget // length, 1), demand.most_rows), length)
        for length in demand.picked
        if budget >= 2 * length
    ):
        budget = max(budget * 3 // 4, demand.picked[0])
    return budget


def expect(cost: BatchCost, demand: Demand, budget: int) -> Sizing:
    """Return what the model expects of a token budget."""
    rows = demand.most_rows
    batches = [(min(max(budget // length, 1), rows), length) for length in demand.picked]
    seconds = np.array([cost.predict(*batch) for batch in batches])
    shares = np.array([1 / batch for batch, _ in batches])  # batches a request of each length
    worst_s, total_s = float(seconds.max()), float(seconds @ shares)
    fits = all(demand.fits(*batch) for batch in batches)
    p99_s = demand.max_wait_s + 2 * worst_s * cost.spread
    keeps = demand.sla_s is None or p99_s <= demand.sla_s
    return Sizing(
        token_budget=budget,
        requests_per_s=demand.lanes * len(batches) / total_s if total_s > 0 else 0.0,
        worst_batch_ms=worst_s * 1e3,
        p99_ms=p99_s * 1e3,
        queues=lane_wait_s(seconds, shares, demand.lanes) > worst_s,
        within_sla=keeps,
        within_memory=fits,
        reason="throughput" if keeps and fits else ("memory" if not fits else _TIGHT),
    )


def lane_wait_s(seconds: np.ndarray, shares: np.ndarray, lanes: int, load: float = _LOAD) -> float:
    """Return the wait for a lane that one request in a hundred exceeds, seconds.

    Batches queue as customers of ``lanes`` servers. A batch waits with Erlang's probability C, and
    then for an exponential time of mean ``E[S] (ca² + cs²) / (2 lanes (1 - load))`` (Allen and
    Cunneen's approximation); batches of k requests of Poisson arrivals come with ``ca² = 1 / k``.

    Args:
        seconds: Time of a full batch of each length [n].
        shares: Batches a request of each length [n].
        lanes: Servers.
        load: Share of time that they are busy.
    """
    mean_s = float(np.average(seconds, weights=shares))
    if mean_s <= 0:
        return 0.0
    spread = float(np.average(seconds**2, weights=shares)) / mean_s**2 - 1
    arrivals = float(np.mean(shares))
    mean_wait_s = mean_s * (arrivals + spread) / (2 * lanes * (1 - load))
    return mean_wait_s * max(math.log(100 * _erlang_c(lanes, load)), 0.0)


def _erlang_c(lanes: int, load: float) -> float:
    """Return the probability that all of ``lanes`` servers are busy (Erlang's C formula)."""
    blocked = 1.0
    for servers in range(1, lanes + 1):
        blocked = lanes * load * blocked / (servers + lanes * load * blocked)
    return blocked / (1 - load * (1 - blocked))
