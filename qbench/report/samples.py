"""Raw samples of the sweep's cells, gathered for statistics over several cells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qbench.formats import FORMATS
from qbench.records import Status, SweepRecord


def cells_by_format(records: Sequence[SweepRecord]) -> dict[str, list[int]]:
    """Return the places of the ``ok`` cells of each format."""
    found: dict[str, list[int]] = {}
    for index, record in enumerate(records):
        if record.status is Status.OK and record.divergence is not None:
            found.setdefault(record.format, []).append(index)
    return {name: found[name] for name in [*FORMATS, *found] if name in found}


def is_partial(record: SweepRecord) -> bool:
    """Whether a cell's divergence is an estimate from a part of the samples: a race stopped it."""
    return record.status is Status.OK and record.effort != "full"


def divergence_samples(records: Sequence[SweepRecord]) -> NDArray[np.float64] | None:
    """Return the divergences by cell and sample, shape [cells, n].

    ``None`` where a record did not keep them, or records differ in their samples.
    """
    rows = [record.samples.get("divergence", ()) for record in records]
    lengths = {len(row) for row in rows}
    if len(lengths) != 1 or 0 in lengths:
        return None
    return np.asarray(rows, dtype=np.float64)
