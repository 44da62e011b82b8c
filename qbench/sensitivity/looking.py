"""A look at a cell: the sweep's measurement on a closed sub-pool, as cheap as it can be.

Sessions have one thread, so several cells are looked at side by side; the layer's outputs are
tapped in the very session that runs, so a look opens one session a changed segment. Both change
rounding and nothing else, and a look decides when a cell stops; it is no record of the full pool.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from qbench.errors import MeasurementError
from qbench.graph.taps import with_taps
from qbench.lowering import lowering_for
from qbench.lowering.treated import treated
from qbench.records import Layer, Layers, Status, SweepRecord, Treatment
from qbench.runtime.ort import open_session
from qbench.sensitivity.cells import Bench, base_record, refuse
from qbench.sensitivity.closeness import Closeness
from qbench.sensitivity.diagnosis import find_non_finite
from qbench.sensitivity.replay import ChangedSegments, Replay
from qbench.sensitivity.subpools import Look, look_batches, look_divergence, make_looks, transfer
from qbench.tasks.base import Array
from qbench.tasks.batches import InputSpec

#: Samples of the looks, where the split has twice as many.
SIZES = (4, 16, 64)


@dataclass(frozen=True, slots=True)
class Feeding:
    """What batches of a graph are made with.

    Attributes:
        specs: Inputs of the graph.
        output: Name of the output that is scored.
        max_tokens: Most positions of a batch.
        pad_id: Token id of padded positions.
        padding: Most padded positions of a batch, as a share of its tokens.
    """

    specs: Sequence[InputSpec]
    output: str
    max_tokens: int = 256
    pad_id: int = 0
    padding: float = 0.25


class Pools:
    """The looks of a sweep, ready to run.

    Args:
        bench: The sweep's bench, whose reference has run.
        layers: All layers of the graph.
        feeding: How batches are made.
        sizes: Samples of each look.
    """

    def __init__(
        self, bench: Bench, layers: Layers, feeding: Feeding, sizes: Sequence[int] = SIZES
    ) -> None:
        """Make the looks' batches, open their replay and run its reference."""
        self.bench, self.sizes = bench, tuple(sizes)
        self.looks: tuple[Look, ...] = make_looks(bench.task, sizes, bench.seed)
        self._replay: Replay | None = None
        self._held: dict[tuple[str, str], tuple[int, Array]] = {}
        if self.looks:
            self._open(layers, feeding)

    @property
    def scales(self) -> tuple[float, ...]:
        """What each look's mean divergence is multiplied with to compare with the full pool's."""
        outputs = self.bench.reference.outputs
        return tuple(transfer(self.bench.task, x, outputs, self.bench.seed) for x in self.looks)

    @property
    def samples(self) -> tuple[int, ...]:
        """Number of samples of each look."""
        return tuple(len(look.samples) for look in self.looks)

    @property
    def replay(self) -> Replay:
        """The replay over the looks' batches.

        Raises:
            MeasurementError: If there are no looks.
        """
        if self._replay is None:
            raise MeasurementError("no part of this task can be measured on its own")
        return self._replay

    def batches_of(self, look: int) -> range:
        """Return the batches of the replay that a look runs, those of earlier looks included."""
        return range(self._ends[look])

    def added_tokens(self, look: int) -> int:
        """Return the positions that a look computes beyond the looks before it."""
        before = self._ends[look - 1] if look else 0
        return sum(b.padded_tokens for b in self.replay.batches[before : self._ends[look]])

    def _open(self, layers: Layers, feeding: Feeding) -> None:
        task, whole = self.bench.task, self.bench.replay
        items = self.looks[-1].items
        batches, self._ends = [], list[int]()
        for look in self.looks:
            own = look_batches(
                task,
                look,
                feeding.specs,
                max_tokens=feeding.max_tokens,
                pad_id=feeding.pad_id,
                padding=feeding.padding,
            )
            batches += [replace(b, rows=np.searchsorted(items, b.rows)) for b in own]
            self._ends.append(len(batches))
        self._replay = whole.beside(batches, feeding.output, threads=1)
        self._reference = self._replay.run_reference()
        self._tapped = self._ends[0] // 2
        self._taps = self._reference_taps(layers)

    def _reference_taps(self, layers: Layers) -> dict[str, Array]:
        """Return the reference's value of every layer's output on one batch, from one run."""
        names = [use.output for layer in layers.layers for use in layer.occurrences]
        self.replay.make_room()
        tapped = with_taps(self.replay.model, names)
        graph = self.replay.chain.settle(tapped.model)
        with open_session(graph, self.replay.settings) as session:
            given = session.run(self.replay.batches[self._tapped].feeds)
        return {name: given[output] for name, output in tapped.outputs.items()}

    def look_at(
        self, layer: Layer, format_name: str, look: int, treatment: Treatment | None = None
    ) -> SweepRecord:
        """Measure a cell on a look's samples; whatever it runs into is its record.

        The record's ``divergence`` is ``None``: what it means for the full pool, the race says.
        """
        started = time.perf_counter()
        base = replace(base_record(self.bench, layer, format_name), treatment=treatment)
        refusal = refuse(self.bench, layer, format_name, treatment)
        if refusal is not None:
            return replace(
                base, status=refusal.status, reason=refusal.reason, remedy=refusal.remedy
            )
        try:
            record = self._measure(layer, base, look)
        except Exception as error:  # a cell's failure is its record: the others go on
            record = replace(
                base,
                status=Status.FAILED,
                reason=f"{type(error).__name__}: {error}"[:500],
                remedy="exclude the layer or the format; the other cells go on",
            )
        return replace(record, wall_s=time.perf_counter() - started)

    def _measure(self, layer: Layer, base: SweepRecord, look: int) -> SweepRecord:
        lowering = treated(lowering_for(base.format, backend=self.bench.backend), base.treatment)
        clips = self.bench.clips
        changed = self.replay.change(layer, lambda m, own: lowering.apply(m, own, clips), taps=True)
        try:
            wrong = [w for m in changed.models.values() if (w := lowering.ensures(m, layer))]
            if wrong:
                raise MeasurementError(f"the lowering did not take: {wrong[0]}")
            if not changed.change.changed:
                raise MeasurementError("the lowering changed nothing: the graph holds no such node")
            key = (layer.name, f"{base.format} {base.variant}".rstrip())
            outputs = self._run(key, changed, look)
            bad = find_non_finite(self.replay, changed, outputs)
            if bad:
                remedy = "keep the layer in high precision"
                return replace(base, status=Status.INVALID, reason=bad, remedy=remedy)
            close = self._closeness(layer, changed)
        finally:
            changed.close()
        now, items = self.looks[look], self.looks[-1].items
        rows = np.searchsorted(items, now.items)
        values = look_divergence(self.bench.task, now, self._reference[rows], outputs[rows])
        return replace(
            base,
            n=len(values),
            weight_bytes=changed.change.weight_bytes,
            block=changed.change.block,
            reason=changed.change.remark,
            sqnr_db=close.sqnr_db,
            cosine=close.cosine,
            samples={look_name(look): tuple(float(v) for v in values)},
        )

    def _run(self, cell: tuple[str, str], changed: ChangedSegments, look: int) -> Array:
        """Return outputs of all looks' items; those of later looks are the reference's.

        What an earlier look at the cell ran is not run again.
        """
        done, outputs = self._held.get(cell, (0, self._reference))
        outputs = outputs.copy()
        for index in self.batches_of(look)[done:]:
            rows = self.replay.batches[index].rows
            outputs[rows] = self.replay.run_one(changed, index)[: len(rows)]
        self._held[cell] = (self._ends[look], outputs)
        return outputs

    def forget(self, cell: tuple[str, str]) -> None:
        """Free what is held of a cell that will not be looked at again."""
        self._held.pop(cell, None)

    def _closeness(self, layer: Layer, changed: ChangedSegments) -> Closeness:
        """Return how close the layer's outputs on one batch are to the reference's."""
        close = Closeness()
        wanted = list(dict.fromkeys(use.output for use in layer.occurrences))
        for index, session in changed.sessions.items():
            names = [name for name in wanted if name in session.outputs]
            if names:
                after = self.replay.run_segment(index, self._tapped, session, names)
                for name in names:
                    close.add(self._taps[name], after[name])
        return close

    def close(self) -> None:
        """Free the sessions."""
        if self._replay is not None:
            self._replay.close()


def look_name(look: int) -> str:
    """Return the name under which a record keeps the divergences of a look's samples."""
    return f"sub_pool_{look + 1}"
