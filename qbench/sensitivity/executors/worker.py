"""A worker: it opens a kit once, keeps the sessions, and measures what it is given.

Nothing in here knows who calls it; Ray makes an actor of ``Worker``.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qbench.backends import backend_named
from qbench.errors import MeasurementError, ModelError
from qbench.graph.model import Model, open_stored
from qbench.lowering.overflow import keep_overflowing
from qbench.records import SweepRecord
from qbench.sensitivity.activations import Activations, Limits
from qbench.sensitivity.cells import Bench
from qbench.sensitivity.executors.base import Assignment, Cell, measure
from qbench.sensitivity.executors.kit import (
    Kit,
    Opened,
    WorkerFacts,
    limit_blas,
    own_facts,
    write_files,
)
from qbench.sensitivity.looking import Pools
from qbench.sensitivity.replay import Replay
from qbench.sensitivity.timing import timing_replay
from qbench.tasks.base import Array

#: Cells whose looks' outputs a worker keeps for their next look.
_HELD = 64

#: Returns what a reference into the store stands for.
Fetch = Callable[[Any], Any]


class StoredActivations(Activations):
    """Reference activations that lie in a store of the cluster, batch by batch.

    Args:
        fetch: Returns the arrays behind a reference.
        references: One a batch.
        output: Name of the scored output, which is kept apart.
    """

    def __init__(self, fetch: Fetch, references: Sequence[Any], output: str) -> None:
        """Nothing is fetched yet."""
        super().__init__(0)
        self._fetch, self._references, self._output = fetch, list(references), output
        self._last: tuple[int, Mapping[str, Array]] = (-1, {})
        #: Why the store could not give a batch; "" while it can.
        self.broken = ""

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._references)

    def batch(self, index: int) -> dict[str, Array]:
        """Return the arrays of a batch; they are read-only, and no copy where the store is here."""
        return {n: v for n, v in self._arrays(index).items() if n != self._output}

    def scored(self, index: int) -> Array:
        """Return a copy of the scored output of a batch: a view would keep all of it in memory."""
        return self._arrays(index)[self._output].copy()

    def _arrays(self, index: int) -> Mapping[str, Array]:
        if self._last[0] != index:
            try:
                self._last = index, self._fetch(self._references[index])
            except Exception as error:
                self.broken = f"{type(error).__name__}: {error}"
                raise
        return self._last[1]


class Worker:
    """Measures cells of one sweep."""

    def __init__(self) -> None:
        """Open nothing yet."""
        self._bench: Bench | None = None
        self._pools: Pools | None = None
        self._place: tempfile.TemporaryDirectory[str] | None = None
        self._looked: OrderedDict[Cell, None] = OrderedDict()

    def hello(self) -> WorkerFacts:
        """Return what decides whether its numbers are the run's."""
        return own_facts()

    def ping(self) -> bool:
        """Answer, also while a cell is measured."""
        return True

    def open(
        self,
        kit: Kit,
        references: Sequence[Any],
        files: Mapping[str, Any] | None = None,
        fetch: Fetch | None = None,
    ) -> Opened:
        """Open the sessions, take the reference's activations, and check both on one batch.

        Args:
            kit: The sweep.
            references: Where the activations of each batch lie.
            files: Where the model's files lie, if its folder cannot be reached.
            fetch: Returns what is behind a reference; Ray's own by default.
        """
        fetch = fetch or _from_ray
        limit_blas(kit.blas_threads)
        model = self._model(kit, files and {name: fetch(files[name]) for name in files})
        if model is None:
            return Opened(needs_files=True)
        limits = Limits(max_segments=kit.max_segments)
        backend = backend_named(kit.backend)
        graph = keep_overflowing(model.ir, kit.layers, kit.ranges.values(), backend)
        replay = Replay(graph, kit.layers, kit.batches, kit.settings, kit.output, limits)
        if tuple(replay.cuts) != kit.cuts:
            return Opened(f"it cuts the graph at {replay.cuts}, and {list(kit.cuts)} is asked for")
        self._stored = StoredActivations(fetch, references, kit.output)
        outputs = [self._stored.scored(index) for index in range(len(kit.batches))]
        replay.take_reference(self._stored, outputs)
        refusal = check_itself(replay)
        if refusal:
            return Opened(refusal)
        self._layers = kit.layers.by_name()
        self._bench = Bench(
            replay,
            kit.task,
            kit.reference,
            backend,
            kit.clips,
            kit.ranges,
            kit.seed,
            kit.family,
            timing=timing_replay(replay, kit.timed),
        )
        if kit.feeding is not None:
            self._pools = Pools(self._bench, kit.layers, kit.feeding, kit.looks)
        return Opened()

    def _model(self, kit: Kit, files: Mapping[str, Array] | None) -> Model | None:
        folder = Path(kit.folder)
        if files is not None:
            self._place = tempfile.TemporaryDirectory(prefix="qbench-model-")
            folder = Path(self._place.name)
            write_files(files, folder)
        try:
            model = open_stored(folder)
        except ModelError:
            return None
        return model if model.sha256 == kit.model_sha256 else None

    def measure(self, assignment: Assignment) -> SweepRecord:
        """Measure one assignment.

        Raises:
            MeasurementError: If the activations could not be had: that says nothing of the cell.
        """
        if self._bench is None:
            raise MeasurementError("no kit was opened")
        if assignment.look is not None and self._pools is not None:
            self._looked[assignment.cell] = None
            self._looked.move_to_end(assignment.cell)
            if len(self._looked) > _HELD:
                self._pools.forget(self._looked.popitem(last=False)[0])
        record = measure(self._bench, self._pools, self._layers, assignment)
        if self._stored.broken:
            raise MeasurementError(f"the reference's activations are gone: {self._stored.broken}")
        return record

    def close(self) -> None:
        """Free the sessions, and the model's files that were written here."""
        if self._pools is not None:
            self._pools.close()
        if self._bench is not None:
            self._bench.close()
        if self._place is not None:
            self._place.cleanup()
        self._bench = self._pools = self._place = None


def check_itself(replay: Replay) -> str:
    """Return where this process gives another reference than the one it was given; "" if equal.

    Each segment is run on the activations of one batch of middle length. Machines of one type give
    the same numbers to the last bit.
    """
    order = np.argsort([batch.padded_tokens for batch in replay.batches], kind="stable")
    batch = int(order[len(order) // 2])
    expected = replay.start_values(batch)
    for segment in replay.segments:
        for name, array in replay.run_segment(segment.index, batch).items():
            if name in expected and not np.array_equal(array, expected[name], equal_nan=True):
                top = float(np.abs(expected[name].astype(np.float64)).max()) or 1.0
                difference = np.abs(array.astype(np.float64) - expected[name])
                return (
                    f"its own run of the reference differs in {name!r} by "
                    f"{float(difference.max()) / top:.2g} of the largest element"
                )
    return ""


def _from_ray(reference: Any) -> Any:
    from qbench.gate import require

    ray: Any = require("ray")
    return ray.get(reference)
