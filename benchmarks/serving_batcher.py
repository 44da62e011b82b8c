"""Engine and batcher without a server: answers of direct runs, rates, ceiling, and overhead."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from qbench.serving.arrivals import Arrivals
from qbench.serving.bench import Engine, Workload
from qbench.serving.decisions import Accept, BatchLimits
from qbench.serving.flights import LoopOptions
from qbench.serving.load import ClosedLoop, drive
from qbench.serving.opening import Opened
from qbench.serving.openload import OpenLoop, drive_open
from qbench.serving.pool import pools_for
from qbench.serving.request import Done, Encoded, Feeds, Pad, Run, Work, token_count
from qbench.serving.service import Request, Service
from qbench.serving.targets import ServiceTarget

BUDGETS = (64, 128, 256, 512)


def sorted_batches(pad: Pad, encoded: Sequence[Encoded], budget: int) -> list[tuple[Feeds, int]]:
    """Return (feeds, requests) of all requests, sorted, in batches under a budget of tokens."""
    groups: list[list[Encoded]] = [[]]
    for one in sorted(encoded, key=token_count):
        if groups[-1] and (len(groups[-1]) + 1) * token_count(one) > budget:
            groups.append([])
        groups[-1].append(one)
    return [(pad(group), len(group)) for group in groups]


def composition_spread(
    run: Run, pad: Pad, encoded: Sequence[Encoded], seed: int = 0
) -> tuple[np.ndarray, float]:
    """Return the vectors of requests that run alone, and how far apart compositions can be.

    The spread is the largest difference of one request's vector between any two of its runs:
    alone, and in batches of 2 to 16 drawn at random.
    """
    rng = np.random.default_rng(seed)

    def vectors(places: Sequence[int]) -> np.ndarray:
        return np.array(next(iter(run(pad([encoded[place] for place in places])).values())))

    alone = np.concatenate([vectors([place]) for place in range(len(encoded))])
    low, high = alone.copy(), alone.copy()
    for size in (2, 3, 4, 8, 16):
        for _ in range(4):
            order = rng.permutation(len(encoded))
            for begin in range(0, len(order), size):
                part = order[begin : begin + size]
                found = vectors(part.tolist())
                low[part], high[part] = (
                    np.minimum(low[part], found),
                    np.maximum(high[part], found),
                )
    return alone, float((high - low).max())


class Offline:
    """The engine's ceiling: the same requests sorted, in batches, on all lanes, no server.

    Args:
        engine: The engine.
        workload: The requests.
        lanes: Lanes and threads of each.
    """

    def __init__(self, engine: Engine, workload: Workload, lanes: tuple[int, int]) -> None:
        encoded = workload.encoded()
        self._runs = [engine.open_lane(lanes[1]) for _ in range(lanes[0])]
        rng = np.random.default_rng(0)
        # NOTE: batches run in a shuffled order, and each slice goes on where the last one stopped:
        # a short slice from the beginning would run the shortest requests alone.
        self._batches = {}
        for budget in BUDGETS:
            batches = sorted_batches(workload.pad, encoded, budget)
            self._batches[budget] = [batches[place] for place in rng.permutation(len(batches))]
        self._turns = {budget: itertools.count() for budget in BUDGETS}
        self.budget = BUDGETS[0]

    def tune(self, seconds: float) -> None:
        """Take the best budget."""
        self.budget = max(BUDGETS, key=lambda budget: self.rate(seconds, budget))

    def rate(self, seconds: float, budget: int | None = None) -> float:
        """Return requests a second; the lanes share the batches, of which each runs as often."""
        budget = budget or self.budget
        batches, turn, done = self._batches[budget], self._turns[budget], [0] * len(self._runs)
        started_s = time.perf_counter()

        def work(lane: int) -> None:
            while (time.perf_counter() - started_s) < seconds:
                feeds, count = batches[next(turn) % len(batches)]
                self._runs[lane](feeds)
                done[lane] += count

        threads = [threading.Thread(target=work, args=(lane,)) for lane in range(len(done))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(done) / (time.perf_counter() - started_s)


class Futures:
    """A service as the closed loop drives it: by its futures, as a server would."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def submit(self, payload: Any, done: Done) -> Accept:
        """Hand a request in."""
        future = self._service.submit(Request(payload))
        future.add_done_callback(lambda one: done(one.result()))
        return Accept(0)


def batcher_rate(service: Service, encoded: Sequence[Encoded], load: ClosedLoop) -> float:
    """Return requests a second of the batcher under a closed loop."""
    result = drive(Futures(service), encoded, load)
    answered = (one.times.answered_s for one in result.served)
    count = sum(result.measured_from_s <= at_s < result.end_s for at_s in answered)
    return count / (result.end_s - result.measured_from_s)


def overhead_us(engine: Engine, workload: Workload, clients: int, tries: int = 5) -> float:
    """Return CPU microseconds a request of the batcher and its client; the engine costs nothing.

    The least of some tries: whatever else runs on a machine only adds to it.
    """
    encoded = workload.encoded()
    zeros = np.zeros((256, 8), np.float32)
    name = engine.inputs[0].name
    pads = pools_for(engine.inputs, workload.pad, encoded, 1024, 0)
    found = []
    for _ in range(tries):
        lanes = [lambda feeds: {"y": zeros[: len(feeds[name])]}]
        with Service(lanes, Work(workload.pad), BatchLimits(), LoopOptions(pads=pads)) as service:
            result = drive(Futures(service), encoded, ClosedLoop(clients, 0.5, 0.1))
        answered = [one.times.answered_s for one in result.served]
        count = sum(result.measured_from_s <= at_s < result.end_s for at_s in answered)
        found.append(result.cpu_s / count * 1e6)
    return min(found)


def at_70(
    opened: Opened, encoded: Sequence[Encoded], rate: float, seconds: float
) -> dict[str, float]:
    """Return latencies of the batcher at 70 % of a rate, and the bound that they should keep.

    The bound is the longest wait and twice the longest batch that the budget allows, by the cost
    model that the batcher learnt under this load.
    """
    load = OpenLoop(Arrivals(0.7 * rate), seconds, 1.0)
    result = drive_open(ServiceTarget(opened.service), encoded, load)
    measured = [1e3 * one.latency_s for one in result.measured]
    loop = opened.service.loop
    model, budget = loop.model(), loop.batcher.limits.token_budget
    lengths = {token_count(one) for one in encoded}
    worst_ms = 1e3 * max(model.predict(max(budget // n, 1), n) for n in lengths)
    wait_ms = loop.batcher.limits.max_wait_s * 1e3
    return {
        "offered_rps": result.offered_rps,
        "p50_ms": float(np.percentile(measured, 50)),
        "p99_ms": float(np.percentile(measured, 99)),
        "batch_ms": worst_ms,
        "bound_ms": wait_ms + 2 * worst_ms,
    }
