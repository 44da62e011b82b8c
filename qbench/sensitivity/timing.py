"""Paired latency of changed segments: both sides in turns on the same batches."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from qbench.backends import BACKENDS
from qbench.records import Estimate
from qbench.runtime.ort import Session
from qbench.sensitivity.replay import ChangedSegments, Replay
from qbench.statistics import median_interval
from qbench.tasks.batches import Batch

#: Batches of a latency pair, and interleaved repeats of each side.
TIMED_BATCHES, REPEATS = 8, 3
#: The change of a cell that cannot be timed where it runs: none that a plan could count on.
NOT_TIMED = Estimate(0.0, 0.0, 0.0, 0, method="not measured")


def paired_latency(
    replay: Replay,
    changed: ChangedSegments,
    batches: int = TIMED_BATCHES,
    repeats: int = REPEATS,
) -> Estimate:
    """Return the change of the changed segments' time a batch, from interleaved pairs, in ms.

    Of each side the fastest of a few repeats counts: on a busy machine noise only ever adds. The
    sides take turns in going first. Where another backend runs the graphs in this one's place
    nothing is timed: its speed says nothing of this one's.
    """
    if BACKENDS[replay.settings.backend].stand_in:
        return NOT_TIMED
    deltas: list[float] = []
    for batch in spread_batches(replay.batches, batches):
        delta = 0.0
        for index, session in changed.sessions.items():
            best = {True: np.inf, False: np.inf}
            for repeat in range(repeats):
                for is_changed in (True, False) if repeat % 2 else (False, True):
                    seconds = _timed(replay, index, batch, session if is_changed else None)
                    best[is_changed] = min(best[is_changed], seconds)
            delta += best[True] - best[False]
        deltas.append(delta * 1e3)
    return median_interval(deltas)


def timing_replay(replay: Replay, batches: Sequence[Batch]) -> Replay | None:
    """Return a replay of the batches that times are measured on, its reference run.

    Args:
        replay: The replay of the task's batches, over the same cuts.
        batches: The batches to time; ``None`` is returned where there are none.
    """
    if not batches:
        return None
    timing = replay.beside(batches, replay.output, replay.settings.threads)
    timing.run_reference()
    return timing


def _timed(replay: Replay, index: int, batch: int, session: Session | None) -> float:
    started = time.perf_counter()
    replay.run_segment(index, batch, session)
    return time.perf_counter() - started


def spread_batches(batches: Sequence[object], most: int) -> list[int]:
    """Return at most so many batches, evenly spread over the lengths."""
    count = min(most, len(batches))
    return sorted({int(i) for i in np.linspace(0, len(batches) - 1, count)})
