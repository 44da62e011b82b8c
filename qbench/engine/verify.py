"""Judging an engine file against the reference on one split of the data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qbench.records import Judgement, Verdict
from qbench.statistics import (
    describe,
    mean_interval,
    non_inferior,
    paired_drop,
    samples_needed,
)
from qbench.tasks.base import Array, Task
from qbench.tasks.outputs import as_rows, collapsed


@dataclass(frozen=True, slots=True)
class Judge:
    """What all engines of one split are judged by.

    Attributes:
        task: The task on the split.
        split: Name of the split.
        reference: Outputs of the reference engine, shape [items, …].
        margin: Largest drop of the first metric that is allowed, in its unit, or ``None``.
        seed: Seed of the resamples.
    """

    task: Task
    split: str
    reference: Array
    margin: float | None = None
    seed: int = 0

    def judge(self, engine: str, outputs: Array) -> Judgement:
        """Return the judgement of an engine's outputs, shape [items, …].

        Raises:
            MeasurementError: If an output is not finite: that is no number to judge.
        """
        metric = self.task.metrics[0]
        before = self.task.score(self.reference, self.reference)
        after = self.task.score(outputs, self.reference)
        drop = paired_drop(
            metric, before.payloads[metric.name], after.payloads[metric.name], seed=self.seed
        )
        margin = self.margin or 0.0  # where none was asked, any loss at all is one
        verdict = non_inferior(drop, margin)
        unresolved = verdict is Verdict.NOT_RESOLVABLE
        needed = samples_needed(drop, margin) if unresolved else None
        divergence = self.task.divergence(self.reference, outputs)
        return Judgement(
            engine=engine,
            split=self.split,
            metric=metric.name,
            reference=before.value(metric),
            value=after.value(metric),
            drop=drop,
            margin=self.margin,
            verdict=verdict,
            n=self.task.n,
            n_needed=needed,
            divergence=mean_interval(divergence, seed=self.seed),
            flip_rate=float(np.mean(before.answers != after.answers)),
            cosine=self._cosine(outputs),
            remark="; ".join(t for t in (describe(drop, margin), collapsed(outputs) or "") if t),
        )

    def _cosine(self, outputs: Array) -> float:
        items = len(self.reference)
        a = as_rows(self.reference, items).astype(np.float64)
        b = as_rows(outputs, items).astype(np.float64)
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        same = np.where(norms > 0, (a * b).sum(axis=1) / np.where(norms > 0, norms, 1), 1.0)
        return float(same.mean())
