"""The dynamic batcher: a pure state machine.

Arrivals, completions, cancellations and the time (seconds, any origin) come in; frozen
decisions come out. There is no clock and no thread here, so that each rule can be tested by
simulation:

- the queue is bounded: a request that finds it full is refused at once, with a retry hint; it
  takes the place of another only from a tenant that holds more than its share, or from its own
  tenant's lower class;
- the first in line anchors each batch: class before class, and within a class the smallest
  virtual time, so that tenants share by weight and one tenant is served in order of arrival;
  a ``batch`` request that waited ``ageing_s`` counts as ``interactive``, so nothing starves;
- a batch is filled with requests of like length under a budget of padded tokens
  (``longest * count <= token_budget``; a single longer request goes alone), of which it takes
  no more than its lane's part of what waits, so that a short queue is served in small batches;
- a request joins only if its padding costs less than the batch of its own that it saves, and
  the padding of the whole batch stays within ``max_padding``;
- it is drawn from the first in line only, those of one batch and a half, so that who comes later
  overtakes nobody for its length;
- requests of odd size hold at most one lane while others wait, where that is asked for;
- the last free lane waits for more requests only while that pays, and never beyond
  ``max_wait_s``; while others are free none waits;
- a request that cannot be answered before its deadline, by the cost model, is shed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from qbench.serving.clock import SteadyTime
from qbench.serving.cost import BatchCost
from qbench.serving.decisions import (
    ANY_TIME,
    Accept,
    BatchLimits,
    Dispatch,
    Priority,
    Reason,
    Refuse,
    Shed,
    Terms,
    Wait,
)
from qbench.serving.formation import choose, fixed_members, keep_deadlines, members, room_for
from qbench.serving.pace import ArrivalGaps, LaneCost
from qbench.serving.waiting import FairClock, FairLine, Holdings, Waiting

__all__ = [
    "Accept",
    "BatchLimits",
    "Batcher",
    "Dispatch",
    "Priority",
    "Reason",
    "Refuse",
    "Shed",
    "Terms",
    "Wait",
]

_LEAST_RETRY_S = 0.001
#: A request is of odd size where it has so many times the tokens of the recent mean.
_ODD_TIMES = 4.0
_KEEP_MEAN = 0.98
#: A batch is drawn from the first in line that would fill so many batches of the anchor's length.
#: NOTE: by simulation (50 clients, 16 to 48 tokens) 4 serves 2 to 5 % more than 1.5 does, and its
#: 99th percentile is a fifth to a third longer: it passes by odd lengths again and again.
_REACH = 1.5
#: Part of a call that joining a batch is worth at least. NOTE: by simulation, queues of 256 to 1000
#: serve up to a tenth more than without it, and shorter ones the same.
_LEAST_PART = 0.3


@dataclass(frozen=True, slots=True)
class _Running:
    """A batch on a lane."""

    size: int
    longest: int
    start_s: float
    odd: bool


class Batcher:
    """Turns arrivals into batches; see the module's head for the rules.

    The life of a request: ``admit`` → (preprocessing) → ``ready`` → in a ``Dispatch`` from
    ``decide`` → ``complete`` of that batch. ``withdraw`` takes it out before it is dispatched;
    ``take_shed`` tells which ones were given up.
    """

    def __init__(self, limits: BatchLimits, model: BatchCost | None = None) -> None:
        """Begin with an empty queue and all lanes free.

        Args:
            limits: Limits of the queue and of a batch.
            model: What batches cost, as far as it is known; it is refined here.
        """
        self.limits = self._given = limits
        self.cost, self.model = LaneCost(), model or BatchCost()
        self._gaps = ArrivalGaps()
        self._time = SteadyTime()
        self._tickets = self._batches = 0
        self._closed = False
        self._admitted: dict[int, Waiting] = {}  # not yet ready
        self._line = FairLine(limits.weights, limits.ageing_s)
        self._holdings = Holdings(FairClock(limits.weights))
        self._running: dict[int, _Running] = {}
        self._latest: list[tuple[float, int]] = []  # heap: (latest start, ticket)
        self._shed: list[Shed] = []
        self._mean_tokens = 0.0

    @property
    def queued(self) -> int:
        """Requests that were accepted and are in no batch yet."""
        return len(self._admitted) + len(self._line)

    @property
    def ready_count(self) -> int:
        """Requests that could be batched now."""
        return len(self._line)

    @property
    def free_lanes(self) -> int:
        """Lanes with no batch."""
        return self.limits.lanes - len(self._running)

    def admit(self, now_s: float, terms: Terms = ANY_TIME) -> Accept | Refuse:
        """Take a request into the queue, or refuse it at once."""
        now_s, deadline_s = self._time.advance(now_s), terms.deadline_s
        if self._closed:
            return Refuse("the server is closing", None)
        if deadline_s is not None:
            deadline_s += self._time.ahead_s
        if deadline_s is not None and deadline_s <= now_s:
            return Refuse("its deadline has passed", None, late=True)
        displaced: tuple[int, ...] = ()
        if self.queued >= self.limits.queue:
            self._line.age(now_s)
            victim = self._holdings.displaced_by(terms)
            if victim is None:
                reason = f"the queue is full ({self.limits.queue} requests)"
                return Refuse(reason, self.retry_s())
            self.withdraw(victim)
            displaced = (victim,)
        item = Waiting(self._tickets, now_s, terms, deadline_s, rank=int(terms.priority))
        self._tickets += 1
        self._admitted[item.ticket] = item
        if deadline_s is not None:
            heapq.heappush(self._latest, (deadline_s, item.ticket))
        self._holdings.add(item)
        return Accept(item.ticket, displaced)

    def ready(self, ticket: int, tokens: int, now_s: float) -> None:
        """Mark an admitted request as ready to be batched; it has ``tokens`` tokens.

        Raises:
            KeyError: If the ticket is not waiting to become ready.
        """
        now_s = self._time.advance(now_s)
        item = self._admitted.pop(ticket)
        item.tokens = tokens = max(int(tokens), 1)
        self._line.enter(item)
        self._mean_tokens += (1 - _KEEP_MEAN if self._mean_tokens else 1.0) * (
            tokens - self._mean_tokens
        )
        if item.deadline_s is not None:
            heapq.heappush(self._latest, (self._latest_start_s(item), ticket))
        self._gaps.observe(now_s)

    def withdraw(self, ticket: int) -> bool:
        """Take a request out of the queue; return whether it was still there."""
        item = self._admitted.pop(ticket, None)
        if item is None:
            if ticket not in self._line.by_ticket:
                return False
            item = self._line.leave(ticket)
        self._holdings.remove(item)
        return True

    def complete(
        self, batch: int, now_s: float, failed: bool = False, work_s: float | None = None
    ) -> None:
        """Free the lane of a batch.

        Args:
            batch: Its serial number.
            now_s: The time.
            failed: Whether it failed: its time teaches nothing then.
            work_s: CPU seconds that the lane's thread spent on it, where that computes.

        Raises:
            KeyError: If that batch is not running.
        """
        now_s = self._time.advance(now_s)
        run = self._running.pop(batch)
        if not failed:
            self.cost.observe(run.size * run.longest, now_s - run.start_s, work_s)
            self.model.observe(run.size, run.longest, now_s - run.start_s)

    def close(self) -> None:
        """Refuse new requests; what is queued is still dispatched, without waiting."""
        self._closed = True

    def hold(self, scale: float, token_budget: int | None = None) -> None:
        """Hold batches to a share of their limits (1 for all of them).

        Args:
            scale: The share.
            token_budget: A budget in place of the one given before.
        """
        if token_budget is not None:
            self._given = replace(self._given, token_budget=token_budget)
        given = self._given

        def part(limit: int | None) -> int | None:
            return None if limit is None else max(int(limit * scale), 1)

        self.limits = replace(
            given,
            token_budget=max(int(given.token_budget * scale), 1),
            max_batch=part(given.max_batch),
            fixed_size=part(given.fixed_size),
        )

    def take_shed(self) -> tuple[Shed, ...]:
        """Return the requests given up since the last time; each is named once."""
        if not self._shed:
            return ()
        shed, self._shed = tuple(self._shed), []
        return shed

    def decide(self, now_s: float) -> Dispatch | Wait:
        """Return the batch that must run now, or how long nothing needs to run."""
        now_s = self._time.advance(now_s)
        self._expire(now_s)
        if not self._line.by_ticket or self.free_lanes < 1:
            return Wait(None)
        self._line.age(now_s)
        anchor = self._anchor()
        if self.limits.fixed_size is not None:
            return self._decide_fixed(self.limits.fixed_size, now_s)
        limits, call = self._part()
        line = self._line.head(int(_REACH * room_for(limits, anchor.tokens)) + 1, anchor)
        choice = choose(line, anchor, limits, call)
        chosen = members(line, anchor, choice)
        kept = keep_deadlines(chosen, self.model, now_s, limits.max_padding)
        full = choice.size >= choice.room or len(kept) < len(chosen)
        verdict = self._reason_to_go(kept, full, now_s)
        if isinstance(verdict, Wait):
            return verdict
        return self._dispatch(kept, verdict, now_s)

    def expire(self, now_s: float) -> None:
        """Give up what would miss its deadline if it ran alone now; ``take_shed`` tells."""
        self._expire(self._time.advance(now_s))

    def _expire(self, now_s: float) -> None:
        """Give up what is too late, and forget what has gone meanwhile."""
        while self._latest:
            latest_s, ticket = self._latest[0]
            item = self._line.by_ticket.get(ticket) or self._admitted.get(ticket)
            if item is not None and latest_s >= now_s:
                return
            heapq.heappop(self._latest)
            if item is None:
                continue
            latest_s = self._latest_start_s(item)  # the model may have learnt since
            if latest_s < now_s:
                self.withdraw(ticket)
                self._shed.append(Shed(ticket, now_s - latest_s))
            else:
                heapq.heappush(self._latest, (latest_s, ticket))

    def retry_s(self) -> float:
        """Return the seconds until a lane is likely to take the next batch out of the queue."""
        batch_s = self.cost.batch_s
        wait_s = self.limits.max_wait_s if batch_s is None else batch_s / self.limits.lanes
        return max(wait_s, _LEAST_RETRY_S)

    def _latest_start_s(self, item: Waiting) -> float:
        """Return when a request must begin at the latest; its deadline while it is not ready."""
        assert item.deadline_s is not None
        return item.deadline_s - (self.model.predict(1, item.tokens) if item.tokens else 0.0)

    def _is_odd(self, tokens: int) -> bool:
        return tokens > self.limits.token_budget or tokens > _ODD_TIMES * self._mean_tokens

    def _anchor(self) -> Waiting:
        """Return the first in line; not an odd one while another odd one holds a lane."""
        first = self._line.first
        if not self.limits.odd_lane or not self._is_odd(first.tokens):
            return first
        if not any(run.odd for run in self._running.values()):
            return first
        others = (item for item in self._line.in_order() if not self._is_odd(item.tokens))
        return next(others, first)

    def _part(self) -> tuple[BatchLimits, float]:
        """Return the limits of a batch that leaves other lanes their part, and a call's worth.

        In a long queue a request that is left behind shares its batch with others too, so that
        joining this one saves it less than a whole call: less padding pays. Not ever less: batches
        are drawn from the first in line, however long it is.
        """
        limits, waiting = self.limits, self._line.tokens
        part = self.cost.worthwhile(waiting, limits.lanes, limits.token_budget)
        call = self.cost.overhead_tokens * min(1.0, max(2 * part / waiting, _LEAST_PART))
        if part == limits.token_budget:
            return limits, call
        return replace(limits, token_budget=part), call

    def _reason_to_go(self, chosen: list[Waiting], full: bool, now_s: float) -> Reason | Wait:
        due_s = min(item.admitted_s for item in chosen) + self.limits.max_wait_s
        if self._closed:
            return Reason.DRAIN
        if full:
            return Reason.FULL
        if now_s >= due_s:
            return Reason.OVERDUE
        if len(self._line) > len(chosen):
            return Reason.CONTENDED
        if self.free_lanes > 1:
            return Reason.NO_GAIN  # who comes next finds a lane too
        until_s = self._gaps.worth_waiting_until(now_s, self.cost.overhead_s)
        if until_s is None or until_s <= now_s or self._would_be_late(chosen, until_s):
            return Reason.NO_GAIN
        return self._wait(min(until_s, due_s))

    def _would_be_late(self, chosen: list[Waiting], start_s: float) -> bool:
        """Whether a batch with one request more, begun then, would miss a deadline in it."""
        first_s = min(
            (one.deadline_s for one in chosen if one.deadline_s is not None), default=None
        )
        if first_s is None:
            return False
        longest = max(one.tokens for one in chosen)
        return start_s + self.model.predict(len(chosen) + 1, longest) >= first_s

    def _wait(self, until_s: float) -> Wait:
        """Return a wait, in the caller's time."""
        return Wait(until_s - self._time.ahead_s)

    def _decide_fixed(self, size: int, now_s: float) -> Dispatch | Wait:
        """Return a batch of ``size`` in order of the line, or wait for it to fill."""
        chosen = fixed_members(self._line, size)
        due_s = min(item.admitted_s for item in chosen) + self.limits.max_wait_s
        if self._closed:
            reason = Reason.DRAIN
        elif len(chosen) >= size:
            reason = Reason.FULL
        elif now_s >= due_s:
            reason = Reason.OVERDUE
        else:
            return self._wait(due_s)
        return self._dispatch(chosen, reason, now_s)

    def _dispatch(self, chosen: list[Waiting], reason: Reason, now_s: float) -> Dispatch:
        """Take requests out of the line as a batch; the anchor is the first of them."""
        self._line.serve(chosen)
        for item in chosen:
            self._holdings.remove(item)
        longest = max(item.tokens for item in chosen)
        batch = self._batches
        self._batches += 1
        self._running[batch] = _Running(len(chosen), longest, now_s, self._is_odd(longest))
        tickets = tuple(sorted(item.ticket for item in chosen))
        return Dispatch(batch, tickets, longest, sum(item.tokens for item in chosen), reason)
