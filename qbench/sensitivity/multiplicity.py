"""p-values of a cell's drops, one a metric; they are adjusted over all cells of a run."""

from __future__ import annotations

from collections.abc import Sequence

from qbench.statistics import paired_p
from qbench.tasks.base import Metric, Scores


def p_values(
    metrics: Sequence[Metric], reference: Scores, changed: Scores, *, seed: int = 0, family: int = 1
) -> dict[str, float]:
    """Return the raw p-value of each metric's change.

    Args:
        metrics: The task's metrics.
        reference: Scores of the reference.
        changed: Scores of the changed graph, same samples.
        seed: Seed of the draws.
        family: Number of cells that the p-values will be adjusted over.
    """
    found = {
        metric.name: paired_p(
            metric,
            reference.payloads[metric.name],
            changed.payloads[metric.name],
            seed=seed,
            family=family,
        )
        for metric in metrics
    }
    return {name: p for name, p in found.items() if p is not None}
