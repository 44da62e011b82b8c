"""Many tests at once: p-values of a run's cells, raw and adjusted, and what is left of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qbench.records import SweepRecord
from qbench.statistics import benjamini_hochberg, holm

#: Level at which drops are counted.
ALPHA = 0.05


def cell_p_values(
    records: Sequence[SweepRecord], metric: str | None
) -> dict[str, NDArray[np.float64]]:
    """Return the p-values of a metric's drop by cell [records]: raw, Holm's, and B.-H.'s.

    The family is every cell of the run that has a p-value for the metric; others are NaN.
    """
    raw = np.array([r.p_values.get(metric or "", np.nan) for r in records], dtype=np.float64)
    known = np.isfinite(raw)
    found = {"p": raw}
    for name, adjust in (("p_holm", holm), ("p_bh", benjamini_hochberg)):
        found[name] = np.full(len(raw), np.nan)
        if known.any():
            found[name][known] = adjust(raw[known])
    return found


def multiplicity_words(records: Sequence[SweepRecord], metric: str | None) -> str:
    """Say how many drops exclude zero, raw and after adjustment; nothing without p-values."""
    values = cell_p_values(records, metric)
    known = np.isfinite(values["p"])
    if not known.any():
        return ""
    excluding = sum(
        r.drops[metric].resolvable for r in records if metric is not None and metric in r.drops
    )
    counts = {name: int((p[known] < ALPHA).sum()) for name, p in values.items()}
    return (
        f"Of {known.sum():,} drops of {metric}, {excluding:,} have an interval that excludes zero, "
        f"and {counts['p']:,} have p < {ALPHA:g} taken alone. So many tests give some of these by "
        f"chance: after Holm {counts['p_holm']:,} remain, after Benjamini–Hochberg "
        f"{counts['p_bh']:,}."
    )
