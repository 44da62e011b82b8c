"""Joining a sweep that is ready to run with the race: looks, the planner's savings and the pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qbench.planning.worth import as_expected, savings
from qbench.records import Status, SweepRecord
from qbench.sensitivity.looking import Feeding, Pools
from qbench.sensitivity.race import Cell
from qbench.sensitivity.racing import Pace, Racer
from qbench.sensitivity.sweep import Sweep
from qbench.workbench import Workbench


def racer_for(work: Workbench, runner: Sweep, budget_s: float | None = None) -> Racer | None:
    """Return the race over a run's cells; ``None`` where no part of its task stands alone.

    What a cell would save is expected, not measured: so the race takes the same way each time.

    Args:
        work: The workbench of the run.
        runner: Its sweep, whose reference has run.
        budget_s: Seconds that the race may take; ``None`` for no limit.
    """
    pools = Pools(runner.bench, work.layers, feeding_of(work))
    if not pools.looks:
        return None
    how = work.config.plan

    def saved(records: Sequence[SweepRecord]) -> Mapping[Cell, float]:
        priced = as_expected(records, work.layers, work.backend)
        return savings(priced, work.layers, work.backend, how.objective)

    pace = Pace(work.settings.threads, budget_s)
    return Racer(pools, work.layers, saved, pace, levels=how.levels)


def feeding_of(work: Workbench) -> Feeding:
    """Return what batches of a run's looks are made with."""
    return Feeding(work.model.inputs, work.model.output, pad_id=work.tokenizer.pad_id)


def describe_effort(records: Sequence[SweepRecord], cells: Sequence[Cell]) -> str:
    """Return in words what a raced sweep covered: on how many samples, and what it did not reach.

    Args:
        records: The records so far.
        cells: Every cell that was asked for.
    """
    own = {(record.layer, record.format): record for record in records}
    fine = [r for r in own.values() if r.status is Status.OK]
    full = sum(record.effort == "full" for record in fine)
    missing = sum(cell not in own for cell in cells)
    words = f"{full} of {len(fine)} cells on all samples, {len(fine) - full} stopped before"
    if missing:
        words += f"; {missing} not reached: the plan uses only what was measured"
    return words
