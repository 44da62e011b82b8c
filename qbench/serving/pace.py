"""What waiting costs and what it saves: two small models learnt while serving.

Both are fed with times and give numbers; neither knows a clock.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

#: Padding of one request that costs as much as a batch of its own, tokens, before the first
#: fit. On CPUs a small encoder's fixed cost a call is worth some 16 tokens.
DEFAULT_OVERHEAD_TOKENS = 16.0

_FORGET = 0.97  # weight of the past at each new batch: the fit remembers some 33 batches
_LEAST_BATCHES = 8
_LEAST_SPREAD = 0.05  # of the mean padded tokens; below it the intercept is not identified
_RECENT = 32
_WORTH_OVERHEADS = 8.0
_GAPS = 48
_LEAST_GAPS = 8


class LaneCost:
    """Seconds of work that a batch is: ``overhead_s + padded_tokens * token_s``.

    A line through the batches seen, with exponential forgetting, that minimises the squared
    *relative* error (weight ``1 / padded_tokens ** 2``): times scatter in proportion, and the
    small batches are the ones that tell the overhead. The overhead is what two requests save
    when they share a batch; it is never taken for more than the shortest recent batch.

    NOTE: where a lane's own thread computes, its CPU time is the better measure of work. Time on
    the lane holds waiting for cores too, most of it in large batches, so that a busy machine
    seems to have no overhead and batches become small just then.
    """

    def __init__(self) -> None:
        """Begin without any batch seen."""
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._seen = self._busy_s = 0.0
        self._batches = 0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self.line: tuple[float, float] | None = None
        """``(overhead_s, token_s)``, or ``None`` while batches are too few or too alike."""

    def observe(self, padded_tokens: int, busy_s: float, work_s: float | None = None) -> None:
        """Add a batch.

        Args:
            padded_tokens: Its tokens with padding.
            busy_s: Seconds that it held its lane.
            work_s: CPU seconds of the lane's thread, where that computes.
        """
        x, y, keep = float(padded_tokens), busy_s if work_s is None else work_s, _FORGET
        weight = 1.0 / (x * x)
        self._weight = keep * self._weight + weight
        self._x = keep * self._x + weight * x
        self._y = keep * self._y + weight * y
        self._xx = keep * self._xx + 1.0
        self._xy = keep * self._xy + weight * x * y
        self._seen = keep * self._seen + 1.0
        self._busy_s = keep * self._busy_s + busy_s
        self._batches += 1
        self._recent.append(y)
        self.line = self._fitted()

    @property
    def batch_s(self) -> float | None:
        """Mean seconds that a batch holds a lane, or ``None`` before the first one."""
        return self._busy_s / self._seen if self._batches else None

    def _fitted(self) -> tuple[float, float] | None:
        if self._batches < _LEAST_BATCHES:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance <= (_LEAST_SPREAD * mean_x) ** 2:
            return None
        slope = max((self._xy / self._weight - mean_x * mean_y) / variance, 0.0)
        overhead_s = min(max(mean_y - slope * mean_x, 0.0), min(self._recent))
        return overhead_s, max((mean_y - overhead_s) / mean_x, 0.0)

    @property
    def overhead_s(self) -> float:
        """Seconds that two requests save by sharing a batch; 0 while unknown."""
        line = self.line
        return line[0] if line else 0.0

    @property
    def overhead_tokens(self) -> float:
        """The overhead in tokens: padding of a request beyond it costs more than it saves."""
        line = self.line
        if line is None:
            return DEFAULT_OVERHEAD_TOKENS
        overhead_s, token_s = line
        return overhead_s / token_s if token_s > 0 else float("inf")

    def worthwhile(self, waiting: int, lanes: int, budget: int) -> int:
        """Return the padded tokens that a batch may take of what waits, ``budget`` at most.

        A batch takes half of its lane's part of the waiting tokens, so that lanes end together and
        what comes meanwhile finds one free soon (guided self-scheduling, Polychronopoulos and Kuck,
        1987). Up to eight overheads it may always take: below that, a call costs too much of it.

        Args:
            waiting: Tokens that wait.
            lanes: Lanes that share them.
            budget: The largest batch that is allowed, padded tokens.
        """
        if self.line is None:
            return budget
        part = max(_WORTH_OVERHEADS * self.overhead_tokens, waiting / (2 * lanes))
        return budget if part >= budget else max(int(part), 1)


class ArrivalGaps:
    """The last gaps between arrivals, and how long it pays to wait for the next arrival."""

    def __init__(self) -> None:
        """Begin without any arrival seen."""
        self._last_s: float | None = None
        self._gaps: deque[float] = deque()
        self._sorted: list[float] = []

    def observe(self, now_s: float) -> None:
        """Note an arrival at ``now_s``."""
        if self._last_s is not None:
            gap = max(now_s - self._last_s, 0.0)
            if len(self._gaps) == _GAPS:
                self._sorted.remove(self._gaps.popleft())
            self._gaps.append(gap)
            insort(self._sorted, gap)
        self._last_s = now_s

    def worth_waiting_until(self, now_s: float, saving_s: float) -> float | None:
        """Return until when waiting for one more arrival pays, or ``None`` if it does not.

        An arrival within ``w`` seconds saves ``saving_s`` of lane time, and the lane idles for
        ``min(gap, w)``. With the gaps seen that were longer than the silence so far, the best
        ``w`` up to ``saving_s`` maximises ``saving_s * P(gap <= w) - E[min(gap, w)]``; waiting
        pays if that maximum is above zero. The bound keeps a wait that turns out in vain from
        costing more than one that works out saves.

        Args:
            now_s: The time, seconds.
            saving_s: Lane time that one more request in the batch saves, seconds.
        """
        if self._last_s is None or saving_s <= 0 or len(self._sorted) < _LEAST_GAPS:
            return None
        silence = max(now_s - self._last_s, 0.0)
        gaps = self._sorted[bisect_right(self._sorted, silence) :]
        best, best_wait, idle = 0.0, 0.0, 0.0
        for index, gap in enumerate(gaps, start=1):
            wait = gap - silence
            if wait > saving_s:
                break
            idle += wait
            value = saving_s * index - idle - (len(gaps) - index) * wait
            if value > best:
                best, best_wait = value, wait
        return now_s + best_wait if best > 0 else None
