"""p-values of a cell's drops, one a metric; they are adjusted over all cells of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from qbench.records import Status, SweepRecord
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


def with_p_values(
    record: SweepRecord,
    metrics: Sequence[Metric],
    reference: Scores,
    *,
    seed: int = 0,
    family: int = 1,
) -> SweepRecord:
    """Return a record with the p-values that its raw samples give; those it has already stay.

    Samples are kept for metrics with one number a sample; others need the scores themselves
    (``p_values``).
    """
    if record.status is not Status.OK:
        return record
    known = dict(record.p_values)
    for metric in metrics:
        samples, before = record.samples.get(metric.name), reference.payloads[metric.name]
        if metric.name in known or samples is None or len(samples) != np.size(before):
            continue
        p = paired_p(
            metric, np.ravel(before)[:, None], np.array(samples)[:, None], seed=seed, family=family
        )
        if p is not None:
            known[metric.name] = p
    return replace(record, p_values=known)
