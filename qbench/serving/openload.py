"""Open-loop load: requests are sent when they are meant to be, whatever the server does.

A latency counts from the *intended* time. A closed loop, and a generator that waits for an
answer before it sends the next request, sends nothing while a server stalls, and so never sees
the stall (coordinated omission); here everything that was due meanwhile waited for it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qbench.errors import ConfigError, MeasurementError
from qbench.records import Estimate
from qbench.serving.arrivals import Arrivals
from qbench.serving.percentiles import percentile_interval
from qbench.serving.targets import Reply, Target

_BLOCK_S = 0.25
_LEAST_BLOCKS = 8
_CHECK_S = 0.5
_SPIN_S = 0.0001


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """How to load a server.

    Attributes:
        arrivals: The schedule.
        measure_s: Longest time to measure, after the warm-up.
        warmup_s: Seconds of the same load before; its latencies are kept and marked.
        width: Stop once the 95 % interval of ``percent`` is narrower than this share of it;
            ``None`` measures for ``measure_s``.
        percent: The percentile that ``width`` is about.
        drain_s: Longest wait for the last answers; later ones count as lost.
        seed: Seed of the schedule and of the order of requests.
    """

    arrivals: Arrivals
    measure_s: float = 10.0
    warmup_s: float = 1.0
    width: float | None = None
    percent: float = 99.0
    drain_s: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a load that measures nothing.

        Raises:
            ConfigError: If a setting is out of its range.
        """
        if not self.measure_s > 0:
            raise ConfigError(f"measure_s is {self.measure_s}; allowed: more than 0")
        if not self.warmup_s >= 0:
            raise ConfigError(f"warmup_s is {self.warmup_s}; allowed: 0 or more")
        if self.width is not None and not 0 < self.width < 1:
            raise ConfigError(f"width is {self.width}; allowed: a share between 0 and 1")


@dataclass(slots=True)
class Sent:
    """One request of an open loop; seconds after the load began, raw and never edited.

    Attributes:
        intended_s: When it was meant to be sent: latency counts from here.
        sent_s: When it really was.
        settled_s: When its reply came; ``None`` while there is none.
        status: ``ok``, ``refused``, ``failed`` or ``lost``.
        warmup: Whether it is warm-up.
        error: Why it has no answer.
    """

    intended_s: float
    sent_s: float
    settled_s: float | None = None
    status: str = "lost"
    warmup: bool = False
    error: str = ""

    @property
    def latency_s(self) -> float:
        """From the intended time to the reply; infinite where there is none."""
        return float("inf") if self.settled_s is None else self.settled_s - self.intended_s

    @property
    def lag_s(self) -> float:
        """How late the generator was: with a large lag it measured itself."""
        return self.sent_s - self.intended_s


@dataclass(frozen=True, slots=True)
class OpenResult:
    """What an open loop gave.

    Attributes:
        sent: Every request, in order of its intended time.
        offered_rps: Requests a second that were due while measuring.
        measured_s: Seconds measured.
        cpu_s: CPU time of this process meanwhile, the generator's included.
        stopped: ``time`` or ``width``.
    """

    sent: tuple[Sent, ...]
    offered_rps: float
    measured_s: float
    cpu_s: float
    stopped: str
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def measured(self) -> list[Sent]:
        """Requests after the warm-up."""
        return [one for one in self.sent if not one.warmup]

    @property
    def goodput_rps(self) -> float:
        """Answers a second of what was due while measuring."""
        return self.statuses.get("ok", 0) / self.measured_s

    @property
    def lag_p99_s(self) -> float:
        """The 99th percentile of how late the generator was."""
        return float(np.percentile([one.lag_s for one in self.measured], 99))

    def percentile(self, percent: float, level: float = 0.95) -> Estimate:
        """Return a percentile of latency of answered requests, milliseconds, with its interval.

        Raises:
            MeasurementError: If nothing was answered.
        """
        return percentile_interval(blocks_of(self.measured), percent, level=level)

    @property
    def drift(self) -> float:
        """Median latency gained from the first to the second half of answered requests, s a second.

        Where arrivals come at one rate it is about the share by which that exceeds what the
        server carries, and about 0 where it does not.
        """
        done = [one for one in self.measured if one.status == "ok"]
        if len(done) < _LEAST_BLOCKS:
            return 0.0
        halves = done[: len(done) // 2], done[len(done) // 2 :]
        (first_s, latency_s), (later_s, later_latency_s) = (
            np.median([(one.intended_s, one.latency_s) for one in half], axis=0) for half in halves
        )
        return float((later_latency_s - latency_s) / max(later_s - first_s, 1e-9))

    def within(self, limit_ms: float, *, from_sent: bool = False) -> float:
        """Return the share of all requests that were answered within a limit.

        Args:
            limit_ms: The limit.
            from_sent: Whether the generator's own lateness is left out: only to tell whose fault
                a long latency is, never to judge a server.
        """
        due, limit_s = self.measured, limit_ms / 1e3
        good = sum(
            one.status == "ok" and one.latency_s - one.lag_s * from_sent <= limit_s for one in due
        )
        return good / max(len(due), 1)


def blocks_of(sent: Sequence[Sent]) -> list[np.ndarray]:
    """Return latencies of answered requests, milliseconds, by blocks of intended time."""
    done = [(one.intended_s, one.latency_s * 1e3) for one in sent if one.status == "ok"]
    if not done:
        return []
    times, values = np.array(done).T
    span = max(float(times[-1] - times[0]), 1e-9)
    count = max(int(span / _BLOCK_S), min(_LEAST_BLOCKS, len(values)))
    index = np.minimum((times - times[0]) / span * count, count - 1).astype(int)
    return [values[index == block] for block in range(count)]


def drive_open(
    target: Target,
    payloads: Sequence[Any],
    load: OpenLoop,
    on_reply: Callable[[int, Reply], None] | None = None,
) -> OpenResult:
    """Send requests on schedule and keep every latency.

    Args:
        target: The server.
        payloads: The user's requests; they are sent in a seeded order, again and again.
        load: The schedule, how long, and when to stop.
        on_reply: Gets the index of a payload and its reply, on the thread that brings it.

    Raises:
        ConfigError: If there is no payload.
        MeasurementError: If no request was due while measuring.
    """
    if not len(payloads):
        raise ConfigError("there is nothing to send: no payloads")
    return _Drive(target, payloads, load, on_reply).run()


class _Drive:
    """The state of one open loop."""

    def __init__(
        self,
        target: Target,
        payloads: Sequence[Any],
        load: OpenLoop,
        on_reply: Callable[[int, Reply], None] | None,
    ) -> None:
        self._target, self._payloads, self._load = target, payloads, load
        self._on_reply = on_reply
        rng = np.random.default_rng(load.seed)
        self._due = load.arrivals.draw(load.warmup_s + load.measure_s, rng)
        self._order = rng.permutation(len(payloads))
        self._open, self._closed = 0, False
        self._idle = threading.Condition()
        self._sent: list[Sent] = []
        self._narrow, self._ended = threading.Event(), threading.Event()

    def run(self) -> OpenResult:
        """Send all, wait for the last reply, and sum up."""
        load, start_s = self._load, time.perf_counter()
        cpu_s, stopped, end_s = 0.0, "time", load.warmup_s + load.measure_s
        measuring = False
        if load.width is not None:
            watch = threading.Thread(target=self._watch_width, args=(load.width,), daemon=True)
            watch.start()
        for place, due_s in enumerate(self._due):
            if not measuring and due_s >= load.warmup_s:
                measuring, cpu_s = True, time.process_time()
            now_s = _wait_until(start_s + due_s) - start_s
            self._send(place, float(due_s), now_s, start_s)
            if self._narrow.is_set():
                stopped, end_s = "width", float(due_s)
                break
        self._ended.set()
        _wait_until(start_s + end_s)
        cpu_s = time.process_time() - cpu_s
        self._drain()
        return self._result(end_s - load.warmup_s, cpu_s, stopped)

    def _send(self, place: int, due_s: float, now_s: float, start_s: float) -> None:
        index = int(self._order[place % len(self._order)])
        one = Sent(due_s, now_s, warmup=due_s < self._load.warmup_s)
        self._sent.append(one)
        with self._idle:
            self._open += 1

        def settled(reply: Reply) -> None:
            settled_s = time.perf_counter() - start_s
            if self._on_reply is not None:
                self._on_reply(index, reply)
            with self._idle:
                self._open -= 1
                if self._closed:
                    return  # it came too late: the record says lost, and stays
                one.settled_s, one.status, one.error = settled_s, reply.status, reply.error
                one.sent_s += reply.waited_s
                if not self._open:
                    self._idle.notify_all()

        self._target.send(self._payloads[index], settled)

    def _watch_width(self, width: float) -> None:
        """Look at the interval now and then, on a thread that delays no request."""
        while not self._ended.wait(_CHECK_S):
            blocks = blocks_of([one for one in self._sent if not one.warmup])
            if len(blocks) < _LEAST_BLOCKS or not any(len(block) for block in blocks):
                continue
            found = percentile_interval(blocks, self._load.percent, draws=200)
            if (found.high - found.low) <= width * found.value:
                self._narrow.set()
                return

    def _drain(self) -> None:
        give_up_s = time.perf_counter() + self._load.drain_s
        with self._idle:
            while self._open and (left_s := give_up_s - time.perf_counter()) > 0:
                self._idle.wait(left_s)
            self._closed = True

    def _result(self, measured_s: float, cpu_s: float, stopped: str) -> OpenResult:
        due = [one for one in self._sent if not one.warmup]
        if not due:
            raise MeasurementError("no request was due while measuring; measure for longer")
        return OpenResult(
            sent=tuple(self._sent),
            offered_rps=len(due) / measured_s,
            measured_s=measured_s,
            cpu_s=cpu_s,
            stopped=stopped,
            statuses=dict(Counter(one.status for one in due)),
        )


def _wait_until(when_s: float) -> float:
    """Sleep until a time of ``perf_counter`` and return the time; the last part is spun."""
    while (left_s := when_s - time.perf_counter()) > 0:
        time.sleep(left_s - _SPIN_S if left_s > _SPIN_S else 0)
    return time.perf_counter()
