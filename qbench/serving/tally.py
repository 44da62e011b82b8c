"""What a service counts: sums over answers, and a snapshot of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from qbench.serving.gates import BreakerState
from qbench.serving.memory import MemoryUse
from qbench.serving.percentiles import Histogram
from qbench.serving.request import STAGES, Answer, Times


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """What a service did since it began; a snapshot.

    Attributes:
        counts: Requests by what became of them: ``accepted``, ``answered``, ``refused``,
            ``shed``, ``displaced``, ``cancelled``, ``failed``, ``hung``, ``closed``,
            ``fallback``, ``fallback_failed``, ``default``, ``refused_by_breaker``; beside them
            ``reruns`` of parts of batches and ``replaced_lanes``.
        queued: Requests in no batch yet.
        lanes: Lanes.
        busy_lanes: Lanes that run a batch.
        dispatches: Batches by the reason why they went.
        batch_sizes: Batches by their size.
        tokens: Tokens computed, without and with padding.
        stage_s: Seconds by stage, summed over answered requests.
        latency: Latencies of answered requests, from submission to answer.
        breaker: State of the circuit breaker.
        batch_scale: Share of the batch limit that the memory gate allows.
        transitions: Changes of gates by ``gate:after``.
        memory: The last measurement, or ``None``.
    """

    counts: Mapping[str, int]
    queued: int
    lanes: int
    busy_lanes: int
    dispatches: Mapping[str, int]
    batch_sizes: Mapping[int, float]
    tokens: tuple[int, int]
    stage_s: Mapping[str, float]
    latency: Histogram
    breaker: BreakerState
    batch_scale: float
    transitions: Mapping[str, int]
    memory: MemoryUse | None


@dataclass(slots=True)
class Tally:
    """Sums over answers; the service's lock guards it."""

    latency: Histogram = field(default_factory=Histogram)
    stage_s: list[float] = field(default_factory=lambda: [0.0] * len(STAGES))
    batch_sizes: dict[int, float] = field(default_factory=dict)
    tokens: int = 0
    padded_tokens: float = 0.0

    def add(self, answer: Answer, times: Times) -> None:
        """Add an answer with a value, and its times."""
        self.latency.record(times.total_s)
        for index, seconds in enumerate(times.stages_s):
            self.stage_s[index] += seconds
        size, part = answer.batch_size, 1 / answer.batch_size
        self.batch_sizes[size] = self.batch_sizes.get(size, 0.0) + part
        self.tokens += answer.tokens
        self.padded_tokens += answer.padded_tokens * part


def sum_counts(*counts: Mapping[str, int]) -> dict[str, int]:
    """Return the sums of counts by name; other threads may count on meanwhile."""
    total = Counter[str]()
    for one in counts:
        total.update(dict(one))
    return dict(total)
