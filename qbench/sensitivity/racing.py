"""The raced sweep: looks at every cell, and the full pool for the few that may change the plan.

``Race`` decides; this runs what it asks for and turns what comes back into records. A cell's
record is *provisional* while the race may still come back to it, and is written again when it is
final; in a journal the last one counts. A race that is continued is played again from the records
that it has, so nothing is measured twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from qbench.lowering import lowering_for
from qbench.records import Estimate, Kind, Layer, Layers, Status, SweepRecord
from qbench.sensitivity.cells import measure_cell, refuse
from qbench.sensitivity.executors import Assignment, Executor, LocalExecutor
from qbench.sensitivity.looking import Pools, look_name
from qbench.sensitivity.race import LEVELS, TOLERANCE, WORDS, Cell, Fate, Job, Race, Rules
from qbench.sensitivity.timing import paired_latency, spread_batches

#: What each cell saves, from the records so far, in the planner's unit.
Savings = Callable[[Sequence[SweepRecord]], Mapping[Cell, float]]

#: Layers that are timed of each (kind, weight shape, format); emulated formats have no speed.
_TIMED, _TIMED_EMULATED = 2, 1
#: Batches of such a latency, and repeats.
_BATCHES, _BATCHES_EMULATED, _REPEATS, _REPEATS_EMULATED = 4, 2, 2, 1
#: Most of a time budget that latencies may take.
_TIMING_SHARE = 0.3
#: How a provisional record begins its ``effort``.
_SO_FAR = "so far"


@dataclass(frozen=True, slots=True)
class Pace:
    """How a race is run on a machine.

    Attributes:
        workers: Cells that are looked at side by side.
        budget_s: Seconds that it may take; ``None`` for no limit.
        clock: Seconds that only ever grow.
    """

    workers: int = 2
    budget_s: float | None = None
    clock: Callable[[], float] = time.perf_counter


def is_final(record: SweepRecord) -> bool:
    """Whether a record is what a race came to, and not its state on the way."""
    return not record.effort.startswith(_SO_FAR)


class Racer:
    """A raced sweep.

    Args:
        pools: The looks.
        layers: All layers of the model.
        savings: What each cell saves, from the records so far.
        pace: How fast, and how long.
        tolerance: What a cell may still lose when it stops, as a share of all savings.
        levels: Levels of the planner's front.
    """

    def __init__(
        self,
        pools: Pools,
        layers: Layers,
        savings: Savings,
        pace: Pace | None = None,
        tolerance: float = TOLERANCE,
        levels: int = LEVELS,
    ) -> None:
        """Nothing is run yet."""
        self._bench, self._savings = pools.bench, savings
        #: The looks.
        self.pools = pools
        self._layers = layers.by_name()
        self._pace = pace or Pace()
        #: Measures the jobs; it may be replaced before the race is run.
        self.executor: Executor = LocalExecutor(
            self._bench, self._layers, pools, self._pace.workers
        )
        self._rules = Rules(pools.samples, pools.scales, tolerance=tolerance, levels=levels)
        self._records: dict[Cell, SweepRecord] = {}
        self._latency: dict[Cell, Estimate] = {}
        self._deadline = float("inf")
        #: What was measured, in order.
        self.jobs: list[Job] = []
        #: Cells that the time budget left without any measurement.
        self.not_reached: tuple[Cell, ...] = ()

    def run(
        self, cells: Sequence[Cell], known: Iterable[SweepRecord] = ()
    ) -> Iterator[SweepRecord]:
        """Yield records as they are made: provisional ones, and in the end a final one a cell.

        Args:
            cells: The cells, in the order of the graph.
            known: Records of an earlier part of this race; final ones are not yielded again.
        """
        pace = self._pace
        self._deadline = pace.clock() + (pace.budget_s or float("inf"))
        stored = {(record.layer, record.format): record for record in known}
        self._latency = {c: r.latency_delta_ms for c, r in stored.items() if r.latency_delta_ms}
        runnable = []
        for cell in cells:
            said = stored.get(cell) or self._refused(cell)
            if said is None or said.status is Status.OK:
                runnable.append(cell)
            elif cell not in stored:
                yield said
        race = Race(runnable, self._rules)
        self._time(runnable)
        yield from self._rounds(race, stored)
        yield from self._finals(race, stored)
        self.not_reached = tuple(cell for cell in runnable if cell not in self._records)

    def _rounds(self, race: Race, stored: Mapping[Cell, SweepRecord]) -> Iterator[SweepRecord]:
        while jobs := race.due():
            if jobs[0].look is None:
                jobs = jobs[: self._pace.workers]  # each full measurement may settle others
            yield from self._do(race, jobs, stored)
            if self._over() or not self._moved(race, jobs):
                return
            fine = [self._as_known(race, r) for r in self._records.values()]
            stopped = race.settle(self._savings([r for r in fine if r.status is Status.OK]))
            for cell in stopped:
                self.pools.forget(cell)

    def _moved(self, race: Race, jobs: Sequence[Job]) -> bool:
        """Whether all that was due was done."""
        return all(job.cell in self._records for job in jobs)

    def _do(
        self, race: Race, jobs: Sequence[Job], stored: Mapping[Cell, SweepRecord]
    ) -> Iterator[SweepRecord]:
        """Do a round's jobs, from the records where they tell, and tell the race."""
        todo = [job for job in jobs if not _tells(stored.get(job.cell), job)]
        for job in jobs:
            if job not in todo:
                self._take(race, job, stored[job.cell])
        for job, record in zip(todo, self._measure(todo), strict=True):
            if record is not None:
                self.jobs.append(job)
                yield self._take(race, job, record)

    def _measure(self, jobs: Sequence[Job]) -> Iterator[SweepRecord | None]:
        """Yield the record of each job in order; ``None`` for those that the budget left out."""
        work = [Assignment(job.cell, job.look, outputs_only=job.look is None) for job in jobs]
        yield from self.executor.run(work, self._over)

    def _take(self, race: Race, job: Job, record: SweepRecord) -> SweepRecord:
        """Tell the race of a record, keep it with what earlier ones of the cell know."""
        cell, before = job.cell, self._records.get(job.cell)
        samples = {**(before.samples if before else {}), **record.samples}
        latency = record.latency_delta_ms or self._latency.get(cell)
        record = replace(record, samples=samples, latency_delta_ms=latency)
        if before is not None and record.sqnr_db is None:
            record = replace(record, sqnr_db=before.sqnr_db, cosine=before.cosine)
        self._records[cell] = record
        if record.status is not Status.OK or job.look is None:
            self.pools.forget(cell)
        if record.status is not Status.OK:
            race.finish(cell, None)
        elif job.look is None:
            race.finish(cell, record.divergence)
        else:
            race.tell(cell, record.samples[look_name(job.look)])
            self._records[cell] = replace(record, effort=f"{_SO_FAR} {self._part(race, cell)}")
            return self._as_known(race, self._records[cell])
        return record

    def _as_known(self, race: Race, record: SweepRecord) -> SweepRecord:
        """Return a record with the estimate that the race has of its cell now."""
        cell = (record.layer, record.format)
        if record.status is not Status.OK or race.fate(cell) is Fate.FULL:
            return record
        estimate = race.estimate(cell)
        return replace(record, divergence=estimate, n=estimate.n if estimate else 0)

    def _part(self, race: Race, cell: Cell) -> str:
        return f"{self._rules.samples[race.looks(cell) - 1]} of {self._bench.task.n} samples"

    def _finals(self, race: Race, stored: Mapping[Cell, SweepRecord]) -> Iterator[SweepRecord]:
        """Yield the final record of every cell that stopped before the full pool."""
        for cell, record in self._records.items():
            if record.status is not Status.OK or race.fate(cell) is Fate.FULL:
                continue
            if cell in stored and stored[cell].effort == "full":
                self._records[cell] = stored[cell]
                continue
            why = WORDS.get(race.fate(cell), "the time budget ended")
            effort = f"stopped after {self._part(race, cell)}: {why}"
            final = replace(self._as_known(race, record), effort=effort)
            self._records[cell] = final
            if stored.get(cell) != final:
                yield final

    def _refused(self, cell: Cell) -> SweepRecord | None:
        """Return the record of a cell that cannot be measured; ``None`` for all others."""
        if refuse(self._bench, self._layers[cell[0]], cell[1]) is None:
            return None
        return measure_cell(self._bench, self._layers[cell[0]], cell[1])

    def _time(self, cells: Sequence[Cell]) -> None:
        """Measure latencies: of a few layers a (kind, weight shape, format), one at a time.

        Layers of one kind and shape do the same work, and the planner pools their latencies.
        """
        groups: dict[tuple[str, tuple[int, ...], str], list[Cell]] = {}
        for cell in cells:
            layer = self._layers[cell[0]]
            groups.setdefault((layer.kind, layer.weight_shape, cell[1]), []).append(cell)
        clock, started = self._pace.clock, self._pace.clock()
        for (kind, _, format_name), members in groups.items():
            emulated = self._bench.backend.emulates(Kind(kind), format_name)
            wanted = _TIMED_EMULATED if emulated else _TIMED
            done = sum(cell in self._latency for cell in members)
            for at in spread_batches(members, wanted):
                share = _TIMING_SHARE * (self._pace.budget_s or float("inf"))
                if done >= wanted or clock() - started > share:
                    break
                latency = self._latency_of(self._layers[members[at][0]], format_name)
                if latency is not None:
                    self._latency[members[at]] = latency
                    done += 1

    def _latency_of(self, layer: Layer, format_name: str) -> Estimate | None:
        """Return a cell's latency change on the full pool's batches; ``None`` if it does not run.

        What it runs into is told by its first look.
        """
        lowering, clips = lowering_for(format_name, backend=self._bench.backend), self._bench.clips
        replay = self._bench.replay
        try:
            changed = replay.change(layer, lambda model, own: lowering.apply(model, own, clips))
        except Exception:  # the look runs into the same and records it
            return None
        try:
            emulated = self._bench.backend.emulates(layer.kind, format_name)
            batches = _BATCHES_EMULATED if emulated else _BATCHES
            repeats = _REPEATS_EMULATED if emulated else _REPEATS
            return paired_latency(self._bench.timing or replay, changed, batches, repeats)
        except Exception:  # as above
            return None
        finally:
            changed.close()

    def close(self) -> None:
        """Free the looks' sessions; the bench is the caller's."""
        self.pools.close()

    def is_over(self) -> bool:
        """Whether the time budget has run out; a race that has not begun has all of it."""
        return self._over()

    def _over(self) -> bool:
        return self._pace.clock() > self._deadline


def _tells(record: SweepRecord | None, job: Job) -> bool:
    """Whether a record of before tells what a job would."""
    if record is None:
        return False
    if record.status is not Status.OK:
        return True
    return record.effort == "full" if job.look is None else look_name(job.look) in record.samples
