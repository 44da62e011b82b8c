"""Suffix replay: a cell runs its own segment changed, and the segments after it unchanged.

Quantizing a layer changes nothing before it. The reference activations at the cuts are kept; a
cell starts from those at the cut before its layer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from qbench.graph.content import drop_weights, release_weights
from qbench.graph.segments import BORDER_KEY, Segment
from qbench.lowering import Change
from qbench.records import Layer, Layers
from qbench.runtime.memory import return_free_memory
from qbench.runtime.ort import Session, SessionSettings, open_session
from qbench.sensitivity.activations import Activations, Limits
from qbench.sensitivity.chain import Chain
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
        return min(self.sessions, default=0)

    def close(self) -> None:
        """Free the sessions, and the weights of the graphs."""
        for session in self.sessions.values():
            session.close()
        for model in self.models.values():
            drop_weights(model)
        self.models = {}


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
        limits: What it may take of segments, memory and disk.
    """

    def __init__(
        self,
        model: ir.Model,
        layers: Layers,
        batches: Sequence[Batch],
        settings: SessionSettings,
        output: str,
        limits: Limits | None = None,
    ) -> None:
        """Cut the graph; nothing is run but one probe."""
        smallest = min(batches, key=lambda batch: batch.padded_tokens)
        limits = limits or Limits()
        chain = Chain(model, layers, smallest.feeds, settings, limits.max_segments)
        self._set_up(chain, batches, output, limits)
        self._owns_chain = True

    def _set_up(self, chain: Chain, batches: Sequence[Batch], output: str, limits: Limits) -> None:
        self.chain, self.batches, self.output, self.limits = chain, tuple(batches), output, limits
        self._last, self._carried = _what_matters(chain.segments, output)
        self._kept = Activations(0)
        self._reference: list[Array] = []
        self._segment_seconds: list[Array] = []
        self._taps = _Taps()

    def beside(self, batches: Sequence[Batch], output: str, threads: int) -> Replay:
        """Return a replay of other batches over the same cuts.

        It shares the sessions where the number of threads is the same; close it first.
        """
        other = Replay.__new__(Replay)
        chain = self.chain.with_settings(replace(self.settings, threads=threads))
        other._set_up(chain, batches, output, self.limits)
        other._owns_chain = chain is not self.chain
        return other

    @property
    def model(self) -> ir.Model:
        """The whole graph, with the shapes that a run told."""
        return self.chain.model

    @property
    def settings(self) -> SessionSettings:
        """Session settings of every segment."""
        return self.chain.settings

    @property
    def cuts(self) -> list[int]:
        """Positions of the cuts."""
        return self.chain.cuts

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, in order."""
        return self.chain.segments

    def segments_of(self, layer: Layer) -> tuple[int, ...]:
        """Return the indices of the segments that hold nodes or edges of a layer, ascending."""
        return self.chain.segments_of(layer)

    def run_reference(self) -> Array:
        """Run the reference over all batches, keep what crosses the cuts, return its outputs.

        Raises:
            InputError: If activations go to the disk and it is full.
        """
        sessions = [self.chain.session(s.index) for s in self.segments]
        self._kept.close()
        reserved = self.reserved_bytes()
        self._kept = Activations(self.limits.budget(reserved), self.limits.folder)
        self._reference, timed = [], []
        crossing = {name for s in self.segments for name in s.inputs}
        try:
            for batch, values, ticks in self._passes(sessions):
                timed.append(np.diff(ticks))
                self._reference.append(self._scored(values))
                own = {n: v for n, v in values.items() if n in crossing and n not in batch.feeds}
                self._kept.append({n: v for n, v in own.items() if n != self.output})
            self._fit(reserved)
        except BaseException:
            self._kept.close()
            raise
        self._segment_seconds.append(np.sum(timed, axis=0))
        return gather_outputs(self.batches, self._reference)

    def _passes(
        self, sessions: Sequence[Session]
    ) -> Iterator[tuple[Batch, dict[str, Array], list[float]]]:
        """Yield each batch with all that the segments gave and when, as many at once as cells."""

        def one(batch: Batch) -> tuple[Batch, dict[str, Array], list[float]]:
            values: dict[str, Array] = dict(batch.feeds)
            ticks = [time.perf_counter()]
            for session in sessions:
                values.update(session.run(values))
                ticks.append(time.perf_counter())
            return batch, values, ticks

        abreast = 1 if self.limits.memory_limit is not None else max(1, self.limits.cells)
        with ThreadPoolExecutor(abreast) as pool:
            for start in range(0, len(self.batches), abreast):
                yield from pool.map(one, self.batches[start : start + abreast])

    def take_reference(self, kept: Activations, outputs: Sequence[Array]) -> None:
        """Take a reference that ran elsewhere: what it kept, and its scored outputs, by batch."""
        self._kept.close()
        self._kept, self._reference = kept, list(outputs)

    def _scored(self, values: Mapping[str, Array]) -> Array:
        """Return the scored output; one that no node gives is a constant of the graph."""
        if self.output in values:
            return values[self.output]
        constant = self.model.graph.initializers[self.output].const_value
        assert constant is not None
        return np.asarray(constant.numpy())

    def _fit(self, reserved: int) -> None:
        """Move activations to the disk until cells fit beside what the reference's run left."""
        if self.limits.excess(reserved):
            release_weights(self.model)
            return_free_memory()
        excess = self.limits.excess(reserved)
        if excess:
            self._kept.spill(excess)
            return_free_memory()

    @property
    def activation_bytes(self) -> tuple[int, int]:
        """Bytes of the activations that are kept: in memory, and on the disk."""
        return self._kept.memory_bytes, self._kept.disk_bytes

    def reserved_bytes(self) -> int:
        """Return the bytes that the cells in work take beside the reference.

        Each loads its own segment, and its lowering makes copies of one weight.
        """
        own = self.chain.largest_segment_bytes() + 2 * self.chain.largest_weight_bytes()
        return self.limits.cells * own

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
        """Whether a tensor of the graph is in half precision, as it is run."""
        if self.chain.has_islands:
            return True
        halves = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        return any(v.dtype in halves for node in self.model.graph for v in node.outputs)

    def change(self, layer: Layer, lower: Lower, taps: bool = False) -> ChangedSegments:
        """Lower a layer in each segment that holds it and open the changed sessions.

        Args:
            layer: The layer.
            lower: The lowering, bound to its clips.
            taps: Whether the layer's outputs become outputs of the changed segments.

        Raises:
            MeasurementError: If the runtime refuses the changed graph.
        """
        changed = ChangedSegments()
        try:
            for index in self.segments_of(layer):
                part = self.part(index)
                if taps:
                    tap_outputs(part, layer)
                changed.change = changed.change.with_part(lower(part, layer))
                changed.models[index] = self.chain.settle(part)
                changed.sessions[index] = open_session(part, self.settings)
                release_weights(part)
        except BaseException:
            changed.close()
            raise
        return changed

    def run_changed(self, changed: ChangedSegments) -> Array:
        """Return the outputs of all items with the changed segments in place."""
        outputs = [self._replay(changed, index) for index in range(len(self.batches))]
        return gather_outputs(self.batches, outputs)

    def run_one(self, changed: ChangedSegments, batch: int) -> Array:
        """Return the output of one batch with the changed segments in place."""
        return self._replay(changed, batch)

    def _replay(self, changed: ChangedSegments, index: int) -> Array:
        if not changed.sessions:
            return self._reference[index]
        values = self.start_values(index)
        kept, made = dict(values), set[str]()
        for segment in self.segments[changed.first : self._last + 1]:
            session = changed.sessions.get(segment.index) or self.chain.session(segment.index)
            values.update(session.run(values, segment.outputs))
            made.update(segment.outputs)
            carried = self._carried[segment.index]
            if segment.index >= max(changed.sessions) and all(
                np.array_equal(values[name], kept[name]) for name in carried if name in made
            ):
                return self._reference[index]  # all that goes on from here is the reference's
        return values[self.output]

    def part(self, index: int) -> ir.Model:
        """Return a copy of one segment of the reference; its weights are shared."""
        return self.chain.part(index)

    def start_values(self, batch: int) -> dict[str, Array]:
        """Return the feeds of one batch and all that the reference keeps of it."""
        own = {self.output: self._reference[batch]}
        return {**self.batches[batch].feeds, **self._kept.batch(batch), **own}

    def run_segment(
        self,
        index: int,
        batch: int,
        session: Session | None = None,
        outputs: Sequence[str] | None = None,
    ) -> dict[str, Array]:
        """Run one segment on the kept activations of one batch; the reference's by default."""
        return (session or self.chain.session(index)).run(self.start_values(batch), outputs)

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
            with open_session(self.chain.settle(part), self.settings) as session:
                taps.kept[index] = [
                    self.run_segment(index, batch, session, names) if names else {}
                    for batch in batches
                ]
        return taps.kept[index]

    def make_room(self) -> None:
        """Close the sessions of a large model, for work on the whole graph; they open again."""
        self.chain.make_room()

    def close(self) -> None:
        """Free every session of its own and the kept activations, the file of those too."""
        if self._owns_chain:
            self.chain.close()
        self._kept.close()
        self._reference, self._taps = [], _Taps()


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
