"""Getting a sweep ready: the journal's cells, the reference, the preflight and the forecast."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from qbench import judging
from qbench.backends import Backend, Variant
from qbench.base import base_graph
from qbench.executing import executor_for
from qbench.lowering.overflow import keep_overflowing
from qbench.progress import Listener
from qbench.raced import describe_effort, racer_for
from qbench.records import Status, SweepRecord, to_dict
from qbench.runtime.ort import open_session
from qbench.sensitivity.activations import Limits
from qbench.sensitivity.executors import Assignment, Executor
from qbench.sensitivity.preflight import (
    Forecast,
    Preflight,
    check_chain,
    check_limits,
    forecast,
    stand_ins,
    try_cells,
)
from qbench.sensitivity.racing import Racer, is_final
from qbench.sensitivity.replay import Replay
from qbench.sensitivity.sweep import Sweep
from qbench.tasks import batches_sha256, check_expectation
from qbench.workbench import Workbench

Cell = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ReadySweep:
    """A sweep that passed its preflight.

    Attributes:
        runner: The sweep, whose reference has run.
        executor: Measures cells.
        cells: Every (layer, format), in the order of the graph.
        known: Records that the journal holds already, those of the preflight included.
        forecast: What the rest will take.
        racer: Runs the race; ``None`` where every cell is measured in full.
    """

    runner: Sweep
    executor: Executor
    cells: tuple[Cell, ...]
    known: dict[Cell, SweepRecord]
    forecast: Forecast
    racer: Racer | None = None

    @property
    def pending(self) -> tuple[Cell, ...]:
        """Cells that are still to be measured."""
        return tuple(cell for cell in self.cells if cell not in self.known)


def limits_of(work: Workbench) -> Limits:
    """Return what the replay of a run's sweep may take of memory and disk."""
    sweep = work.config.sweep
    return Limits(
        budget_bytes=sweep.activation_bytes,
        memory_limit=sweep.memory_limit,
        folder=work.run.path,
        cells=work.settings.threads,
    )


@contextmanager
def ready_sweep(work: Workbench, listener: Listener) -> Iterator[ReadySweep]:
    """Open the journal, run the reference, try every pending cell once, and forecast the rest.

    In a race one cell stands for those that do the same work: the first look tries each of them.

    Raises:
        DataError: If the reference misses the value that was declared for it.
        RunDirError: If the journal was made from something else; the difference is named.
        InputError: If the forecast passes the memory that is allowed, or the free disk.
        MeasurementError: If the segmented reference is not the whole graph's.
    """
    ranges, task, batches = work.run.read_ranges(), work.task("sweep"), work.batches("sweep")
    work.run.start_journal(work.journal_key(batches_sha256(batches)))
    known = {(r.layer, r.format): r for r in work.run.read_sweep() if _counts(work, r)}
    cells = tuple((x.name, name) for x in work.chosen for name in work.config.sweep.formats)
    listener.stage("sweep: running the reference")
    one = replace(work.settings, threads=1)  # cells are measured side by side, a thread each
    graph = keep_overflowing(work.model.ir, work.layers, ranges, work.backend)
    replay = Replay(graph, work.layers, batches, one, work.model.output, limits_of(work))
    clips, seed = judging.clips_of(work, ranges), work.config.run.seed
    family = len(cells) * len(task.metrics)
    timed = work.timed_batches() if work.config.sweep.batch else ()
    runner = Sweep(replay, task, work.backend, clips, ranges, seed, family, timed)
    racer, executor = None, None
    try:
        _check_reference(work, runner)
        pending = [cell for cell in cells if cell not in known]
        if work.config.sweep.race:
            racer = racer_for(work, runner, work.config.sweep.budget_s)
        flight = _fly(work, runner, pending, listener, raced=racer is not None)
        known |= flight.records
        rest = [cell for cell in pending if cell not in flight.records]
        looks = racer.pools.samples if racer else ()
        expected = forecast(runner.bench, flight, work.chosen, rest, looks)
        refused = sum(record.status is not Status.OK for record in known.values())
        _tell(work, flight.chain_difference, refused, expected)
        check_limits(
            expected, work.config.sweep.memory_limit, shutil.disk_usage(work.run.path).free
        )
        left = [cell for cell in cells if cell not in known or not is_final(known[cell])]
        executor = executor_for(work, runner.bench, racer.pools if racer else None, expected, left)
        if racer is not None:
            racer.executor = executor
        yield ReadySweep(runner, executor, cells, known, expected, racer)
    finally:
        if executor is not None:
            work.run.write_run({"executor": executor.describe()})
            executor.close()
        if racer is not None:
            racer.close()
        runner.close()


def all_cells(work: Workbench, ready: ReadySweep, listener: Listener) -> Iterator[SweepRecord]:
    """Yield the record of every cell, measured on all samples, until the time budget is used up.

    Several cells are measured side by side. Records come in the order of the graph.
    """
    deadline = time.perf_counter() + (work.config.sweep.budget_s or float("inf"))
    wanted = [Assignment(cell) for cell in ready.pending]
    with closing(ready.executor.run(wanted, lambda: time.perf_counter() >= deadline)) as measured:
        for cell in ready.cells:
            if cell in ready.known:
                listener.step("from the journal")
                yield ready.known[cell]
            elif (record := next(measured)) is not None:
                work.run.append_sweep(record)
                listener.step(f"{cell[0]} {cell[1]}")
                yield record


def raced_cells(work: Workbench, ready: ReadySweep, listener: Listener) -> Iterator[SweepRecord]:
    """Yield what a race over the cells comes to; where it cannot be run, every cell in full.

    States on the way go to the journal too: a race that was killed goes on from them.
    """
    if ready.racer is None:
        yield from all_cells(work, ready, listener)
        return
    for record in filter(is_final, ready.known.values()):
        listener.step("from the journal")
        yield record
    apart = frozenset(cell for cell in ready.cells if gives_back(work.backend, cell[1]))
    racing = [cell for cell in ready.cells if cell not in apart]
    known = [record for cell, record in ready.known.items() if cell not in apart]
    for record in ready.racer.run(racing, known):
        work.run.append_sweep(record)
        if is_final(record):
            listener.step(f"{record.layer} {record.format}")
            yield record
    wanted = [Assignment(cell) for cell in ready.pending if cell in apart]
    for found in ready.executor.run(wanted, ready.racer.is_over):
        if found is not None:
            work.run.append_sweep(found)
            listener.step(f"{found.layer} {found.format}")
            yield found


def gives_back(backend: Backend, format_name: str) -> bool:
    """Whether cells of a format are measured for what they give back, which only all samples show.

    That is fp32 beside fp16: it saves nothing, so that a race would stop it at its first look.
    """
    return backend.variant is Variant.ISLANDS and format_name == "fp32"


def tell_effort(work: Workbench, records: Sequence[SweepRecord], cells: Sequence[Cell]) -> None:
    """Write into ``run.json`` what the sweep covered, and what it did not reach."""
    reached = {(record.layer, record.format) for record in records}
    work.run.write_run(
        {
            "sweep": {
                "effort": describe_effort(records, cells),
                "not_reached": [list(cell) for cell in cells if cell not in reached],
            }
        }
    )


def _check_reference(work: Workbench, runner: Sweep) -> None:
    scores = runner.reference.scores
    values = {m.name: scores.value(m) for m in work.task("sweep").metrics}
    work.run.write_run({"reference": {"split": "sweep", "values": values}})
    expect = work.config.task.expect
    if expect is not None:
        check_expectation(
            expect.metric, values.get(expect.metric, float("nan")), expect.value, expect.tolerance
        )


def _fly(
    work: Workbench, runner: Sweep, pending: Sequence[Cell], listener: Listener, raced: bool
) -> Preflight:
    flight = Preflight()
    replay = runner.bench.replay
    replay.make_room()
    whole_graph = base_graph(work) if replay.chain.has_islands else work.model.path
    with open_session(whole_graph, replay.settings) as session:
        feeds = replay.batches[0].feeds
        whole = session.run(feeds, [work.model.output])[work.model.output]
    flight.chain_difference = check_chain(replay, whole)
    wanted = set(pending)
    left = {cell[0] for cell in wanted}
    formats = work.config.sweep.formats
    # The same ones, in the same order, however much of the run was done before.
    tried = [x for x in (stand_ins(work.chosen) if raced else work.chosen) if x.name in left]
    listener.stage("preflight: every cell once", len(tried) * len(formats))
    for layer, name, record, seconds in try_cells(runner.bench, tried, formats):
        listener.step(f"{layer.name} {name}")
        cell = (layer.name, name)
        if cell not in wanted:
            continue
        flight.overhead_s[cell] = seconds
        if record is not None:
            flight.records[cell] = record
            work.run.append_sweep(record)
    return flight


def _counts(work: Workbench, record: SweepRecord) -> bool:
    """Whether a record of the journal stands; without a race one of some samples does not."""
    return work.config.sweep.race or record.effort == "full" or record.status is not Status.OK


def _tell(work: Workbench, difference: float, refused: int, expected: Forecast) -> None:
    work.run.write_run(
        {
            "preflight": {
                "chain_difference": difference,
                "refused": refused,
                "forecast": to_dict(expected),
            }
        }
    )
