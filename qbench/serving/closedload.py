"""Closed-loop load on any target: N clients, each sends its next request when it has a reply."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from qbench.errors import ConfigError, MeasurementError
from qbench.serving.load import ClosedLoop
from qbench.serving.openload import OpenResult, Sent
from qbench.serving.targets import Reply, Target

_PAUSE_S = 0.05


def drive_closed(target: Target, payloads: Sequence[Any], load: ClosedLoop) -> OpenResult:
    """Load a target with clients that cycle together through ``payloads``.

    A client that waits for its reply sends nothing while a server stalls: its latencies are those
    of users who wait, and not those of users who come when they come (see ``drive_open``).

    Args:
        target: The server.
        payloads: The user's requests.
        load: Clients and times.

    Raises:
        ConfigError: If there is no payload.
        MeasurementError: If nothing was answered, or replies stay out after the end.
    """
    if not len(payloads):
        raise ConfigError("there is nothing to send: no payloads")
    return _Clients(target, payloads, load).run()


class _Clients:
    """The state of one closed loop; ``_lock`` guards it."""

    def __init__(self, target: Target, payloads: Sequence[Any], load: ClosedLoop) -> None:
        self._target, self._payloads, self._load = target, payloads, load
        self._turn = itertools.count()
        self._sent: list[Sent] = []
        self._lock = threading.Condition()
        self._active = load.clients
        self._start_s = time.perf_counter()
        self._end_s = self._start_s + load.warmup_s + load.measure_s

    def run(self) -> OpenResult:
        """Start all clients, wait for their last replies, and sum up."""
        load = self._load
        for _ in range(load.clients):
            self._send()
        time.sleep(max(self._start_s + load.warmup_s - time.perf_counter(), 0))
        cpu_s = time.process_time()
        time.sleep(max(self._end_s - time.perf_counter(), 0))
        cpu_s = time.process_time() - cpu_s
        with self._lock:
            if not self._lock.wait_for(lambda: self._active == 0, load.drain_s):
                raise MeasurementError(
                    f"{self._active} requests had no reply {load.drain_s:g} s after the load ended"
                )
        return self._result(cpu_s)

    def _send(self) -> None:
        now_s = time.perf_counter() - self._start_s
        one = Sent(now_s, now_s, warmup=now_s < self._load.warmup_s)
        with self._lock:
            self._sent.append(one)

        def settled(reply: Reply) -> None:
            ended_s = time.perf_counter()
            one.settled_s, one.status = ended_s - self._start_s, reply.status
            one.error = reply.error
            if ended_s >= self._end_s:
                self._stop()
            elif reply.status == "ok":
                self._send()
            else:  # who was turned away does not ask again at once
                threading.Timer(_PAUSE_S, self._send).start()

        self._target.send(self._payloads[next(self._turn) % len(self._payloads)], settled)

    def _stop(self) -> None:
        with self._lock:
            self._active -= 1
            self._lock.notify()

    def _result(self, cpu_s: float) -> OpenResult:
        load = self._load
        measured = [one for one in self._sent if not one.warmup]
        if not any(one.status == "ok" for one in measured):
            why = next((one.error for one in self._sent if one.error), "no reply came in that time")
            raise MeasurementError(f"nothing was answered: {why}")
        return OpenResult(
            sent=tuple(self._sent),
            offered_rps=len(measured) / load.measure_s,
            measured_s=load.measure_s,
            cpu_s=cpu_s,
            stopped="time",
            statuses=dict(Counter(one.status for one in measured)),
        )
