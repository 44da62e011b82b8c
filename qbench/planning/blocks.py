"""Block sizes of a plan: those that the cells were measured with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qbench.records import PlanLayer, SweepRecord


def with_blocks(rows: Sequence[PlanLayer], records: Sequence[SweepRecord]) -> tuple[PlanLayer, ...]:
    """Return the layers of a plan with the block size of each plain cell that has one.

    A remedy that changes the block says it itself.
    """
    known = {
        (record.layer, record.format): record.block
        for record in records
        if record.treatment is None
    }
    return tuple(replace(row, block=known.get((row.name, row.format))) for row in rows)
