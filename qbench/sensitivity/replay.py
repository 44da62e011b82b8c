"""Suffix replay: a cell runs its own segment changed, and the segments after it unchanged.

Quantizing a layer changes nothing before it. The reference activations at the cuts are kept; a
cell starts from those at the cut before its layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from qbench.graph.segments import (
    Segment,
    choose_cuts,
    inside_layers,
    live_sets,
    make_segments,
    node_costs,
    segment_model,
)
from qbench.lowering import Change
from qbench.records import Layer, Layers
from qbench.runtime.ort import Session, SessionSettings, open_session
from qbench.runtime.probe import annotate, probe_tensors
from qbench.tasks.base import Array
from qbench.tasks.batches import Batch, gather_outputs

Lower = Callable[[ir.Model, Layer], Change]


@dataclass(slots=True)
class ChangedSegments:
    """Sessions of the segments that a cell changes, by segment index.

    Attributes:
        sessions: One session a changed segment.
        models: The changed graph of each.
        change: What the lowering said, summed over segments.
    """

    sessions: dict[int, Session] = field(default_factory=dict)
    models: dict[int, ir.Model] = field(default_factory=dict)
    change: Change = field(default_factory=lambda: Change(False))

    @property
    def first(self) -> int:
        """Index of the first changed segment."""
        return min(self.sessions)

    def close(self) -> None:
        """Free the sessions."""
        for session in self.sessions.values():
            session.close()


class Replay:
    """The reference run, cut in segments, and replays of it with segments changed.

    Args:
        model: The whole graph; element types of its tensors are written into it.
        layers: Its layers; no cut falls inside one.
        batches: Frozen batches of the sweep split.
        settings: Session settings, those of the engine.
        output: Name of the output that is scored.
    """

    def __init__(
        self,
        model: ir.Model,
        layers: Layers,
        batches: Sequence[Batch],
        settings: SessionSettings,
        output: str,
    ) -> None:
        """Cut the graph and open the reference sessions; nothing is run but one probe."""
        self.model, self.batches = model, tuple(batches)
        self._settings, self._output = settings, output
        smallest = min(self.batches, key=lambda batch: batch.padded_tokens)
        facts = probe_tensors(model, smallest.feeds, settings)
        annotate(model, facts)
        live = live_sets(model)
        live_bytes = [sum(facts[n].nbytes for n in names if n in facts) for names in live]
        self.costs = node_costs(model, facts)
        self.cuts = choose_cuts(self.costs, live_bytes, inside_layers(model, layers))
        self.segments: tuple[Segment, ...] = make_segments(model, self.cuts)
        self._home = {name: s.index for s in self.segments for name in s.nodes}
        self._sessions = [open_session(segment_model(model, s), settings) for s in self.segments]
        self._kept: list[dict[str, Array]] = []
        self._reference: list[Array] = []

    def segments_of(self, layer: Layer) -> tuple[int, ...]:
        """Return the indices of the segments that hold nodes or edges of a layer, ascending."""
        names = [*layer.nodes, *(edge.node for edge in layer.edges)]
        return tuple(sorted({self._home[name] for name in names if name in self._home}))

    def work_share(self, layer: Layer) -> float:
        """Return the share of a full pass that replaying a layer costs, by estimated work."""
        first = self.segments_of(layer)[0]
        start = [0, *self.cuts][first]
        return sum(self.costs[start:]) / (sum(self.costs) or 1.0)

    def run_reference(self) -> Array:
        """Run the reference over all batches, keep what crosses the cuts, return its outputs."""
        self._kept, self._reference = [], []
        crossing = {name for s in self.segments for name in s.inputs}
        for batch in self.batches:
            values: dict[str, Array] = dict(batch.feeds)
            for session in self._sessions:
                values.update(session.run(values))
            self._reference.append(values[self._output])
            own = {n: v for n, v in values.items() if n in crossing and n not in batch.feeds}
            self._kept.append(own)
        return gather_outputs(self.batches, self._reference)

    def kept_bytes(self) -> int:
        """Return the bytes of reference activations that are kept."""
        return sum(array.nbytes for kept in self._kept for array in kept.values())

    def change(self, layer: Layer, lower: Lower, taps: bool = False) -> ChangedSegments:
        """Lower a layer in each segment that holds it and open the changed sessions.

        Args:
            layer: The layer.
            lower: The lowering, bound to its clips.
            taps: Whether the layer's outputs become outputs of the changed segments.

        Raises:
            MeasurementError: If the runtime refuses the changed graph.
        """
        changed, stored, remark = ChangedSegments(), 0, ""
        for index in self.segments_of(layer):
            part = segment_model(self.model, self.segments[index])
            if taps:
                tap_outputs(part, layer)
            change = lower(part, layer)
            stored, remark = max(stored, change.weight_bytes), change.remark or remark
            changed.models[index] = part
            changed.sessions[index] = open_session(part, self._settings)
        changed.change = Change(bool(changed.sessions), stored, remark)
        return changed

    def run_changed(self, changed: ChangedSegments) -> Array:
        """Return the outputs of all items with the changed segments in place."""
        outputs = [self._replay(changed, index) for index in range(len(self.batches))]
        return gather_outputs(self.batches, outputs)

    def _replay(self, changed: ChangedSegments, index: int) -> Array:
        batch, first = self.batches[index], changed.first
        values: dict[str, Array] = {**batch.feeds, **self._kept[index]}
        last = max(changed.sessions)
        for segment in self.segments[first:]:
            session = changed.sessions.get(segment.index, self._sessions[segment.index])
            made = session.run(values, segment.outputs)
            values.update(made)
            if segment.index >= last and self._same_as_reference(segment, values, index):
                return self._reference[index]
        return values[self._output]

    def _same_as_reference(self, segment: Segment, values: Mapping[str, Array], index: int) -> bool:
        """Whether all that goes on from here equals the reference, bit for bit."""
        if segment.index + 1 >= len(self.segments):
            return False
        kept = self._kept[index]
        return all(
            np.array_equal(values[name], kept[name]) for name in segment.outputs if name in kept
        )

    def run_segment(
        self, index: int, batch: int, session: Session | None = None
    ) -> dict[str, Array]:
        """Run one segment on the kept activations of one batch; the reference's by default."""
        values = {**self.batches[batch].feeds, **self._kept[batch]}
        return (session or self._sessions[index]).run(values)

    def open_tapped(self, index: int, layer: Layer) -> Session:
        """Open the reference's segment with the layer's outputs as extra outputs."""
        part = segment_model(self.model, self.segments[index])
        tap_outputs(part, layer)
        return open_session(part, self._settings)

    def close(self) -> None:
        """Free every session and the kept activations."""
        for session in self._sessions:
            session.close()
        self._kept, self._reference = [], []


def tap_outputs(part: ir.Model, layer: Layer) -> None:
    """Make the layer's outputs outputs of a graph, those that it holds and does not give yet."""
    given = {v.name for v in part.graph.outputs}
    made = {v.name: v for node in part.graph for v in node.outputs}
    for use in layer.occurrences:
        if use.output in made and use.output not in given:
            part.graph.outputs.append(made[use.output])
            given.add(use.output)
