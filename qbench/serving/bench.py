"""The benchmark: every engine under the same load in one interleaved run."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qbench.errors import ConfigError, MeasurementError
from qbench.graph.model import TensorSpec
from qbench.records import BenchRun, RequestLatency, to_dict
from qbench.runtime.ort import Session
from qbench.serving.batcher import BatchLimits
from qbench.serving.budget import BudgetChoice, calibrate_budget
from qbench.serving.load import ClosedLoop, draw_order, drive, latencies
from qbench.serving.loop import ServingLoop
from qbench.serving.request import Decode, Encode, Encoded, Pad, Run, Work, first_rows, token_count
from qbench.serving.summary import Slice, describe_lengths, narrow_enough, summarise

_PRIME_RUNS = 3
_LEAST_ROUNDS = 2  # for an interval


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine to serve.

    Attributes:
        name: Its name in records.
        open_lane: Opens a lane with that many threads and returns what runs a batch on it.
        open_session: Opens a session of ONNX Runtime with that many threads, where the engine
            is one; lanes can then keep their outputs in buffers of their own.
        inputs: Inputs of its graph, where they are known; lanes then pad into such buffers too.
    """

    name: str
    open_lane: Callable[[int], Run]
    open_session: Callable[[int], Session] | None = None
    inputs: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """The user's requests and what surrounds the engine.

    Attributes:
        requests: Texts (or whatever ``encode`` takes), or encoded requests.
        pad: Encoded requests to one batch of feeds.
        encode: Requests to encoded ones; ``None`` where they are encoded already.
        decode: Outputs and batch size to one answer a request.
    """

    requests: Sequence[Any]
    pad: Pad
    encode: Encode | None = None
    decode: Decode = first_rows

    def encoded(self) -> list[Encoded]:
        """Return every request encoded."""
        return list(self.requests if self.encode is None else self.encode(self.requests))


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How to measure; everything here is recorded in the conditions.

    Attributes:
        clients: Clients of the closed loop.
        rounds: Most slices of each engine; intervals are over them.
        enough: From three rounds on no further one begins once the interval of every engine's
            ratio is no wider than so much to either side, as a share of it; 0 for all rounds.
        seconds: Measured seconds of a slice.
        warmup_s: Seconds of load before each slice is measured.
        token_budget: Padded tokens of a batch; ``None`` calibrates it on the reference.
        max_wait_ms: Longest wait for a fuller batch.
        queue: Most requests in the queue.
        max_padding: Largest share of padding in a batch.
        max_batch: Most requests of a batch, or ``None``.
        fixed_size: Batches of so many requests in order of arrival instead, or ``None``.
        threads_per_lane: Threads of each lane.
        lanes: Lanes; ``None`` for as many as the cores carry.
        seed: Seed of the order of requests and engines.
    """

    clients: int = 16
    rounds: int = 6
    enough: float = 0.0
    seconds: float = 2.0
    warmup_s: float = 0.3
    token_budget: int | None = 256
    max_wait_ms: float = 5.0
    queue: int = 256
    max_padding: float = 0.2
    max_batch: int | None = None
    fixed_size: int | None = None
    threads_per_lane: int = 1
    lanes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that measure nothing.

        Raises:
            ConfigError: If a setting is out of its range.
        """
        if self.rounds < _LEAST_ROUNDS:
            raise ConfigError(f"rounds is {self.rounds}; allowed: 2 or more (for an interval)")
        if not 0 <= self.enough <= 1:
            raise ConfigError(f"enough is {self.enough}; allowed: a share from 0 to 1")
        if self.threads_per_lane < 1:
            raise ConfigError(f"threads_per_lane is {self.threads_per_lane}; allowed: 1 or more")
        self.limits(self.token_budget if self.token_budget is not None else 1)
        self.load()

    @property
    def lane_count(self) -> int:
        """Lanes: as asked for, else so that lanes times threads are the cores."""
        return self.lanes if self.lanes is not None else max(cores() // self.threads_per_lane, 1)

    def limits(self, token_budget: int) -> BatchLimits:
        """Return the batcher's limits under a budget."""
        return BatchLimits(
            token_budget=token_budget,
            max_wait_s=self.max_wait_ms / 1e3,
            queue=self.queue,
            max_padding=self.max_padding,
            max_batch=self.max_batch,
            fixed_size=self.fixed_size,
            lanes=self.lane_count,
        )

    def load(self) -> ClosedLoop:
        """Return the load of one slice."""
        return ClosedLoop(self.clients, self.seconds, self.warmup_s)


def cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def bench(
    engines: Sequence[Engine],
    workload: Workload,
    settings: BenchSettings,
    *,
    conditions: Mapping[str, Any] | None = None,
    on_slice: Callable[[int, int], None] | None = None,
    on_stopped: Callable[[BenchRun], None] | None = None,
) -> BenchRun:
    """Measure engines under closed-loop load; the first one is the reference.

    In each round every engine has one slice, in a seeded order that changes from round to
    round; all slices of a round send the requests in the same order. Ratios are paired within
    rounds, so that a machine that slows down for a while slows all engines.

    Args:
        engines: The engines, the reference first.
        workload: The user's requests and how to encode, pad and decode.
        settings: How to measure.
        conditions: What else to record: model, machine, versions.
        on_slice: Called after each slice with slices done and slices in all.
        on_stopped: Gets what whole rounds gave where the user stops the benchmark, if two did.

    Raises:
        ConfigError: If there are no engines, no requests, or two engines of one name.
        MeasurementError: If a request fails or a slice is too short to hold an answer.
    """
    names = _check_names(engines, workload)
    encoded = workload.encoded()
    lanes = {engine.name: _open_lanes(engine, settings) for engine in engines}
    for runs in lanes.values():
        _prime(runs, workload.pad, encoded)
    budget = _find_budget(settings, lanes[names[0]][0], workload.pad, encoded)
    measured = _Measured(time.perf_counter(), [], [], {name: Counter() for name in names})
    known = {**(conditions or {}), **_describe(settings, encoded, budget), "engines": names}
    try:
        for done, (round_index, name) in enumerate(_schedule(names, settings), start=1):
            limits = settings.limits(budget.token_budget)
            _run_slice(measured, (name, round_index), lanes[name], workload, (limits, settings))
            if on_slice is not None:
                on_slice(done, settings.rounds * len(names))
            if done % len(names) == 0 and narrow_enough(
                measured.latencies, measured.slices, names, settings.enough
            ):
                break
    except KeyboardInterrupt:
        rounds = len(measured.slices) // len(names)
        if on_stopped is not None and rounds >= _LEAST_ROUNDS:
            on_stopped(_sum_up(measured.first(rounds), names, known))
        raise
    return _sum_up(measured, names, known)


def _sum_up(measured: _Measured, names: Sequence[str], known: Mapping[str, Any]) -> BenchRun:
    return BenchRun(
        conditions={
            **known,
            "dispatches": {name: dict(count) for name, count in measured.dispatches.items()},
            "slices": [to_dict(piece) for piece in measured.slices],
        },
        latencies=tuple(measured.latencies),
        summaries=summarise(measured.latencies, measured.slices, names),
    )


def _check_names(engines: Sequence[Engine], workload: Workload) -> list[str]:
    """Return the names of the engines once there is something to measure."""
    names = [engine.name for engine in engines]
    if not names or len(set(names)) < len(names) or not len(workload.requests):
        raise ConfigError(
            f"a benchmark needs engines of different names and requests to send, "
            f"got engines {names} and {len(workload.requests)} requests"
        )
    return names


def _open_lanes(engine: Engine, settings: BenchSettings) -> list[Run]:
    return [engine.open_lane(settings.threads_per_lane) for _ in range(settings.lane_count)]


@dataclass(frozen=True, slots=True)
class _Measured:
    """What the slices gave so far."""

    origin_s: float
    latencies: list[RequestLatency]
    slices: list[Slice]
    dispatches: dict[str, Counter[str]]

    def first(self, rounds: int) -> _Measured:
        """Return what the first rounds gave."""
        return replace(
            self,
            latencies=[one for one in self.latencies if one.round < rounds],
            slices=[piece for piece in self.slices if piece.round < rounds],
        )


def _schedule(names: Sequence[str], settings: BenchSettings) -> Iterator[tuple[int, str]]:
    """Yield (round, engine): each engine once a round, in a seeded order."""
    rng = np.random.default_rng(settings.seed)
    for round_index in range(settings.rounds):
        for index in rng.permutation(len(names)):
            yield round_index, names[index]


def _run_slice(
    measured: _Measured,
    label: tuple[str, int],
    runs: Sequence[Run],
    workload: Workload,
    how: tuple[BatchLimits, BenchSettings],
) -> None:
    """Load one engine for one slice and add what it gave."""
    (name, round_index), (limits, settings) = label, how
    rng = np.random.default_rng((settings.seed, round_index))
    payloads = [workload.requests[i] for i in draw_order(len(workload.requests), rng)]
    work = Work(workload.pad, workload.encode, workload.decode)
    try:
        with _quiet_collector(), ServingLoop(runs, work, limits) as loop:
            result = drive(loop, payloads, settings.load())
    except MeasurementError as error:
        raise MeasurementError(f"engine {name!r}, round {round_index}: {error}") from error
    measured.latencies.extend(latencies(result, name, round_index, measured.origin_s))
    measured.dispatches[name].update(loop.dispatches)
    measured.slices.append(
        Slice(
            engine=name,
            round=round_index,
            measured_from_s=result.measured_from_s - measured.origin_s,
            end_s=result.end_s - measured.origin_s,
            cpu_s=result.cpu_s,
            rejected=result.rejected,
        )
    )


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keep what lives already out of the garbage collector's passes during a slice."""
    freeze = gc.get_freeze_count() == 0
    gc.collect()
    if freeze:
        gc.freeze()
    try:
        yield
    finally:
        if freeze:
            gc.unfreeze()


def _prime(runs: Sequence[Run], pad: Pad, encoded: Sequence[Encoded]) -> None:
    """Run each lane on the shortest, a middle and the longest request before any load."""
    by_length = sorted(encoded, key=token_count)
    shapes = [pad([by_length[index]]) for index in (0, len(by_length) // 2, -1)]
    for run in runs:
        for feeds in shapes * _PRIME_RUNS:
            run(feeds)


def _find_budget(
    settings: BenchSettings, run: Run, pad: Pad, encoded: Sequence[Encoded]
) -> BudgetChoice:
    """Return the given budget, or the one that suits the reference on this machine."""
    if settings.token_budget is not None:
        return BudgetChoice(settings.token_budget, {}, ())
    return calibrate_budget(run, pad, encoded)


def _describe(
    settings: BenchSettings, encoded: Sequence[Encoded], budget: BudgetChoice
) -> dict[str, Any]:
    """Return the conditions that the benchmark itself knows."""
    resolved = replace(settings, lanes=settings.lane_count, token_budget=budget.token_budget)
    return {
        **to_dict(resolved),
        "load": "closed loop",
        "cores": cores(),
        "lengths": describe_lengths([token_count(one) for one in encoded]),
        "token_budget_from": "settings" if settings.token_budget is not None else "calibration",
        "token_budget_grid": to_dict(budget),
    }
