"""The estimator: which token budget serves most requests a second within the SLA and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from qbench.serving.cost import BatchCost, BatchMemory

_CANDIDATES = tuple(sorted({int(base * 2**power) for base in (32, 48) for power in range(10)}))
_NEAR_BEST = 0.97
_MEMORY_SHARE = 0.8
_KEPT_LENGTHS = 64


@dataclass(frozen=True, slots=True)
class Sizing:
    """A token budget, and what the model expects of it.

    Attributes:
        token_budget: Most padded tokens of a batch.
        requests_per_s: Expected throughput of all lanes.
        worst_batch_ms: Expected time of the slowest full batch.
        p99_ms: Expected bound of the 99th percentile: the wait for a fuller batch, the batch
            that holds the lane, and its own.
        within_sla: Whether that is within the SLA.
        within_memory: Whether all lanes' batches keep to 80 % of the free memory.
        reason: What limited it, in words.
    """

    token_budget: int
    requests_per_s: float
    worst_batch_ms: float
    p99_ms: float
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
        memory: What a batch needs, where that is known.
        free_bytes: Memory that all lanes' batches may share.
    """

    lengths: tuple[int, ...]
    lanes: int = 1
    max_wait_s: float = 0.005
    sla_s: float | None = None
    most_tokens: int = 1024
    memory: BatchMemory | None = None
    free_bytes: int = 0
    _picked: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        """Keep evenly spaced ranks of the lengths: the model is asked for each of them often."""
        ordered = np.sort(np.maximum(np.asarray(self.lengths, dtype=np.int64), 1))
        ranks = np.linspace(0, len(ordered) - 1, min(len(ordered), _KEPT_LENGTHS))
        picked = tuple(int(ordered[int(rank)]) for rank in ranks)
        object.__setattr__(self, "_picked", picked)

    @property
    def picked(self) -> tuple[int, ...]:
        """Up to 64 lengths at evenly spaced ranks, the shortest and the longest among them."""
        return self._picked


def size_batches(
    cost: BatchCost, demand: Demand, candidates: Sequence[int] = _CANDIDATES
) -> Sizing:
    """Return the smallest token budget within 3 % of the best throughput that keeps all limits.

    Where no budget keeps the SLA, the one with the lowest expected latency is returned, and
    says so; memory is never traded for speed.
    """
    least = min(demand.picked)
    tried = [one for one in candidates if least <= one <= max(demand.most_tokens, least)]
    found = [expect(cost, demand, budget) for budget in tried or [least]]
    fitting = [one for one in found if one.within_memory] or found[:1]
    good = [one for one in fitting if one.within_sla]
    if not good:
        return min(fitting, key=lambda one: one.p99_ms)
    enough = _NEAR_BEST * max(one.requests_per_s for one in good)
    return next(one for one in good if one.requests_per_s >= enough)


def expect(cost: BatchCost, demand: Demand, budget: int) -> Sizing:
    """Return what the model expects of a token budget."""
    seconds, worst_s, fits = 0.0, 0.0, True
    for length in demand.picked:
        batch = max(budget // length, 1)
        batch_s = cost.predict(batch, length)
        seconds += batch_s / batch
        worst_s = max(worst_s, batch_s)
        if demand.memory is not None:
            need = demand.memory.need(batch, length) * demand.lanes
            fits = fits and need <= _MEMORY_SHARE * demand.free_bytes
    rate = demand.lanes * len(demand.picked) / seconds if seconds > 0 else 0.0
    p99_s = demand.max_wait_s + 2 * worst_s * cost.spread
    keeps = demand.sla_s is None or p99_s <= demand.sla_s
    reason = "throughput" if keeps and fits else ("memory" if not fits else "the SLA is too tight")
    return Sizing(budget, rate, worst_s * 1e3, p99_s * 1e3, keeps, fits, reason)
