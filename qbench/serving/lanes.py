"""Several lanes of one thread, or one lane of several: a short calibration decides."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qbench.errors import MeasurementError
from qbench.serving.request import Encoded, Feeds, Pad, Run, token_count

_ROUNDS = 3
_MIX = 24
_CLEARLY = 1.1


@dataclass(frozen=True, slots=True)
class LaneTrial:
    """What one arrangement gave: ``requests_per_s`` is its best round of three."""

    lanes: int
    threads_per_lane: int
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class LaneChoice:
    """The arrangement chosen, and all that were tried."""

    lanes: int
    threads_per_lane: int
    trials: tuple[LaneTrial, ...]


def arrangements(cores: int) -> list[tuple[int, int]]:
    """Return (lanes, threads of each) whose product is the cores: all powers of two between."""
    found = [(cores, 1)]
    threads = 2
    while threads < cores:
        if cores % threads == 0:
            found.append((cores // threads, threads))
        threads *= 2
    return [*found, (1, cores)] if cores > 1 else found


def choose_lanes(
    open_lane: Callable[[int], Run],
    pad: Pad,
    encoded: Sequence[Encoded],
    cores: int,
    *,
    token_budget: int = 256,
    round_s: float = 0.4,
) -> LaneChoice:
    """Run the user's own requests in batches on each arrangement, in turns, and take the best.

    Args:
        open_lane: Opens a lane with so many threads.
        pad: Encoded requests to feeds.
        encoded: The user's encoded requests.
        cores: Cores to fill.
        token_budget: Padded tokens of the batches.
        round_s: Seconds of a round.

    Raises:
        MeasurementError: If the engine fails on them.
    """
    batches = mixed_batches(pad, encoded, token_budget)
    tried = arrangements(cores)
    opened = {one: [open_lane(one[1]) for _ in range(one[0])] for one in tried}
    best = dict.fromkeys(tried, 0.0)
    for round_index in range(_ROUNDS + 1):
        for one in tried:
            rate = _rate(opened[one], batches, round_s if round_index else round_s / 4)
            if round_index:  # the first round warms up
                best[one] = max(best[one], rate)
    lanes, threads = pick(best)
    trials = tuple(LaneTrial(*one, best[one]) for one in tried)
    return LaneChoice(lanes, threads, trials)


def pick(rates: Mapping[tuple[int, int], float]) -> tuple[int, int]:
    """Return the best of arrangements (lanes, threads of each), given requests a second.

    One with fewer lanes must be clearly better than the one with most: on a busy machine rounds as
    short as these scatter by more, and while a lane of all threads is handed its next batch,
    nothing runs at all.
    """
    most = max(rates)
    best = max(rates, key=lambda one: rates[one])
    return best if rates[best] > _CLEARLY * rates[most] else most


def mixed_batches(
    pad: Pad, encoded: Sequence[Encoded], token_budget: int
) -> list[tuple[Feeds, int]]:
    """Return (feeds, requests) of up to 24 batches that are spread over the user's lengths."""
    ordered = sorted(encoded, key=token_count)
    groups: list[list[Encoded]] = [[]]
    for one in ordered:
        size = len(groups[-1]) + 1
        if groups[-1] and size * max(token_count(one), 1) > token_budget:
            groups.append([])
        groups[-1].append(one)
    step = max(len(groups) // _MIX, 1)
    return [(pad(group), len(group)) for group in groups[::step]]


def _rate(runs: Sequence[Run], batches: Sequence[tuple[Feeds, int]], seconds: float) -> float:
    """Return requests a second of lanes that run at once, each through all batches in turns."""
    done, failures = [0] * len(runs), list[Exception]()
    stop_s = time.perf_counter() + seconds

    def work(index: int) -> None:
        place = index
        try:
            while time.perf_counter() < stop_s:
                feeds, count = batches[place % len(batches)]
                runs[index](feeds)
                done[index] += count
                place += 1
        except Exception as error:  # handed to the caller below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(runs))]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise MeasurementError(f"the engine failed while warming up: {failures[0]}") from failures[
            0
        ]
    return sum(done) / (time.perf_counter() - started_s)
