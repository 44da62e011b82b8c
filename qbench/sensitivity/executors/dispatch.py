"""Which worker measures what, and what happens to the work of a worker that is lost.

A pure state machine: workers and results go in, decisions come out. It has no clock (time is an
argument), starts nothing and waits for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qbench.records import SweepRecord
from qbench.sensitivity.executors.base import Assignment, Cell

#: How often a cell is begun before it counts as failed.
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Abandoned:
    """An assignment whose workers were lost as often as allowed.

    Attributes:
        assignment: What was to be measured.
        reasons: Why each worker was lost.
    """

    assignment: Assignment
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Seat:
    index: int
    since_s: float


Result = SweepRecord | Abandoned | None


class Dispatch:
    """The state of one run over assignments.

    Args:
        assignments: What to measure; results come in this order.
        ahead: How many assignments may be begun beyond the first unfinished one.
        timeout_s: Seconds that a worker may take for one; twice as many at each new attempt.
        attempts: How often an assignment is begun before it is abandoned.
    """

    def __init__(
        self,
        assignments: Sequence[Assignment],
        ahead: int,
        timeout_s: float,
        attempts: int = ATTEMPTS,
    ) -> None:
        """Everything waits."""
        self._assignments = tuple(assignments)
        self._ahead, self._timeout_s, self._attempts = max(1, ahead), timeout_s, attempts
        self._waiting = list(range(len(self._assignments)))
        self._seats: dict[int, _Seat] = {}
        self._results: dict[int, Result] = {}
        self._losses: dict[int, list[str]] = defaultdict(list)
        self._seen: dict[int, set[Cell]] = defaultdict(set)
        self._head = 0

    @property
    def finished(self) -> bool:
        """Whether every result was taken."""
        return self._head == len(self._assignments)

    @property
    def wanted(self) -> int:
        """How many workers could do something now, those at work included."""
        return len(self._waiting) + len(self._seats)

    def next_for(self, worker: int, now_s: float) -> Assignment | None:
        """Seat a worker that has nothing to do; ``None`` if nothing may be begun now.

        Work that was lost comes first, then cells that the worker looked at before.
        """
        near = [index for index in self._waiting if index <= self._head + self._ahead]
        if not near or worker in self._seats:
            return None
        index = next((i for i in near if self._losses[i]), None)
        if index is None:
            seen = self._seen[worker]
            index = next((i for i in near if self._assignments[i].cell in seen), near[0])
        self._waiting.remove(index)
        self._seats[worker] = _Seat(index, now_s)
        self._seen[worker].add(self._assignments[index].cell)
        return self._assignments[index]

    def done(self, worker: int, record: SweepRecord) -> None:
        """Take the result of a worker; one that has no seat is of an earlier run, and ignored."""
        seat = self._seats.pop(worker, None)
        if seat is not None:
            self._results[seat.index] = record

    def lost(self, worker: int, why: str) -> None:
        """Take back what a lost worker had: it waits again, or is abandoned."""
        seat = self._seats.pop(worker, None)
        if seat is None:
            return
        reasons = self._losses[seat.index]
        reasons.append(why)
        if len(reasons) < self._attempts:
            self._waiting.append(seat.index)
            self._waiting.sort()
        else:
            self._results[seat.index] = Abandoned(self._assignments[seat.index], tuple(reasons))

    def overdue(self, now_s: float) -> tuple[int, ...]:
        """Return the workers that have been at one assignment for too long."""
        return tuple(
            worker
            for worker, seat in self._seats.items()
            if now_s - seat.since_s > self._timeout_s * 2.0 ** len(self._losses[seat.index])
        )

    def stop(self) -> None:
        """Begin nothing more: what waits has no result; what was begun is finished."""
        self._results.update(dict.fromkeys(self._waiting))
        self._waiting = []

    def take(self) -> Iterator[Result]:
        """Yield the results that are next in order."""
        while self._head in self._results:
            self._head += 1
            yield self._results.pop(self._head - 1)
