"""Which waiting requests share a batch: pure choices over the line, nothing is changed here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from qbench.serving.cost import BatchCost
from qbench.serving.decisions import BatchLimits
from qbench.serving.waiting import Line, Waiting

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Choice:
    """How many requests of each length share a batch.

    Attributes:
        longest: Tokens of the longest.
        counts: (length, requests), the anchor among them.
        value: Lane time that the batch saves against batches of one, in tokens.
        room: Requests that a batch of that length could hold.
    """

    longest: int
    counts: tuple[tuple[int, int], ...]
    value: float
    room: int

    @property
    def size(self) -> int:
        """Requests of the batch."""
        return sum(count for _, count in self.counts)

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(length * count for length, count in self.counts)


def room_for(limits: BatchLimits, longest: int) -> int:
    """Return the requests that fit into a batch whose longest has ``longest`` tokens."""
    room = max(limits.token_budget // longest, 1)
    return room if limits.max_batch is None else min(room, limits.max_batch)


def choose(line: Line, anchor: Waiting, limits: BatchLimits, overhead: float) -> Choice:
    """Return the batch around the anchor that saves the most lane time.

    A batch of n requests saves n - 1 overheads against n batches of one, and pays for its
    padding; both count in tokens. Each length from the anchor's own upwards is tried as the
    batch's longest.

    Args:
        line: The requests that wait.
        anchor: The request that must be in it.
        limits: Limits of a batch.
        overhead: What a call costs beside its tokens, in tokens.
    """
    overhead = min(overhead, float(limits.token_budget))
    best = _fill(line, anchor.tokens, anchor.tokens, limits, overhead)
    assert best is not None  # a batch as long as its anchor always fits
    above = bisect_left(line.lengths, anchor.tokens + 1)
    for longest in line.lengths[above:]:
        if longest - anchor.tokens >= overhead * (room_for(limits, longest) - 1):
            break  # the anchor's padding alone eats what the fullest batch could save
        choice = _fill(line, longest, anchor.tokens, limits, overhead)
        if choice is not None and choice.value > best.value:
            best = choice
    return best


def _fill(
    line: Line, longest: int, anchor: int, limits: BatchLimits, overhead: float
) -> Choice | None:
    """Fill a batch with the requests nearest below ``longest``; ``None`` if none may be.

    ``slack`` is the padding that ``max_padding`` still allows: it grows by
    ``max_padding * longest`` with each request and shrinks by the request's padding.
    """
    share = limits.max_padding * longest
    whole = room_for(limits, longest)
    room = whole - 1
    slack = share - (longest - anchor)
    counts: dict[int, int] = {}
    value = float(anchor - longest)
    for length, available in _downwards(line, longest, anchor):
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
    return Choice(longest, tuple(counts.items()), value, whole)


def _downwards(line: Line, longest: int, anchor: int) -> Iterator[tuple[int, int]]:
    """Yield (length, ready requests but the anchor) from ``longest`` down."""
    for index in range(bisect_left(line.lengths, longest + 1) - 1, -1, -1):
        length = line.lengths[index]
        yield length, len(line.by_length[length]) - (length == anchor)


def members(line: Line, anchor: Waiting, choice: Choice) -> list[Waiting]:
    """Return the requests of a choice: the anchor, and of each length the first in line."""
    chosen = [anchor]
    for length, count in choice.counts:
        wanted = count - (length == anchor.tokens)
        for key in line.by_length[length]:
            if wanted < 1:
                break
            if key[2] != anchor.ticket:
                chosen.append(line.by_ticket[key[2]])
                wanted -= 1
    return chosen


def keep_deadlines(
    chosen: list[Waiting], cost: BatchCost, now_s: float, max_padding: float
) -> list[Waiting]:
    """Return as much of a batch as ends before the first deadline in it.

    The anchor is the first, and stays. Those leave that are longest, down to its length, and then
    those that are shortest, until what is left is quick enough and its padding still allowed.
    """
    if not cost.known or all(item.deadline_s is None for item in chosen):
        return chosen
    anchor = chosen[0]
    kept = [anchor, *sorted(chosen[1:], key=lambda item: item.tokens)]
    while len(kept) > 1:
        longest = max(kept[-1].tokens, anchor.tokens)
        first = min((item.deadline_s for item in kept if item.deadline_s is not None), default=None)
        quick = first is None or now_s + cost.predict(len(kept), longest) <= first
        padded = longest * len(kept)
        padding = padded - sum(item.tokens for item in kept)
        if quick and padding <= max_padding * padded + _ROUNDING:
            return kept
        del kept[-1 if longest > anchor.tokens else 1]
    return kept


def fixed_members(line: Line, size: int) -> list[Waiting]:
    """Return the first ``size`` requests in line, whatever their lengths."""
    return [line.by_ticket[key[2]] for key in line.order[:size]]
