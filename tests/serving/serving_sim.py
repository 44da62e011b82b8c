"""Serving in simulated time: the real batcher and batch runner, a made-up clock."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from qbench.serving.batcher import Accept, Batcher, Dispatch, Priority, Terms
from qbench.serving.request import Work
from qbench.serving.running import run_batch

PAD = 0


@dataclass
class Asked:
    """A request of the simulation; times in seconds."""

    at_s: float
    ids: list[int]
    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE
    deadline_s: float | None = None
    cancel_s: float | None = None
    ends: list[tuple[str, float, object]] = field(default_factory=list)  # what, when, value

    @property
    def what(self) -> str:
        return self.ends[0][0]

    @property
    def latency_s(self) -> float:
        return self.ends[0][1] - self.at_s

    @property
    def right(self) -> float:
        return float(sum(self.ids))


def pad(encoded):
    longest = max(len(one["ids"]) for one in encoded)
    feed = np.zeros((len(encoded), longest), np.int64)
    for row, one in enumerate(encoded):
        feed[row, : len(one["ids"])] = one["ids"]
    return {"ids": feed}


def summing(feeds):
    return {"sum": feeds["ids"].sum(axis=1).astype(np.float64)}


@dataclass
class Faults:
    """What goes wrong: called with the batch's serial number."""

    engine: Callable = summing
    hangs: Callable[[int], bool] = lambda batch: False
    hang_s: float = 1.0


def play(
    batcher: Batcher,
    asked: list[Asked],
    cost_s: Callable[[int, int], float] = lambda batch, length: 0.002 + 2e-5 * batch * length,
    faults: Faults | None = None,
) -> dict[str, float]:
    """Play requests until each has its end; every end is noted in the request itself.

    Returns:
        Tokens served, by tenant.
    """
    return _Simulation(batcher, asked, cost_s, faults or Faults()).play()


class _Simulation:
    """Events in order of their time: arrivals, cancellations, batches that end."""

    def __init__(self, batcher: Batcher, asked: list[Asked], cost_s: Callable, faults: Faults):
        self.batcher, self.asked, self.cost_s, self.faults = batcher, asked, cost_s, faults
        self.work, self.now_s = Work(pad), 0.0
        self.tickets: dict[int, int] = {}  # ticket -> index of the request, until its end
        self.of_request: dict[int, int] = {}
        self.served: dict[str, float] = defaultdict(float)
        self.serial = itertools.count()
        self.events: list[tuple] = []
        for index, one in enumerate(asked):
            self.push(one.at_s, self.arrive, index)
            if one.cancel_s is not None:
                self.push(one.cancel_s, self.cancel, index)

    def push(self, when_s: float, what: Callable, value: object) -> None:
        heapq.heappush(self.events, (when_s, next(self.serial), what, value))

    def play(self) -> dict[str, float]:
        while True:
            wake_s = self.dispatch()
            if wake_s is not None and (not self.events or wake_s < self.events[0][0]):
                self.now_s = max(self.now_s, wake_s)
            elif not self.events:
                return dict(self.served)
            else:
                when_s, _, what, value = heapq.heappop(self.events)
                self.now_s = max(self.now_s, when_s)
                what(value)

    def dispatch(self) -> float | None:
        """Start every batch that must run now; return when to ask again."""
        while True:
            decision = self.batcher.decide(self.now_s)
            for shed in self.batcher.take_shed():
                self.end(shed.ticket, "shed")
            if not isinstance(decision, Dispatch):
                return decision.until_s
            hung = self.faults.hangs(decision.batch)
            busy_s = self.cost_s(len(decision.tickets), decision.longest)
            after_s = self.faults.hang_s if hung else busy_s
            self.push(self.now_s + after_s, self.give_up if hung else self.finish, decision)

    def end(self, ticket: int, what: str, value: object = None) -> None:
        self.asked[self.tickets.pop(ticket)].ends.append((what, self.now_s, value))

    def arrive(self, index: int) -> None:
        one = self.asked[index]
        answer = self.batcher.admit(self.now_s, Terms(one.tenant, one.priority, one.deadline_s))
        if not isinstance(answer, Accept):
            one.ends.append(("refused", self.now_s, answer))
            return
        for ticket in answer.displaced:
            self.end(ticket, "displaced")
        self.tickets[answer.ticket] = index
        self.of_request[index] = answer.ticket
        self.batcher.ready(answer.ticket, len(one.ids), self.now_s)

    def cancel(self, index: int) -> None:
        ticket = self.of_request.get(index)
        if ticket in self.tickets and self.batcher.withdraw(ticket):
            self.end(ticket, "cancelled")

    def give_up(self, decision: Dispatch) -> None:
        self.batcher.complete(decision.batch, self.now_s, failed=True)
        for ticket in decision.tickets:
            self.end(ticket, "hung")

    def finish(self, decision: Dispatch) -> None:
        members = [self.asked[self.tickets[ticket]] for ticket in decision.tickets]
        encoded = [{"ids": one.ids} for one in members]
        outcome = run_batch(self.faults.engine, self.work, encoded, lambda: self.now_s)
        self.batcher.complete(decision.batch, self.now_s, failed=bool(outcome.errors))
        for place, (one, ticket) in enumerate(zip(members, decision.tickets, strict=True)):
            self.served[one.tenant] += len(one.ids)
            failure = outcome.errors.get(place)
            what, value = ("failed", failure) if failure else ("ok", outcome.values[place])
            self.end(ticket, what, value)


def poisson(rate: float, seconds: float, rng: np.random.Generator, **terms) -> list[Asked]:
    """Return Poisson arrivals of random lengths."""
    times = np.sort(rng.random(rng.poisson(rate * seconds)) * seconds)
    lengths = rng.integers(4, 33, len(times))
    return [
        Asked(float(at_s), rng.integers(1, 99, size).tolist(), **terms)
        for at_s, size in zip(times, lengths, strict=True)
    ]


def p99_ms(asked: list[Asked]) -> float:
    """Return the 99th percentile of answered requests."""
    return float(np.percentile([one.latency_s for one in asked if one.what == "ok"], 99) * 1e3)
