"""Trials of proposals: engines that are built to be judged on the sweep split, and then removed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from qbench import base, judging
from qbench.engine.build import lower_graph
from qbench.errors import MeasurementError
from qbench.planning.choose import Candidate as Measured
from qbench.planning.choose import Cost
from qbench.planning.costs import Offer
from qbench.planning.interactions import Cells
from qbench.planning.problem import Proposal
from qbench.progress import Listener
from qbench.records import Estimate, Judgement
from qbench.runtime.ort import open_session
from qbench.runtime.passes import run_batches
from qbench.workbench import Workbench

#: Rounds in which the engines that may become the plan are timed beside each other.
_FINAL_ROUNDS = 15


class Trials:
    """Builds, judges and times proposals of one run.

    Args:
        work: The workbench of the run.
        offer: What the proposals were made from; it knows the remedies.
        listener: Hears of each engine.
    """

    def __init__(self, work: Workbench, offer: Offer, listener: Listener) -> None:
        """Run the reference on the sweep split."""
        self.work, self.offer, self._listener = work, offer, listener
        self.judge = judging.judge_for(work, "sweep")
        self.failed: list[dict[str, Any]] = []
        self._clips = judging.clips_of(work, work.run.read_ranges())

    def measure(self, named: Mapping[str, Proposal]) -> list[Measured]:
        """Return what the engine of each proposal gave; one that cannot be built is told."""
        built: list[tuple[str, Proposal, int, Judgement]] = []
        for name, proposal in named.items():
            try:
                report = judging.build(self.work, name, self._plan(name, proposal.formats))
                judgement = judging.judge(self.work, self.judge, name)
            except MeasurementError as error:
                told = {"engine": name, "level": proposal.level, "failed": str(error)}
                self.failed.append(told)
                judging.discard(self.work, [name])
            else:
                built.append((name, proposal, report.bytes, judgement))
            self._listener.step(name)
        names = [name for name, *_ in built]
        seconds = judging.time_engines(self.work, names) if names else {}
        return [
            Measured(proposal, judgement, _cost(size, seconds[name]))
            for name, proposal, size, judgement in built
        ]

    def time_together(self, measured: Sequence[Measured]) -> list[Measured]:
        """Return engines with the times of one longer interleaved run.

        They are built again: the same plan builds the same bytes.
        """
        named = {m.judgement.engine: m for m in measured}
        try:
            for name, own in named.items():
                judging.build(self.work, name, self._plan(name, own.proposal.formats))
            seconds = judging.time_engines(self.work, list(named), _FINAL_ROUNDS)
        finally:
            self.discard(named)
        return [replace(m, cost=_cost(m.cost.bytes, seconds[name])) for name, m in named.items()]

    def divergence_of(self, cells: Cells) -> float:
        """Return the mean divergence with exactly these cells lowered, by the engine's lowering.

        Raises:
            MeasurementError: If the graph does not run, or gives what is no number.
        """
        work = self.work
        graph = lower_graph(work.model.ir, work.layers, self._plan("set", dict(cells)))
        with open_session(graph, work.settings) as session:
            outputs = run_batches(session, work.batches("sweep"), work.model.output)
        mean = float(np.mean(self.judge.task.divergence(self.judge.reference, outputs)))
        if not math.isfinite(mean):
            raise MeasurementError(f"{len(cells)} layers lowered together give no finite answer")
        return mean

    def discard(self, names: Iterable[str]) -> None:
        """Remove engines; the same plan builds the same bytes."""
        judging.discard(self.work, names)

    def _plan(self, name: str, formats: Mapping[str, str]) -> Any:
        treatments = self.offer.treatments_of(formats)
        own = base.candidate(self.work, name, formats, treatments)
        return judging.plan_for(self.work, own, self._clips)


def _cost(size: int, seconds: Estimate) -> Cost:
    return Cost(size, seconds.value, (seconds.high - seconds.low) / 2)


def names_of(stem: str, proposals: Sequence[Proposal], before: int = 0) -> dict[str, Proposal]:
    """Return proposals by the names of their engines: ``front-1``, … after ``before`` others."""
    return {f"{stem}-{number}": proposal for number, proposal in enumerate(proposals, before + 1)}
