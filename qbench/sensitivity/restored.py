"""The other view: all layers low, one restored; and its interaction with the single view.

Restoring a layer changes nothing before it, so it is replayed like a cell of the sweep: the
activations of the all-low run at the cuts are kept, and a layer is restored in its own segment,
whose other layers are lowered as before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from qbench.backends import in_uniform
from qbench.graph.content import drop_weights, release_weights
from qbench.lowering import lowering_for
from qbench.records import Estimate, Layer, RestoredRecord
from qbench.runtime.ort import Session, open_session
from qbench.sensitivity.activations import Activations
from qbench.sensitivity.cells import Bench, refuse
from qbench.statistics import difference_interval, mean_interval
from qbench.tasks.base import Array
from qbench.tasks.batches import gather_outputs


def lowerable(bench: Bench, layers: Sequence[Layer], format_name: str) -> tuple[Layer, ...]:
    """Return the layers that can take a format and that a uniform engine of it gives it to."""
    return tuple(
        layer
        for layer in layers
        if in_uniform(layer.kind, format_name, bench.backend)
        and refuse(bench, layer, format_name) is None
    )


def lower_layers(
    graph: ir.Model, bench: Bench, layers: Sequence[Layer], format_name: str
) -> ir.Model:
    """Give layers a format in place, in the graph's order, and return the graph."""
    lowering = lowering_for(format_name, backend=bench.backend)
    for layer in layers:
        lowering.apply(graph, layer, bench.clips)
    return graph


class Restoring:
    """The all-low run, cut in segments, and replays of it with one layer restored.

    Args:
        bench: The sweep's bench, whose reference has run.
        layers: Layers to lower, in topological order (``lowerable``).
        format_name: Their format.
        output: Name of the output that is scored.
    """

    def __init__(
        self, bench: Bench, layers: Sequence[Layer], format_name: str, output: str
    ) -> None:
        """Lower every segment and run them all, keeping what crosses the cuts."""
        self._bench, self._format, self._output = bench, format_name, output
        self.layers = tuple(layers)
        replay = bench.replay
        self._homes = {layer.name: replay.segments_of(layer) for layer in self.layers}
        self._last = next(
            (s.index for s in replay.segments if output in s.outputs), len(replay.segments) - 1
        )
        replay.make_room()  # the reference's sessions are not needed here
        self._sessions = [self._open(segment.index) for segment in replay.segments]
        limits = replay.limits
        self._kept = Activations(limits.budget(replay.reserved_bytes()), limits.folder)
        self.outputs = self._run_all()
        self._divergence = bench.task.divergence(bench.reference.outputs, self.outputs)

    @property
    def all_low(self) -> Estimate:
        """Divergence of the all-low graph from the reference."""
        return mean_interval(self._divergence, seed=self._bench.seed)

    def _open(self, index: int, without: str = "") -> Session:
        replay = self._bench.replay
        own = [x for x in self.layers if index in self._homes[x.name] and x.name != without]
        part = lower_layers(replay.part(index), self._bench, own, self._format)
        session = open_session(replay.chain.settle(part), replay.settings)
        release_weights(part)
        drop_weights(part)
        return session

    def _run_all(self) -> Array:
        replay, outputs = self._bench.replay, []
        crossing = {name for s in replay.segments for name in s.inputs}
        for batch in replay.batches:
            values: dict[str, Array] = dict(batch.feeds)
            for session in self._sessions[: self._last + 1]:
                values.update(session.run(values))
            outputs.append(values[self._output])
            self._kept.append(
                {n: v for n, v in values.items() if n in crossing and n not in batch.feeds}
            )
        return gather_outputs(replay.batches, outputs)

    def run_restored(self, layer: Layer) -> Array:
        """Return the outputs of all items with one layer in high precision, the others low."""
        replay, homes = self._bench.replay, self._homes[layer.name]
        restored = {index: self._open(index, without=layer.name) for index in homes}
        outputs = []
        try:
            for place, batch in enumerate(replay.batches):
                values: dict[str, Array] = {**batch.feeds, **self._kept.batch(place)}
                for index in range(min(homes), self._last + 1):
                    values.update(restored.get(index, self._sessions[index]).run(values))
                outputs.append(values[self._output])
        finally:
            for session in restored.values():
                session.close()
        return gather_outputs(replay.batches, outputs)

    def measure(self, layer: Layer, single: Sequence[float] = ()) -> RestoredRecord:
        """Return the record of one restored layer.

        Args:
            layer: A layer that is low here.
            single: Divergence of each sample with this layer alone low; empty where it is not
                known.
        """
        bench, seed = self._bench, self._bench.seed
        outputs = self.run_restored(layer)
        divergence = bench.task.divergence(bench.reference.outputs, outputs)
        answers = bench.task.score(outputs, bench.reference.outputs).answers
        gain = self._divergence - divergence
        alone = np.asarray(single, dtype=np.float64)
        known = len(alone) == len(gain)
        return RestoredRecord(
            layer=layer.name,
            kind=str(layer.kind),
            format=self._format,
            divergence=mean_interval(divergence, seed=seed),
            gain=difference_interval(gain, seed=seed),
            single=mean_interval(alone, seed=seed) if known else None,
            interaction=difference_interval(alone - gain, seed=seed) if known else None,
            flip_rate=float(np.mean(answers != bench.reference.scores.answers)),
            samples=tuple(float(v) for v in divergence),
        )

    def close(self) -> None:
        """Free the sessions and the kept activations; the bench stays open."""
        for session in self._sessions:
            session.close()
        self._kept.close()
