"""When requests are meant to be sent: schedules of an open loop, made before any is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from qbench.errors import ConfigError

_QUIET = 0.1  # of the mean rate, between bursts


class Process(StrEnum):
    """How arrivals follow one another."""

    POISSON = "poisson"  # independent users
    CONSTANT = "constant"  # a clock
    BURSTS = "bursts"  # a crowd now and then, few in between
    TRACE = "trace"  # as recorded


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A schedule to draw.

    Attributes:
        rate: Mean arrivals a second; a trace is stretched to it, or left as it is for 0.
        process: How they follow one another.
        burst_times: A burst has so many times the mean rate.
        burst_s: Seconds of a burst; bursts come as often as keeps the mean.
        trace_s: Recorded times of arrivals, seconds from any origin.
    """

    rate: float = 0.0
    process: Process = Process.POISSON
    burst_times: float = 10.0
    burst_s: float = 0.2
    trace_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a schedule without arrivals.

        Raises:
            ConfigError: If the rate, the burst or the trace is unusable.
        """
        if self.process is Process.TRACE:
            if len(self.trace_s) < 2 or min(np.diff(self.trace_s)) < 0:
                raise ConfigError(
                    f"a trace needs two arrivals or more in order of time, got "
                    f"{len(self.trace_s)}; each line of its file is one time in seconds"
                )
        elif not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate is {self.rate}; allowed: more than 0 requests a second")
        if not self.burst_times > 1 or not self.burst_s > 0:
            raise ConfigError(
                f"burst_times is {self.burst_times} and burst_s {self.burst_s}; allowed: more "
                f"than 1, and more than 0 seconds"
            )

    def draw(self, duration_s: float, rng: np.random.Generator) -> np.ndarray:
        """Return intended times [n], ascending, seconds from the start, below ``duration_s``."""
        if self.process is Process.CONSTANT:
            return np.arange(0.0, duration_s, 1 / self.rate)
        if self.process is Process.TRACE:
            return self._replay(duration_s)
        if self.process is Process.POISSON:
            return _poisson(self.rate, duration_s, rng)
        return self._bursts(duration_s, rng)

    @property
    def period_s(self) -> float:
        """After how long the schedule repeats: of bursts, and of a trace at a rate; else 0."""
        if self.process is Process.BURSTS:
            return self.burst_s / self._burst_share
        if self.process is Process.TRACE and self.rate > 0:
            return len(self.trace_s) / self.rate
        return 0.0

    @property
    def _burst_share(self) -> float:
        """Share of the time that is a burst; between bursts there is a tenth of the mean rate."""
        return (1 - _QUIET) / (self.burst_times - _QUIET)

    def _replay(self, duration_s: float) -> np.ndarray:
        """Repeat the trace as often as the duration needs."""
        times = np.asarray(self.trace_s) - self.trace_s[0]
        span = float(times[-1]) * len(times) / (len(times) - 1)  # a mean gap closes the circle
        if self.rate > 0:
            wanted = len(times) / self.rate
            times, span = times * (wanted / span if span > 0 else 0.0), wanted
        if span <= 0:
            raise ConfigError("all arrivals of the trace are at one time; give it a rate")
        rounds = int(np.ceil(duration_s / span))
        repeated = (np.arange(rounds)[:, None] * span + times).ravel()
        return repeated[repeated < duration_s]

    def _bursts(self, duration_s: float, rng: np.random.Generator) -> np.ndarray:
        """Poisson arrivals at the burst's rate in bursts, at a tenth of the mean between."""
        high, period_s = self.burst_times * self.rate, self.period_s
        times = _poisson(high, duration_s, rng)
        phase = (times + period_s - period_s * 0.5) % period_s
        keep = (phase < self.burst_s) | (rng.random(len(times)) < _QUIET / self.burst_times)
        return times[keep]


def _poisson(rate: float, duration_s: float, rng: np.random.Generator) -> np.ndarray:
    count = rng.poisson(rate * duration_s)
    return np.sort(rng.random(count) * duration_s)


def read_trace(lines: Sequence[str]) -> tuple[float, ...]:
    """Return arrival times from the lines of a file: one number of seconds each.

    Raises:
        ConfigError: If a line is no number.
    """
    times = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            times.append(float(line))
            if not math.isfinite(times[-1]):
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"line {number} of the trace is {line.strip()!r}; allowed: a time in seconds"
            ) from None
    return tuple(sorted(times))
