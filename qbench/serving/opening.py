"""Opening a service: lanes and budget chosen by short calibrations, all warm before it is ready."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from qbench.records import to_dict
from qbench.runtime.ort import CUDA_PROVIDER
from qbench.serving.bench import Engine, Workload, cores
from qbench.serving.budget import calibrate_budget
from qbench.serving.cost import BatchCost, BatchMemory, Point, fit_memory
from qbench.serving.cuda import Cuda, find_cuda
from qbench.serving.decisions import BatchLimits
from qbench.serving.estimator import Demand, Sizing, largest_within_memory, size_batches
from qbench.serving.flights import LoopOptions
from qbench.serving.lanes import LaneChoice, choose_lanes
from qbench.serving.memory import MemoryUse, device_memory, process_memory
from qbench.serving.pool import BoundRun, StreamedRun, pools_for
from qbench.serving.request import Decode, Encoded, Pad, Run, Work, token_count
from qbench.serving.service import Gates, Service

_LOG = logging.getLogger(__name__)
_WARM_RUNS = 10
_LEAST_SHAPES = 3
_DEVICE_LANES = 4
_LARGEST = (64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """How to serve.

    Attributes:
        lanes: Lanes; ``None`` lets a calibration choose lanes and threads.
        threads_per_lane: Threads of each; with ``lanes`` given, 1 by default.
        token_budget: Padded tokens of a batch; ``None`` lets the estimator choose.
        max_wait_ms: Longest wait for a fuller batch.
        queue: Most requests in the queue.
        max_padding: Largest share of padding in a batch.
        max_batch: Most requests of a batch, or ``None``.
        fixed_size: Batches of so many requests in place of the token budget, or ``None``.
        sla_ms: Limit of the 99th percentile of latency, or ``None``.
        encoders: Threads that encode.
        hang_s: Seconds after which a batch that has not come back is given up.
        ageing_s: Seconds after which a waiting ``batch`` request counts as ``interactive``.
        weights: Share of each tenant.
        memory_limit: Memory that the process may hold, bytes; ``None`` for what the machine
            or its control group allows.
        pad_id: Token id of padded positions, for the lanes' buffers.
    """

    lanes: int | None = None
    threads_per_lane: int | None = None
    token_budget: int | None = None
    max_wait_ms: float = 5.0
    queue: int = 256
    max_padding: float = 0.2
    max_batch: int | None = None
    fixed_size: int | None = None
    sla_ms: float | None = None
    encoders: int = 1
    hang_s: float = 30.0
    ageing_s: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)
    memory_limit: int | None = None
    pad_id: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """A service that is ready, and what was chosen for it.

    Attributes:
        service: It serves already.
        lanes: Lanes and threads, with the trials.
        sizing: The token budget and what is expected of it; ``None`` where it was given.
        points: Batches measured at warm-up.
        memory: Memory when it was ready.
        batch_memory: What a batch needs beside that.
        pooled: Whether lanes pad into buffers of their own.
    """

    service: Service
    lanes: LaneChoice
    sizing: Sizing | None
    points: tuple[Point, ...]
    memory: MemoryUse
    batch_memory: BatchMemory
    pooled: bool

    def describe(self) -> dict[str, Any]:
        """Return the choices as plain values."""
        return {
            "lanes": to_dict(self.lanes),
            "sizing": None if self.sizing is None else to_dict(self.sizing),
            "limits": to_dict(self.service.loop.batcher.limits),
            "memory": to_dict(self.memory),
            "batch_memory": to_dict(self.batch_memory),
            "pooled": self.pooled,
        }


def open_service(
    engine: Engine,
    workload: Workload,
    settings: ServeSettings,
    gates: Gates | None = None,
    memory: BatchMemory | None = None,
) -> Opened:
    """Open an engine's lanes, warm them, choose what was not given, and serve.

    Args:
        engine: The engine.
        workload: Some of the user's requests, and how to encode, pad and decode.
        settings: How to serve.
        gates: Breaker, fallback and memory gate; the limit of memory is watched by default.
        memory: What a batch needs; measured on the first lane by default.

    Raises:
        ConfigError: If a setting is out of its range.
        MeasurementError: If the engine fails on the user's own requests.
    """
    encoded = workload.encoded()
    chosen, cuda, open_run, runs = _open_lanes(engine, workload.pad, encoded, settings)
    read = memory_reader(cuda, settings.memory_limit)
    largest = largest_batch(settings, encoded)
    memory = memory or measure_memory(runs[0], workload.pad, encoded, lambda: read().used, largest)
    points, most = _measure(runs[0], workload.pad, encoded, largest)
    demand = Demand(
        tuple(token_count(one) for one in encoded),
        chosen.lanes,
        settings.max_wait_ms / 1e3,
        None if settings.sla_ms is None else settings.sla_ms / 1e3,
        most,
        largest.rows,
        memory,
        read().free,
    )
    model = BatchCost(points)
    sizing = size_batches(model, demand) if settings.token_budget is None else None
    limits = _limits(_within_memory(settings, demand), chosen.lanes, sizing)
    held = gates or Gates()
    every = [*runs, *held.fallback]
    warm(every, workload.pad, encoded, replace(largest, tokens=limits.token_budget))
    longest = max(token_count(one) for one in encoded)
    pads = pools_for(
        engine.inputs,
        workload.pad,
        encoded,
        max(limits.token_budget, longest),
        settings.pad_id,
        np.empty if cuda is None else cuda.page_locked,
    )
    options = LoopOptions(settings.encoders, settings.hang_s, open_run, pads, model)
    if engine.open_session is not None and cuda is None:
        options = replace(options, work_clock=time.thread_time)
    held = replace(
        held,
        read_memory=held.read_memory or read,
        demand=demand if sizing is not None else held.demand,
    )
    work = Work(workload.pad, workload.encode, _own_memory(workload.decode))
    service = Service(runs, work, limits, options, held)
    return Opened(service, chosen, sizing, points, read(), memory, pads is not None)


def memory_reader(cuda: Cuda | None, limit: int | None) -> Callable[[], MemoryUse]:
    """Return what measures the memory that an engine fills: the device's, else the process's."""
    return (
        functools.partial(process_memory, limit)
        if cuda is None
        else functools.partial(device_memory, cuda)
    )


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """What a batch can hold at most; a single longer request goes alone.

    Attributes:
        tokens: Padded tokens.
        rows: Requests.
    """

    tokens: int
    rows: int

    def rows_of(self, length: int) -> int:
        """Return the requests of that length that a batch can hold."""
        return min(max(self.tokens // max(length, 1), 1), self.rows)


def largest_batch(settings: ServeSettings, encoded: Sequence[Encoded]) -> LargestBatch:
    """Return the largest batch that settings, and requests like these, let be served.

    Batches hold no more requests than the queue, and no larger ones are measured than can come.
    """
    longest = max(max(token_count(one) for one in encoded), 1)
    if settings.fixed_size is not None:
        return LargestBatch(settings.fixed_size * longest, settings.fixed_size)
    rows = min(settings.max_batch or settings.queue, settings.queue)
    return LargestBatch(min(settings.token_budget or _LARGEST[-1], rows * longest), rows)


def warm(runs: Sequence[Run], pad: Pad, encoded: Sequence[Encoded], largest: LargestBatch) -> None:
    """Run each lane ten times at its largest batch: the user's longest, and the fullest."""
    ordered = sorted(encoded, key=token_count)
    longest, shortest = ordered[-1], ordered[0]
    shapes = [pad([one] * largest.rows_of(token_count(one))) for one in (longest, shortest)]
    for run in runs:
        for _ in range(_WARM_RUNS):
            for feeds in shapes:
                run(feeds)


def measure_memory(
    run: Run,
    pad: Pad,
    encoded: Sequence[Encoded],
    used: Callable[[], int],
    largest: LargestBatch,
) -> BatchMemory:
    """Return the memory model of a batch, from how memory grows over ever larger batches.

    The runtime's arena keeps what it once took, so that a batch after which memory has grown
    needs that much, with the arena's own rounding; one that fits into what was taken before says
    nothing. The shortest request, a middle one and the longest are repeated; batches come in
    the order of what attention alone would need.

    Args:
        run: A lane's engine that has seen no large batch yet.
        pad: Encoded requests to feeds.
        encoded: The user's encoded requests.
        used: Measures memory, bytes: the process's, or the device's.
        largest: The largest batch that can be served: no larger one is run.
    """
    ordered = sorted(encoded, key=token_count)
    picked = {max(token_count(ordered[i]), 1): ordered[i] for i in (0, len(ordered) // 2, -1)}
    shapes = sorted(
        {
            (replace(largest, tokens=largest.tokens // part).rows_of(length), length)
            for length in picked
            for part in (16, 4, 1)
        },
        key=lambda shape: shape[0] * shape[1] ** 2,
    )
    run(pad([ordered[0]]))
    before, grown = used(), 0
    points: list[tuple[int, int, int]] = []
    for batch, length in shapes:
        run(pad([picked[length]] * batch))
        if (now := used() - before) > grown:
            grown = now
            points.append((batch, length, grown))
    points += [(1, 1, 0)] * (_LEAST_SHAPES - len(points))
    return fit_memory(points)


def _open_lanes(
    engine: Engine, pad: Pad, encoded: Sequence[Encoded], settings: ServeSettings
) -> tuple[LaneChoice, Cuda | None, Callable[[int], Run], list[Run]]:
    """Return the lanes: how many, on what device, what opens one, and all of them open."""
    tried: list[Run] = []  # they live until those that were chosen are open, which may be the same
    chosen = _choose_lanes(engine, pad, encoded, settings, tried)
    cuda = _cuda_of(engine, chosen.threads_per_lane)
    open_run = functools.partial(_open_run, engine, chosen.threads_per_lane, cuda)
    return chosen, cuda, open_run, [open_run(index) for index in range(chosen.lanes)]


def _choose_lanes(
    engine: Engine, pad: Pad, encoded: Sequence[Encoded], settings: ServeSettings, tried: list[Run]
) -> LaneChoice:
    def open_lane(threads: int) -> Run:
        tried.append(engine.open_lane(threads))
        return tried[-1]

    if settings.lanes is not None:
        return LaneChoice(settings.lanes, settings.threads_per_lane or 1, ())
    # NOTE: lanes of a device share it: a few overlap copies with computation, more only wait.
    most = min(cores(), _DEVICE_LANES) if _on_cuda(engine, 1) else cores()
    if settings.threads_per_lane is not None:
        return LaneChoice(max(most // settings.threads_per_lane, 1), settings.threads_per_lane, ())
    budget = min(settings.token_budget or 256, largest_batch(settings, encoded).tokens)
    return choose_lanes(open_lane, pad, encoded, most, token_budget=budget)


def _on_cuda(engine: Engine, threads: int) -> bool:
    opened = engine.open_session
    return opened is not None and opened(threads).provider == CUDA_PROVIDER


def _cuda_of(engine: Engine, threads: int) -> Cuda | None:
    """Return the CUDA runtime where the engine computes there."""
    return find_cuda() if _on_cuda(engine, threads) else None


def _open_run(engine: Engine, threads: int, cuda: Cuda | None, index: int) -> Run:
    """Open a lane: on a session its buffers, and on CUDA its stream, are the lane's own."""
    if engine.open_session is None:
        return engine.open_lane(threads)
    session = engine.open_session(threads)
    if cuda is not None:
        stream = cuda.stream()
        own = session.on_stream(stream.handle)
        if own is not None:
            return StreamedRun(own, stream)
    return BoundRun(session, np.empty if cuda is None else cuda.page_locked)


def _measure(
    run: Run,
    pad: Pad,
    encoded: Sequence[Encoded],
    largest: LargestBatch,
) -> tuple[tuple[Point, ...], int]:
    """Measure a grid of batches; return it and the largest number of tokens measured."""
    candidates = [one for one in _LARGEST if one < largest.tokens] + [largest.tokens]
    choice = calibrate_budget(run, pad, encoded, candidates, limit_s=2.0, most_rows=largest.rows)
    points = tuple(Point(cell.batch, cell.length, cell.best_ms / 1e3) for cell in choice.grid)
    return points, max(candidates)


def _within_memory(settings: ServeSettings, demand: Demand) -> ServeSettings:
    """Return settings whose own sizes, where they were given, keep to 80 % of the free memory."""
    budget, rows = settings.token_budget, settings.fixed_size
    if budget is not None:
        budget = largest_within_memory(demand, budget)
    if rows is not None and demand.memory is not None:
        longest, free = demand.picked[-1], demand.free_bytes // demand.lanes
        rows = max(min(rows, demand.memory.most(longest, free)), 1)
    for name, given, taken in (
        ("token budget", settings.token_budget, budget),
        ("fixed size", settings.fixed_size, rows),
    ):
        if given != taken:
            _LOG.warning("%s: %s -> %s (80 %% of the free memory)", name, given, taken)
    return replace(settings, token_budget=budget, fixed_size=rows)


def _limits(settings: ServeSettings, lanes: int, sizing: Sizing | None) -> BatchLimits:
    given = settings.token_budget
    return BatchLimits(
        token_budget=sizing.token_budget if sizing is not None else given or 256,
        max_wait_s=settings.max_wait_ms / 1e3,
        queue=settings.queue,
        max_padding=settings.max_padding,
        max_batch=settings.max_batch,
        lanes=lanes,
        fixed_size=settings.fixed_size,
        odd_lane=lanes > 1,
        ageing_s=settings.ageing_s,
        weights=settings.weights,
    )


def _own_memory(decode: Decode) -> Decode:
    """Return a decoder whose answers do not lie in a lane's buffers."""

    def decode_copy(outputs: Mapping[str, np.ndarray], count: int) -> Sequence[Any]:
        return decode({name: array.copy() for name, array in outputs.items()}, count)

    return decode_copy
