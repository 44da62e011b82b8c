"""The ray executor: workers of a cluster hold the sessions and take cells."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qbench.graph.model import Model
from qbench.records import Layer, Layers, Status, SweepRecord
from qbench.sensitivity.cells import Bench, base_record
from qbench.sensitivity.executors.base import Assignment, Measured, never
from qbench.sensitivity.executors.cluster import Cluster, connected
from qbench.sensitivity.executors.crew import SILENCE_S, Cargo, Crew, Done, Lost
from qbench.sensitivity.executors.dispatch import Abandoned, Dispatch, Result
from qbench.sensitivity.executors.kit import kept_of, make_kit, model_files, user_module
from qbench.sensitivity.looking import SIZES, Feeding

#: Least seconds that a worker may take for one assignment.
LEAST_TIMEOUT_S = 120.0
#: Assignments a worker that may be ahead of the first unfinished one.
_AHEAD, _LOOKS_AHEAD = 2, 8


@dataclass(frozen=True, slots=True)
class Terms:
    """How an executor uses a cluster.

    Attributes:
        address: Address of the cluster; ``None`` starts one here.
        cores: Cores of one that is started here.
        workers: Most workers; ``None`` for one a core of the cluster.
        timeout_s: Seconds that a worker may take for one assignment.
        silence_s: Seconds without a sign of life until a worker is lost.
    """

    address: str | None = None
    cores: int = 1
    workers: int | None = None
    timeout_s: float = LEAST_TIMEOUT_S
    silence_s: float = SILENCE_S


class RayExecutor:
    """Measures on workers of a Ray cluster.

    Args:
        bench: What the cells share; its reference has run.
        model: The stored model that is swept.
        layers: All layers.
        terms: How the cluster is used.
        feeding: How batches of looks are made; ``None`` where the sweep is no race.
        looks: Samples of each look.
    """

    def __init__(
        self,
        bench: Bench,
        model: Model,
        layers: Layers,
        terms: Terms,
        feeding: Feeding | None = None,
        looks: Sequence[int] = SIZES,
    ) -> None:
        """Connect, put the activations into the object store once, and start the workers.

        Raises:
            MissingDependencyError: If Ray is not installed.
            InputError: If the cluster does not answer.
            MeasurementError: If none can be started here.
        """
        self._bench, self._terms = bench, terms
        self._layers: Mapping[str, Layer] = layers.by_name()
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            store_bytes = sum(bench.replay.activation_bytes)
            cluster = opened.enter_context(connected(terms.address, terms.cores, store_bytes))
            self._size = max(1, min(terms.workers or cluster.cpus, cluster.cpus))
            kit = make_kit(bench, model, layers, feeding, looks)
            cargo = _load(cluster, bench, kit, Path(kit.folder))
            self._crew = Crew(cluster, cargo, self._size, terms.silence_s)
            opened.callback(self._crew.close)
            self._open = opened.pop_all()

    @property
    def crew(self) -> Crew:
        """The workers."""
        return self._crew

    def run(self, assignments: Sequence[Assignment], over: Callable[[], bool] = never) -> Measured:
        """Yield the record of each assignment, in their order; ``None`` for what was left out.

        A lost worker's assignment is begun again elsewhere; after a few losses it is a failed cell.

        Raises:
            InputError: If every worker was refused.
            MeasurementError: If none is left, or none starts.
        """
        ahead = _LOOKS_AHEAD if assignments and assignments[0].look is not None else _AHEAD
        dispatch = Dispatch(assignments, ahead * self._size, self._terms.timeout_s)
        self._crew.resume()
        while not dispatch.finished:
            if over():
                dispatch.stop()
            self._hand_out(dispatch)
            yield from map(self._record, dispatch.take())
            if not dispatch.finished:
                self._hear(dispatch)

    def _hand_out(self, dispatch: Dispatch) -> None:
        for member in self._crew.idle:
            assignment = dispatch.next_for(member.number, time.monotonic())
            if assignment is not None:
                self._crew.give(member, assignment)

    def _hear(self, dispatch: Dispatch) -> None:
        for event in self._crew.listen():
            if isinstance(event, Done):
                dispatch.done(event.worker, event.record)
            elif isinstance(event, Lost):
                dispatch.lost(event.worker, event.why)
        late = dispatch.overdue(time.monotonic())
        for member in [m for m in self._crew.members if m.number in late]:
            event = self._crew.lose(member, "did not finish in time")
            dispatch.lost(event.worker, event.why)

    def _record(self, result: Result) -> SweepRecord | None:
        if not isinstance(result, Abandoned):
            return result
        name, form = result.assignment.cell
        return replace(
            base_record(self._bench, self._layers[name], form),
            status=Status.FAILED,
            reason=f"given up after {len(result.reasons)} workers: {'; '.join(result.reasons)}"[
                :500
            ],
            remedy="see whether memory is short where workers run; or measure it with "
            "--executor local",
        )

    def describe(self) -> dict[str, Any]:
        """Return what became of the workers: cells by host, who was refused, who was lost."""
        tally = self._crew.tally
        return {
            "executor": "ray",
            "address": self._terms.address,
            "workers": self._size,
            "assignments": dict(tally.cells),
            "refused": dict(tally.refused),
            "lost": list(tally.lost),
        }

    def close(self) -> None:
        """End the workers; shut the cluster down if it was started here."""
        self._open.close()


def _load(cluster: Cluster, bench: Bench, kit: Any, folder: Path) -> Cargo:
    """Put what every worker needs into the object store: once, and read without a copy."""
    ray = cluster.ray
    module = user_module(bench.task)
    if module is not None:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        kit_reference = ray.put(kit)
    finally:
        if module is not None:
            ray.cloudpickle.unregister_pickle_by_value(module)
    activations = [ray.put(kept_of(bench, index)) for index in range(len(bench.replay.batches))]

    @functools.cache
    def files() -> dict[str, Any]:
        return {name: ray.put(array) for name, array in model_files(folder).items()}

    return Cargo(kit_reference, activations, files)
