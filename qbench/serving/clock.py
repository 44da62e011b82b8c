"""Time that never runs backwards, whatever the clock that it is read from does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
_STEADY = (time.perf_counter, time.monotonic)


class SteadyTime:
    """Time that stands still while its clock steps back, and then goes on at the clock's pace.

    Clamping a clock to its latest value would let time stand still until the clock has made up
    for the step: for an hour after one of an hour.
    """

    __slots__ = ("_last_s", "ahead_s")

    def __init__(self) -> None:
        """Begin with the first time that comes."""
        self._last_s = float("-inf")
        self.ahead_s = 0.0  # of the clock: all its steps back

    def advance(self, clock_s: float) -> float:
        """Take what the clock says, seconds; return the steady time."""
        if clock_s < self._last_s:
            self.ahead_s += self._last_s - clock_s
        self._last_s = clock_s
        return clock_s + self.ahead_s


class SteadyClock:
    """A clock made steady; safe to read from any thread."""

    def __init__(self, clock: Clock) -> None:
        """Take a clock, seconds."""
        self._clock, self._time, self._lock = clock, SteadyTime(), threading.Lock()

    def __call__(self) -> float:
        """Return the time, seconds."""
        with self._lock:
            return self._time.advance(self._clock())


def steady(clock: Clock) -> Clock:
    """Return a clock that never runs backwards: the same one where it cannot."""
    return clock if clock in _STEADY or isinstance(clock, SteadyClock) else SteadyClock(clock)
