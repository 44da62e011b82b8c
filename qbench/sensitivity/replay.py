"""Suffix replay: a cell runs its own segment changed, and the segments after it unchanged.

Quantizing a layer changes nothing before it. The reference activations at the cuts are kept; a
cell starts from those at the cut before its layer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from qbench.graph.segments import (
    BORDER_KEY,
    Segment,
    choose_cuts,
    inside_layers,
    live_sets,
    make_segments,
    node_costs,
    read_names,
    segment_model,
)
from qbench.graph.shapes import infer_shapes
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


class _Taps(threading.local):
    """The reference's outputs of the layer that a thread looked at last, by segment."""

    def __init__(self) -> None:
        self.key: tuple[str, tuple[int, ...]] = ("", ())
        self.kept: dict[int, list[dict[str, Array]]] = {}


class Replay:
    """The reference run, cut in segments, and replays of it with segments changed.

    Args:
        model: The whole graph; it is not changed.
        layers: Its layers; no cut falls inside one.
        batches: Frozen batches of the sweep split.
        settings: Session settings, those of the engine.
        output: Name of the output that is scored.
        max_segments: Most segments to cut the graph into.
    """

    def __init__(
        self,
        model: ir.Model,
        layers: Layers,
        batches: Sequence[Batch],
        settings: SessionSettings,
        output: str,
        max_segments: int = 32,
    ) -> None:
        """Cut the graph and open the reference sessions; nothing is run but one probe."""
        self.model, self.batches = model.clone(), tuple(batches)
        self.settings, self._output = settings, output
        smallest = min(self.batches, key=lambda batch: batch.padded_tokens)
        model = self.model
        infer_shapes(model)
        facts = probe_tensors(model, smallest.feeds, settings)
        annotate(model, facts)
        live = live_sets(model)
        live_bytes = [sum(facts[n].nbytes for n in names if n in facts) for names in live]
        inner = inside_layers(model, layers)
        self.cuts = choose_cuts(node_costs(model, facts), live_bytes, inner, max_segments)
        self.segments: tuple[Segment, ...] = make_segments(model, self.cuts)
        self._home = {name: s.index for s in self.segments for name in s.nodes}
        self._last, self._carried = _what_matters(self.segments, output)
        self._sessions = [open_session(segment_model(model, s), settings) for s in self.segments]
        self._kept: list[dict[str, Array]] = []
        self._reference: list[Array] = []
        self._segment_seconds: list[Array] = []
        self._taps = _Taps()

    def segments_of(self, layer: Layer) -> tuple[int, ...]:
        """Return the indices of the segments that hold nodes or edges of a layer, ascending."""
        names = [*layer.nodes, *(edge.node for edge in layer.edges)]
        return tuple(sorted({self._home[name] for name in names if name in self._home}))

    def run_reference(self) -> Array:
        """Run the reference over all batches, keep what crosses the cuts, return its outputs."""
        self._kept, self._reference, timed = [], [], []
        crossing = {name for s in self.segments for name in s.inputs} | {self._output}
        for batch in self.batches:
            values: dict[str, Array] = dict(batch.feeds)
            ticks = [time.perf_counter()]
            for session in self._sessions:
                values.update(session.run(values))
                ticks.append(time.perf_counter())
            timed.append(np.diff(ticks))
            self._reference.append(values[self._output])
            own = {n: v for n, v in values.items() if n in crossing and n not in batch.feeds}
            self._kept.append(own)
        self._segment_seconds.append(np.sum(timed, axis=0))
        return gather_outputs(self.batches, self._reference)

    def reference_output(self, batch: int) -> Array:
        """Return the scored output of the chained reference for one batch."""
        return self._reference[batch]

    def suffix_seconds(self) -> Array:
        """Return the seconds from each segment to the end, each time that the reference ran.

        Returns:
            Shape [runs, segments].
        """
        return np.cumsum(np.array(self._segment_seconds)[:, ::-1], axis=1)[:, ::-1]

    @property
    def holds_half(self) -> bool:
        """Whether a tensor of the graph is in half precision."""
        halves = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        return any(v.dtype in halves for node in self.model.graph for v in node.outputs)

    def largest_segment_bytes(self) -> int:
        """Return the bytes of weights in the heaviest segment: a changed one is loaded beside."""
        sizes = [0]
        initializers = self.model.graph.initializers
        reads = {str(node.name): read_names(node) for node in self.model.graph}
        for segment in self.segments:
            names = {name for node in segment.nodes for name in reads[node]}
            weights = [initializers[name].const_value for name in names if name in initializers]
            sizes.append(sum(weight.nbytes for weight in weights if weight is not None))
        return max(sizes)

    def change(self, layer: Layer, lower: Lower, taps: bool = False) -> ChangedSegments:
        """Lower a layer in each segment that holds it and open the changed sessions.

        Args:
            layer: The layer.
            lower: The lowering, bound to its clips.
            taps: Whether the layer's outputs become outputs of the changed segments.

        Raises:
            MeasurementError: If the runtime refuses the changed graph.
        """
        changed, stored, remark, lowered = ChangedSegments(), 0, "", False
        for index in self.segments_of(layer):
            part = self.part(index)
            if taps:
                tap_outputs(part, layer)
            change = lower(part, layer)
            lowered = lowered or change.changed
            stored, remark = max(stored, change.weight_bytes), change.remark or remark
            changed.models[index] = part
            changed.sessions[index] = open_session(part, self.settings)
        changed.change = Change(lowered, stored, remark)
        return changed

    def run_changed(self, changed: ChangedSegments) -> Array:
        """Return the outputs of all items with the changed segments in place."""
        outputs = [self._replay(changed, index) for index in range(len(self.batches))]
        return gather_outputs(self.batches, outputs)

    def run_one(self, changed: ChangedSegments, batch: int) -> Array:
        """Return the output of one batch with the changed segments in place."""
        return self._replay(changed, batch)

    def _replay(self, changed: ChangedSegments, index: int) -> Array:
        kept, values = self._kept[index], self.start_values(index)
        made: set[str] = set()
        for segment in self.segments[changed.first : self._last + 1]:
            session = changed.sessions.get(segment.index, self._sessions[segment.index])
            values.update(session.run(values, segment.outputs))
            made.update(segment.outputs)
            carried = self._carried[segment.index]
            if segment.index >= max(changed.sessions) and all(
                np.array_equal(values[name], kept[name]) for name in carried if name in made
            ):
                return self._reference[index]  # all that goes on from here is the reference's
        return values.get(self._output, self._reference[index])

    def part(self, index: int) -> ir.Model:
        """Return a copy of one segment of the reference; its weights are shared."""
        return segment_model(self.model, self.segments[index])

    def start_values(self, batch: int) -> dict[str, Array]:
        """Return the feeds of one batch and all that the reference keeps of it."""
        return {**self.batches[batch].feeds, **self._kept[batch]}

    def run_segment(
        self,
        index: int,
        batch: int,
        session: Session | None = None,
        outputs: Sequence[str] | None = None,
    ) -> dict[str, Array]:
        """Run one segment on the kept activations of one batch; the reference's by default."""
        return (session or self._sessions[index]).run(self.start_values(batch), outputs)

    def reference_taps(
        self, index: int, layer: Layer, batches: Sequence[int]
    ) -> list[dict[str, Array]]:
        """Return the reference's values of the layer's outputs in one segment, batch by batch.

        The last layer's are kept, for each thread: its other formats ask for them next.
        """
        taps, key = self._taps, (layer.name, tuple(batches))
        if taps.key != key:
            taps.key, taps.kept = key, {}
        if index not in taps.kept:
            part = self.part(index)
            names = tap_outputs(part, layer)
            with open_session(part, self.settings) as session:
                taps.kept[index] = [
                    self.run_segment(index, batch, session, names) if names else {}
                    for batch in batches
                ]
        return taps.kept[index]

    def close(self) -> None:
        """Free every session and the kept activations."""
        for session in self._sessions:
            session.close()
        self._kept, self._reference, self._taps = [], [], _Taps()


def _what_matters(
    segments: Sequence[Segment], output: str
) -> tuple[int, tuple[frozenset[str], ...]]:
    """Return the last segment that the output needs, and what later ones need after each."""
    last = next((s.index for s in segments if output in s.outputs), len(segments) - 1)
    after: frozenset[str] = frozenset({output})
    carried: list[frozenset[str]] = [after] * len(segments)
    for segment in reversed(segments[: last + 1]):
        carried[segment.index] = after
        after = (after - set(segment.outputs)) | set(segment.inputs)
    return last, tuple(carried)


def tap_outputs(part: ir.Model, layer: Layer) -> list[str]:
    """Make the layer's outputs outputs of a graph, and return those that it holds."""
    given = {v.name for v in part.graph.outputs}
    for value in part.graph.outputs:
        if any(use.output == value.name for use in layer.occurrences):
            value.metadata_props.pop(BORDER_KEY, None)
    made = {v.name: v for node in part.graph for v in node.outputs}
    for use in layer.occurrences:
        if use.output in made and use.output not in given:
            part.graph.outputs.append(made[use.output])
            given.add(use.output)
    return [name for name in dict.fromkeys(u.output for u in layer.occurrences) if name in made]
