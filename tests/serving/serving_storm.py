"""A process that serves a hundred thousand requests with every fault at once, until SIGTERM.

It prints a line when all were sent and goes on sending; then, once it has drained, what each
request got, as JSON. ``python serving_storm.py`` needs the tests' folder on the path.
"""

from __future__ import annotations

import itertools
import json
import logging
import signal
import sys
import threading
import time
from collections import Counter

import numpy as np
from serving_fakes import answer_of, encode, pad, texts

from qbench.serving.batcher import BatchLimits, Priority
from qbench.serving.flights import LoopOptions
from qbench.serving.gates import BreakerRules
from qbench.serving.request import Work
from qbench.serving.service import Gates, Request, Service

COUNT, CLIENTS, BURST = 100_000, 4, range(40_000, 60_000)
HANGS = (400, 2000, 5000)  # runs of the engine that do not come back in time


class Clock:
    """A clock that steps an hour ahead and back again, and once more back."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.offset_s


class Engine:
    """Raises on ``z`` and now and then, gives NaN for ``y``, and hangs."""

    def __init__(self) -> None:
        self.runs, self.end = itertools.count(1), threading.Event()

    def __call__(self, feeds):
        number = next(self.runs)
        if number in HANGS:
            self.end.wait(20)
        if (feeds["ids"] == ord("z")).any():
            raise ValueError("poison")
        if number % 29 == 0:
            raise OSError("device lost")
        sums = feeds["ids"].sum(axis=1).astype(np.float64)
        sums[(feeds["ids"] == ord("y")).any(axis=1)] = np.nan
        return {"sum": sums}


class Storm:
    """The clients: each sends its part of the requests, and then goes on until it is told."""

    def __init__(self, service: Service, clock: Clock) -> None:
        self.service, self.clock, self.stop = service, clock, threading.Event()
        rng = np.random.default_rng(3)
        self.texts = texts(COUNT // 50, seed=9) * 50
        for index in rng.choice(COUNT, COUNT // 100, replace=False):
            self.texts[index] = self.texts[index][:-1] + "yz"[index % 2]
        self.serials = itertools.count()
        self.sent: list[tuple[str, object]] = []

    def send(self) -> None:
        while not self.stop.is_set():
            serial = next(self.serials)
            if serial == COUNT + CLIENTS:
                print("sent", flush=True)
            future = self.one(serial)
            if serial not in BURST and (serial % 50 == 0 or future.done()):
                time.sleep(0.002)

    def one(self, serial: int):
        if serial % 7000 == 0:
            self.clock.offset_s = (0.0, 3600.0, -3600.0)[serial // 7000 % 3]
        text, tenant = self.texts[serial % COUNT], f"tenant-{serial % 3}"
        timeout_s = 0.05 if serial % 11 == 0 else None
        future = self.service.submit(Request(text, tenant, Priority(serial % 2), timeout_s))
        self.sent.append((text, future))
        if serial % 23 == 0:
            future.cancel()  # the client went away
        return future


def kind_of(text: str, future) -> str:
    """Return what became of a request; anything that is not right is named ``wrong``."""
    if not future.done():
        return "lost"
    if future.cancelled():
        return "cancelled"
    error = future.exception()
    if error is None:
        return "right" if future.result().value == answer_of(text) else "wrong"
    kind = type(error).__name__
    return kind if {"ValueError": "z", "NotANumberError": "y"}.get(kind, "") in text else "wrong"


class Complaints(logging.Handler):
    """Keeps what was logged of callbacks: a second answer to a request makes one raise."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    sys.setswitchinterval(0.0005)
    complaints, clock, engine = Complaints(), Clock(), Engine()
    logging.getLogger().addHandler(complaints)
    limits = BatchLimits(token_budget=128, queue=512, max_wait_s=0.002, odd_lane=True)
    options = LoopOptions(encoders=2, hang_s=0.4, clock=clock)
    gates = Gates(breaker=BreakerRules(refused_share=1.0, failed_share=1.0))
    service = Service([engine, engine], Work(pad, encode), limits, options, gates)
    storm = Storm(service, clock)
    signal.signal(signal.SIGTERM, lambda *_: storm.stop.set())
    clients = [threading.Thread(target=storm.send) for _ in range(CLIENTS)]
    for one in clients:
        one.start()
    storm.stop.wait(120)
    drained = service.drain(30.0)
    for one in clients:
        one.join(30)
    engine.end.set()
    late = service.submit(Request("abc"))
    found = {
        "kinds": Counter(itertools.starmap(kind_of, storm.sent)),
        "late": type(late.exception(0)).__name__,
        "drained": drained,
        "counts": service.stats().counts,
        "queued": service.stats().queued,
        "complaints": [one for one in complaints.lines if "callback" in one],
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
