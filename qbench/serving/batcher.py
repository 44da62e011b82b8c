"""The dynamic batcher: a pure state machine.

Arrivals, completions and the time (seconds, any origin) come in; frozen decisions come out.
There is no clock and no thread here, so that each rule can be tested by simulation:

- the queue is bounded: a request that finds it full is refused at once, with a retry hint;
- a batch always holds the oldest ready request, so nothing starves, whatever its length;
- it is filled with requests of like length under a budget of padded tokens
  (``longest * count <= token_budget``; a single longer request goes alone);
- a request joins only if its padding costs less than the batch of its own that it saves, and
  the padding of the whole batch stays within ``max_padding``;
- a free lane waits for more requests only while that pays, and never beyond ``max_wait_s``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from qbench.errors import ConfigError
from qbench.serving.pace import ArrivalGaps, LaneCost

_LEAST_RETRY_S = 0.001


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What bounds the queue and a batch.

    Attributes:
        token_budget: Most padded tokens of a batch of more than one request.
        max_wait_s: Longest time that a free lane lets the oldest request wait, seconds.
        queue: Most requests that were accepted and are in no batch yet.
        max_padding: Largest share of a batch's padded tokens that is padding.
        max_batch: Most requests of a batch, or ``None`` for no limit but the budget.
        lanes: Batches that can run at once.
    """

    token_budget: int = 256
    max_wait_s: float = 0.005
    queue: int = 256
    max_padding: float = 0.2
    max_batch: int | None = None
    lanes: int = 1

    def __post_init__(self) -> None:
        """Refuse limits under which nothing could be served.

        Raises:
            ConfigError: If a limit is out of its range; the message names it.
        """
        for name, value in (
            ("token_budget", self.token_budget),
            ("queue", self.queue),
            ("lanes", self.lanes),
            ("max_batch", 1 if self.max_batch is None else self.max_batch),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}; allowed: 1 or more")
        if not self.max_wait_s >= 0:
            raise ConfigError(f"max_wait_s is {self.max_wait_s}; allowed: 0 or more seconds")
        if not 0 <= self.max_padding < 1:
            raise ConfigError(f"max_padding is {self.max_padding}; allowed: a share from 0 to 1")


class Reason(StrEnum):
    """Why a batch went when it did."""

    FULL = "full"  # no further request of its length fits
    OVERDUE = "overdue"  # its oldest request waited max_wait_s
    CONTENDED = "contended"  # other requests wait for the lane
    NO_GAIN = "no_gain"  # waiting for another request would not pay
    DRAIN = "drain"  # the batcher is closed


@dataclass(frozen=True, slots=True)
class Accept:
    """The request is in the queue; ``ticket`` names it from now on."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request is not in the queue.

    Attributes:
        reason: Why, in words.
        retry_after_s: When another try is likely to find room, seconds; ``None`` for never.
    """

    reason: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A batch that must run now on a free lane.

    Attributes:
        batch: Serial number, to be given back to ``complete``.
        tickets: Its requests, the oldest first.
        longest: Tokens of its longest request.
        tokens: Tokens without padding.
        reason: Why it goes now.
    """

    batch: int
    tickets: tuple[int, ...]
    longest: int
    tokens: int
    reason: Reason

    @property
    def padded_tokens(self) -> int:
        """Tokens with padding."""
        return self.longest * len(self.tickets)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to run: ask again at ``until_s``, or on the next event where it is ``None``."""

    until_s: float | None


@dataclass(frozen=True, slots=True)
class _Choice:
    """How many requests of each length share a batch; ``value`` is the tokens that saves."""

    longest: int
    counts: tuple[tuple[int, int], ...]  # (length, requests), the anchor among them
    value: float

    @property
    def size(self) -> int:
        return sum(count for _, count in self.counts)


class Batcher:
    """Turns arrivals into batches; see the module's head for the rules.

    The life of a request: ``admit`` → (preprocessing) → ``ready`` → in a ``Dispatch`` from
    ``decide`` → ``complete`` of that batch. ``withdraw`` takes it out before it is dispatched.
    """

    def __init__(self, limits: BatchLimits) -> None:
        """Begin with an empty queue and all lanes free."""
        self.limits = limits
        self.cost = LaneCost()
        self._gaps = ArrivalGaps()
        self._now_s = float("-inf")
        self._tickets = self._batches = 0
        self._closed = False
        self._admitted: dict[int, float] = {}  # ticket -> time of admission; not yet ready
        self._ready: dict[int, tuple[int, float]] = {}  # ticket -> (tokens, time of admission)
        self._order: list[int] = []  # ready tickets, ascending: the first is the oldest
        self._lengths: list[int] = []  # distinct lengths of ready requests, ascending
        self._by_length: dict[int, list[int]] = {}  # length -> its ready tickets, ascending
        self._running: dict[int, tuple[int, float]] = {}  # batch -> (padded tokens, start)

    @property
    def queued(self) -> int:
        """Requests that were accepted and are in no batch yet."""
        return len(self._admitted) + len(self._ready)

    @property
    def ready_count(self) -> int:
        """Requests that could be batched now."""
        return len(self._ready)

    @property
    def free_lanes(self) -> int:
        """Lanes with no batch."""
        return self.limits.lanes - len(self._running)

    def admit(self, now_s: float) -> Accept | Refuse:
        """Take a request into the queue, or refuse it at once."""
        now_s = self._advance(now_s)
        if self._closed:
            return Refuse("the server is closing", None)
        if self.queued >= self.limits.queue:
            return Refuse(f"the queue is full ({self.limits.queue} requests)", self._retry_s())
        ticket = self._tickets
        self._tickets += 1
        self._admitted[ticket] = now_s
        return Accept(ticket)

    def ready(self, ticket: int, tokens: int, now_s: float) -> None:
        """Mark an admitted request as ready to be batched; it has ``tokens`` tokens.

        Raises:
            KeyError: If the ticket is not waiting to become ready.
        """
        now_s = self._advance(now_s)
        tokens = max(int(tokens), 1)
        self._ready[ticket] = (tokens, self._admitted.pop(ticket))
        insort(self._order, ticket)
        bucket = self._by_length.get(tokens)
        if bucket is None:
            insort(self._lengths, tokens)
            self._by_length[tokens] = [ticket]
        else:
            insort(bucket, ticket)
        self._gaps.observe(now_s)

    def withdraw(self, ticket: int) -> bool:
        """Take a request out of the queue; return whether it was still there."""
        if self._admitted.pop(ticket, None) is not None:
            return True
        if ticket not in self._ready:
            return False
        self._remove(ticket)
        return True

    def complete(self, batch: int, now_s: float) -> None:
        """Free the lane of ``batch``.

        Raises:
            KeyError: If that batch is not running.
        """
        now_s = self._advance(now_s)
        padded_tokens, start_s = self._running.pop(batch)
        self.cost.observe(padded_tokens, now_s - start_s)

    def close(self) -> None:
        """Refuse new requests; what is queued is still dispatched, without waiting."""
        self._closed = True

    def decide(self, now_s: float) -> Dispatch | Wait:
        """Return the batch that must run now, or how long nothing needs to run."""
        now_s = self._advance(now_s)
        if not self._ready or self.free_lanes < 1:
            return Wait(None)
        choice = self._choose()
        verdict = self._reason_to_go(choice, now_s)
        if isinstance(verdict, Wait):
            return verdict
        return self._dispatch(choice, verdict, now_s)

    def _advance(self, now_s: float) -> float:
        """Return the time, which never runs backwards here."""
        self._now_s = max(self._now_s, now_s)
        return self._now_s

    def _retry_s(self) -> float:
        """Seconds until a lane is likely to take the next batch out of the queue."""
        batch_s = self.cost.batch_s
        wait_s = self.limits.max_wait_s if batch_s is None else batch_s / self.limits.lanes
        return max(wait_s, _LEAST_RETRY_S)

    def _reason_to_go(self, choice: _Choice, now_s: float) -> Reason | Wait:
        limits, size = self.limits, choice.size
        oldest_s = self._ready[self._order[0]][1]
        due_s = oldest_s + limits.max_wait_s
        if self._closed:
            return Reason.DRAIN
        if size >= self._room(choice.longest):
            return Reason.FULL
        if now_s >= due_s:
            return Reason.OVERDUE
        if len(self._ready) > size:
            return Reason.CONTENDED
        until_s = self._gaps.worth_waiting_until(now_s, self.cost.overhead_s)
        if until_s is None or until_s <= now_s:
            return Reason.NO_GAIN
        return Wait(min(until_s, due_s))

    def _room(self, longest: int) -> int:
        """Requests that fit into a batch whose longest has ``longest`` tokens."""
        room = max(self.limits.token_budget // longest, 1)
        return room if self.limits.max_batch is None else min(room, self.limits.max_batch)

    def _choose(self) -> _Choice:
        """Return the batch around the oldest request that saves the most lane time.

        A batch of n requests saves n - 1 overheads against n batches of one, and pays for
        its padding; both count in tokens. Each length from the oldest request's own upwards
        is tried as the batch's longest.
        """
        anchor = self._ready[self._order[0]][0]
        overhead = min(self.cost.overhead_tokens, float(self.limits.token_budget))
        best = self._fill(anchor, anchor, overhead)
        assert best is not None  # a batch as long as its anchor always fits
        for longest in self._lengths[bisect_left(self._lengths, anchor + 1) :]:
            if longest - anchor >= overhead * (self._room(longest) - 1):
                break  # the anchor's padding alone eats what the fullest batch could save
            choice = self._fill(longest, anchor, overhead)
            if choice is not None and choice.value > best.value:
                best = choice
        return best

    def _fill(self, longest: int, anchor: int, overhead: float) -> _Choice | None:
        """Fill a batch with the requests nearest below ``longest``; ``None`` if none may be.

        ``slack`` is the padding that ``max_padding`` still allows: it grows by
        ``max_padding * longest`` with each request and shrinks by the request's padding.
        """
        share = self.limits.max_padding * longest
        room = self._room(longest) - 1
        slack = share - (longest - anchor)
        counts: dict[int, int] = {}
        value = float(anchor - longest)
        for length, available in self._downwards(longest, anchor):
            padding = longest - length
            if room < 1 or padding >= overhead and padding > 0:
                break
            take = min(available, room)
            if padding > share:
                take = min(take, int(slack / (padding - share))) if slack > 0 else 0
            if take < 1:
                continue
            counts[length] = take
            room -= take
            slack += take * (share - padding)
            value += take * (overhead - padding)
        if slack < 0:
            return None
        counts[anchor] = counts.get(anchor, 0) + 1
        return _Choice(longest, tuple(counts.items()), value)

    def _downwards(self, longest: int, anchor: int) -> Iterator[tuple[int, int]]:
        """Yield (length, ready requests but the anchor) from ``longest`` down."""
        for index in range(bisect_left(self._lengths, longest + 1) - 1, -1, -1):
            length = self._lengths[index]
            yield length, len(self._by_length[length]) - (length == anchor)

    def _dispatch(self, choice: _Choice, reason: Reason, now_s: float) -> Dispatch:
        tickets = sorted(
            ticket for length, count in choice.counts for ticket in self._by_length[length][:count]
        )
        tokens = sum(length * count for length, count in choice.counts)
        for ticket in tickets:
            self._remove(ticket)
        batch = self._batches
        self._batches += 1
        decision = Dispatch(batch, tuple(tickets), choice.longest, tokens, reason)
        self._running[batch] = (decision.padded_tokens, now_s)
        return decision

    def _remove(self, ticket: int) -> None:
        length, _ = self._ready.pop(ticket)
        del self._order[bisect_left(self._order, ticket)]
        bucket = self._by_length[length]
        del bucket[bisect_left(bucket, ticket)]
        if not bucket:
            del self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
