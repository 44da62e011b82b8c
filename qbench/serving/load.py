"""Closed-loop load: N clients, each of which sends its next request when it has an answer.

A client is a callback, not a thread: the lane that answers a request starts the client's next
one, so the load costs a few microseconds a request. The calling thread only keeps the time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from qbench.errors import ConfigError, MeasurementError
from qbench.records import RequestLatency
from qbench.serving.batcher import Accept, Refuse
from qbench.serving.request import Answer, Done, Times

_DRAIN_S = 60.0


class Server(Protocol):
    """What a load generator needs of a server."""

    def submit(self, payload: Any, done: Done) -> Accept | Refuse:
        """Hand a request in; ``done`` gets its answer if it is accepted."""
        ...


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """How to load a server.

    Attributes:
        clients: Requests that are on their way at any time.
        measure_s: Seconds measured, after the warm-up.
        warmup_s: Seconds of the same load before; its latencies are kept and marked.
        drain_s: Longest wait for the last answers, seconds.
    """

    clients: int = 16
    measure_s: float = 2.0
    warmup_s: float = 0.3
    drain_s: float = _DRAIN_S

    def __post_init__(self) -> None:
        """Refuse a load that measures nothing.

        Raises:
            ConfigError: If a setting is out of its range.
        """
        if self.clients < 1:
            raise ConfigError(f"clients is {self.clients}; allowed: 1 or more")
        if not self.measure_s > 0:
            raise ConfigError(f"seconds is {self.measure_s}; allowed: more than 0")
        if not self.warmup_s >= 0:
            raise ConfigError(f"warmup_s is {self.warmup_s}; allowed: 0 or more")


@dataclass(frozen=True, slots=True)
class Served:
    """One answered request as the load saw it; no outputs are kept."""

    times: Times
    batch_size: int
    tokens: int
    padded_tokens: int


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What one stretch of load gave; times are ``time.perf_counter``, seconds.

    Attributes:
        served: Every answered request, in order of its answer, warm-up and drain too.
        measured_from_s: When measuring began.
        end_s: When measuring ended and no client sent a new request.
        cpu_s: CPU time of the whole process while measuring, clients included.
        rejected: Requests refused while measuring because the queue was full.
    """

    served: tuple[Served, ...]
    measured_from_s: float
    end_s: float
    cpu_s: float
    rejected: int


def draw_order(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return a seeded order [count] in which the user's ``count`` requests are sent."""
    return rng.permutation(count)


def drive(server: Server, payloads: Sequence[Any], load: ClosedLoop) -> LoadResult:
    """Load a server with clients that cycle together through ``payloads``.

    A refused client asks again after the server's retry hint; each refusal is counted.

    Raises:
        MeasurementError: If a request fails, the server closes, or answers stay out for more
            than ``drain_s`` seconds after the end.
    """
    return _Drive(server, payloads, load).run()


class _Drive:
    """The state of one closed loop; ``_wake`` guards it."""

    def __init__(self, server: Server, payloads: Sequence[Any], load: ClosedLoop) -> None:
        self._server, self._payloads, self._load = server, payloads, load
        self._next = itertools.count()
        self._wake = threading.Condition()
        self._served: list[Served] = []
        self._retries: list[float] = []
        self._failure: Exception | None = None
        self._active = load.clients
        self._refusals: list[float] = []
        self._measured_from_s = time.perf_counter() + load.warmup_s
        self._end_s = (
            math.inf
        )  # a busy machine may begin to measure late: the slice keeps its length

    def run(self) -> LoadResult:
        """Start all clients, keep the time and wait for the last answer."""
        for _ in range(self._load.clients):
            self._send()
        self._keep_time(self._measured_from_s)
        cpu_start_s, from_s = time.process_time(), time.perf_counter()
        self._end_s = from_s + self._load.measure_s
        self._keep_time(self._end_s)
        cpu_s, end_s = time.process_time() - cpu_start_s, time.perf_counter()
        self._drain()
        if self._failure is not None:
            raise MeasurementError(
                f"a request failed under load: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure
        rejected = sum(from_s <= refused_s < end_s for refused_s in self._refusals)
        return LoadResult(tuple(self._served), from_s, end_s, cpu_s, rejected)

    def _send(self) -> None:
        """Send one client's next request."""
        payload = self._payloads[next(self._next) % len(self._payloads)]
        decision = self._server.submit(payload, self._receive)
        if isinstance(decision, Accept):
            return
        now_s = time.perf_counter()
        with self._wake:
            self._refusals.append(now_s)
            if decision.retry_after_s is None:
                self._stop(MeasurementError(f"the server refused: {decision.reason}"))
            else:
                heapq.heappush(self._retries, now_s + decision.retry_after_s)
                self._wake.notify()

    def _receive(self, answer: Answer) -> None:
        """Take an answer and go on, or stop at the end."""
        if answer.error is not None or answer.times is None:
            with self._wake:
                self._stop(answer.error or MeasurementError("an answer came without its times"))
            return
        self._served.append(
            Served(answer.times, answer.batch_size, answer.tokens, answer.padded_tokens)
        )
        if self._failure is None and time.perf_counter() < self._end_s:
            self._send()
        else:
            with self._wake:
                self._stop(None)

    def _stop(self, failure: Exception | None) -> None:
        """End one client; the lock is held."""
        self._active -= 1
        self._failure = self._failure or failure
        self._wake.notify()

    def _keep_time(self, until_s: float) -> None:
        """Wait until ``until_s``, or a failure, and send what refused clients try again."""
        while (now_s := time.perf_counter()) < until_s:
            with self._wake:
                if self._failure is not None:
                    return
                due = bool(self._retries) and self._retries[0] <= now_s
                if due:
                    heapq.heappop(self._retries)
                else:
                    next_s = min(self._retries[0], until_s) if self._retries else until_s
                    self._wake.wait(next_s - now_s)
            if due:
                self._send()

    def _drain(self) -> None:
        """Wait for the last answers; clients that wait for a retry simply stop."""
        give_up_s = time.perf_counter() + self._load.drain_s
        with self._wake:
            while self._active > len(self._retries):
                left_s = give_up_s - time.perf_counter()
                if left_s <= 0:
                    raise MeasurementError(
                        f"{self._active - len(self._retries)} requests had no answer "
                        f"{self._load.drain_s:g} s after the load ended; does the engine hang?"
                    )
                self._wake.wait(left_s)


def latencies(
    result: LoadResult, engine: str, round_index: int, origin_s: float
) -> list[RequestLatency]:
    """Return the raw latencies of a load; what was sent before measuring began is warm-up.

    Args:
        result: What the load gave.
        engine: Name of the engine.
        round_index: Index of the interleaved slice.
        origin_s: The ``perf_counter`` second at which the benchmark began.
    """
    return [
        RequestLatency(
            engine=engine,
            round=round_index,
            start_s=one.times.submitted_s - origin_s,
            queue_ms=one.times.queue_s * 1e3,
            preprocess_ms=one.times.preprocess_s * 1e3,
            inference_ms=one.times.inference_s * 1e3,
            postprocess_ms=one.times.postprocess_s * 1e3,
            total_ms=one.times.total_s * 1e3,
            batch_size=one.batch_size,
            tokens=one.tokens,
            padded_tokens=one.padded_tokens,
            formation_ms=one.times.formation_s * 1e3,
            warmup=one.times.submitted_s < result.measured_from_s,
        )
        for one in result.served
    ]
