"""Requests that wait: in their fair order, by length, and by who holds how much of the queue."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from qbench.serving.decisions import Priority, Terms

Key: TypeAlias = tuple[int, float, int]
_CLEAN_AT = 1024
_STAYS = 1 / 8


@dataclass(slots=True)
class Waiting:
    """One queued request.

    Attributes:
        ticket: Its name.
        admitted_s: When it came.
        terms: Tenant, class and deadline.
        deadline_s: Its deadline in steady time, or ``None``.
        tokens: Its tokens; 0 until it is ready.
        rank: The class that it counts as; ageing lowers it.
        tag: Its virtual time: the fair order within a rank.
    """

    ticket: int
    admitted_s: float
    terms: Terms
    deadline_s: float | None = None
    tokens: int = 0
    rank: int = 0
    tag: float = 0.0

    @property
    def key(self) -> Key:
        """Where it stands in the line: class, virtual time, ticket."""
        return self.rank, self.tag, self.ticket


class FairClock:
    """Virtual time for weighted fair queueing by start tags.

    A request's tag is where its tenant's service would begin if all tenants were served at
    once, each at the speed of its weight: ``max(now, end of the tenant's last request)``; it
    ends ``tokens / weight`` later. Serving the smallest tag first gives each tenant that asks
    for it its share, whatever the others ask for (start-time fair queueing, Goyal, Vin and
    Cheng, 1996). With one tenant the order is that of arrival.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Begin at virtual time 0."""
        self._weights = weights
        self._now = 0.0
        self._ends: dict[str, float] = {}
        self._clean_at = _CLEAN_AT

    def weight(self, tenant: str) -> float:
        """Return the weight of a tenant: 1 unless it was given another."""
        return self._weights.get(tenant, 1.0)

    def tag(self, tenant: str, tokens: int) -> float:
        """Return the tag of a tenant's next request and take its time."""
        start = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + tokens / self.weight(tenant)
        if len(self._ends) > self._clean_at:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
            self._clean_at = max(2 * len(self._ends), _CLEAN_AT)
        return start

    def refund(self, tenant: str, tokens: int) -> None:
        """Give back the time of a request that left the line unserved."""
        if tenant in self._ends:
            self._ends[tenant] -= tokens / self.weight(tenant)

    def serve(self, tag: float) -> None:
        """Note that the request with this tag is served now."""
        self._now = max(self._now, tag)

    def rest(self) -> None:
        """Begin anew while nobody waits: there is no share to be owed.

        Tenants are forgotten here. Time alone would not pass where each comes once.
        """
        self._ends.clear()


class Line:
    """Requests that are ready to be batched."""

    def __init__(self) -> None:
        """Begin empty."""
        self.by_ticket: dict[int, Waiting] = {}
        self.order: list[Key] = []  # ascending: the first is served next
        self.lengths: list[int] = []  # distinct lengths, ascending
        self.by_length: dict[int, list[Key]] = {}  # length -> keys, ascending
        self.tokens = 0  # of all that wait

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self.by_ticket)

    @property
    def first(self) -> Waiting:
        """The request that is served next."""
        return self.by_ticket[self.order[0][2]]

    def head(self, count: int, anchor: Waiting) -> Line:
        """Return the line as if only its first ``count`` requests and the anchor waited."""
        if count >= len(self.order):
            return self
        part = Line()
        for key in self.order[:count]:
            part.add(self.by_ticket[key[2]])
        if anchor.ticket not in part.by_ticket:
            part.add(anchor)
        return part

    def in_order(self) -> Iterator[Waiting]:
        """Yield all in their fair order."""
        return (self.by_ticket[key[2]] for key in self.order)

    def add(self, item: Waiting) -> None:
        """Put a request into its place."""
        key = item.key
        self.by_ticket[item.ticket] = item
        self.tokens += item.tokens
        insort(self.order, key)
        bucket = self.by_length.get(item.tokens)
        if bucket is None:
            insort(self.lengths, item.tokens)
            self.by_length[item.tokens] = [key]
        else:
            insort(bucket, key)

    def remove(self, ticket: int) -> Waiting:
        """Take a request out.

        Raises:
            KeyError: If it is not there.
        """
        item = self.by_ticket.pop(ticket)
        key = item.key
        self.tokens -= item.tokens
        del self.order[bisect_left(self.order, key)]
        bucket = self.by_length[item.tokens]
        del bucket[bisect_left(bucket, key)]
        if not bucket:
            del self.by_length[item.tokens]
            del self.lengths[bisect_left(self.lengths, item.tokens)]
        return item


class FairLine(Line):
    """A line that gives places itself: class before class, and tenants by weight within each.

    Who waited ``ageing_s`` counts as ``interactive``, as if it had come then.
    """

    def __init__(self, weights: Mapping[str, float], ageing_s: float) -> None:
        """Begin empty."""
        super().__init__()
        # NOTE: a clock for each class. One for both would charge a tenant's interactive requests
        # for its own backlog of batch requests before that is served.
        self._clocks = {int(one): FairClock(weights) for one in Priority}
        self._ageing_s = ageing_s
        self._ageing: deque[tuple[float, int]] = deque()  # (admission, ticket) of lower classes

    def enter(self, item: Waiting) -> None:
        """Give a request its place."""
        self._place(item)
        if item.rank:
            self._ageing.append((item.admitted_s, item.ticket))

    def leave(self, ticket: int) -> Waiting:
        """Take a request out unserved: its tenant has its time back.

        Raises:
            KeyError: If it is not there.
        """
        item = self.remove(ticket)
        self._clocks[item.rank].refund(item.terms.tenant, item.tokens)
        return item

    def serve(self, items: Sequence[Waiting]) -> None:
        """Take out requests that are served together, the one that they were chosen for first."""
        self._clocks[items[0].rank].serve(items[0].tag)
        for item in items:
            self.remove(item.ticket)
        if not self.by_ticket:
            for clock in self._clocks.values():
                clock.rest()

    def age(self, now_s: float) -> None:
        """Let what waited long enough count as interactive; forget what has gone meanwhile."""
        while self._ageing:
            admitted_s, ticket = self._ageing[0]
            item = self.by_ticket.get(ticket)
            if item is not None and now_s - admitted_s < self._ageing_s:
                return
            self._ageing.popleft()
            if item is not None:
                self.leave(ticket)
                item.rank = int(Priority.INTERACTIVE)
                self._place(item)

    def _place(self, item: Waiting) -> None:
        item.tag = self._clocks[item.rank].tag(item.terms.tenant, item.tokens)
        self.add(item)


class Holdings:
    """Who holds how many places of the queue."""

    def __init__(self, clock: FairClock) -> None:
        """Begin with nobody in it."""
        self._clock = clock
        self._held: dict[str, dict[int, dict[int, Waiting]]] = {}  # tenant -> class -> by ticket
        self._counts: dict[str, int] = {}

    def add(self, item: Waiting) -> None:
        """Note that a request took a place."""
        tenant, rank = item.terms.tenant, int(item.terms.priority)
        self._held.setdefault(tenant, {}).setdefault(rank, {})[item.ticket] = item
        self._counts[tenant] = self._counts.get(tenant, 0) + 1

    def remove(self, item: Waiting) -> None:
        """Note that a request left its place."""
        tenant, rank = item.terms.tenant, int(item.terms.priority)
        del self._held[tenant][rank][item.ticket]
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant], self._held[tenant]

    def displaced_by(self, terms: Terms) -> int | None:
        """Return who must give its place in a full queue to a request on these terms.

        That is the youngest of the tenant that holds most for its weight, if the newcomer's
        would still hold less; else the youngest of the newcomer's own in a lower class. Of that
        class an eighth stays, and who aged out of it: else a tenant's ``batch`` requests would
        never be old enough while its ``interactive`` ones fill the queue.
        """
        if not self._counts:
            return None
        weight = self._clock.weight
        most = max(self._counts, key=lambda tenant: self._counts[tenant] / weight(tenant))
        own = (self._counts.get(terms.tenant, 0) + 1) / weight(terms.tenant)
        unfair = most != terms.tenant and self._counts[most] / weight(most) > own
        youngest = self._youngest(most if unfair else terms.tenant)
        if youngest is None or unfair:
            return None if youngest is None else youngest.ticket
        if youngest.rank <= int(terms.priority):
            return None
        lower = len(self._held[terms.tenant][int(youngest.terms.priority)])
        return youngest.ticket if lower > _STAYS * self._counts[terms.tenant] else None

    def _youngest(self, tenant: str) -> Waiting | None:
        """Return a tenant's youngest in its lowest class."""
        held = self._held.get(tenant, {})
        lowest = max((rank for rank, waiting in held.items() if waiting), default=None)
        return None if lowest is None else next(reversed(held[lowest].values()))
