"""The chain: the graph cut into segments, and a session of each as it is in the reference.

Chained, the segments give what the whole graph gives. Of the unchanged graph there is one session a
segment, opened when it is first needed, and every replay over the same cuts shares it. On a backend
whose high precision is fp16 each segment is made an island before it is run: what crosses a cut is
rounded to fp16 already, and so is the same to the next segment as if there were no cut.

NOTE: sessions pack the weights of their products (a copy each) and share no packed weight: ONNX
Runtime offers that to C++ alone. Without packing they would share the mapped file, but products of
matrices then sum in another order and take longer, weight-only kernels change what they compute,
and a latency would be that of something that is never shipped. So the unchanged model is packed
once, and a cell packs its own segment for as long as it is measured.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from qbench.backends import BACKENDS, Variant
from qbench.graph.content import release_weights
from qbench.graph.segments import (
    Segment,
    choose_cuts,
    inside_layers,
    live_sets,
    make_segments,
    node_costs,
    read_names,
    segment_model,
    unknown_borders,
)
from qbench.graph.shapes import infer_shapes
from qbench.lowering.islands import carried_fills, make_islands
from qbench.records import Layer, Layers
from qbench.runtime.memory import return_free_memory
from qbench.runtime.ort import Session, SessionSettings, open_session
from qbench.runtime.probe import annotate, probe_tensors

#: Models below this many bytes of weights are not worth giving memory back for.
LARGE_BYTES = 128 << 20


class Chain:
    """A graph cut into segments, with the sessions of its unchanged segments.

    Args:
        model: The whole graph; it is not changed.
        layers: Its layers; no cut falls inside one.
        feeds: A small real batch, which tells how large tensors are.
        settings: Session settings.
        max_segments: Most segments to cut the graph into.
    """

    def __init__(
        self,
        model: ir.Model,
        layers: Layers,
        feeds: Mapping[str, np.ndarray],
        settings: SessionSettings,
        max_segments: int = 32,
    ) -> None:
        """Cut the graph; one probe is run and no session stays open."""
        self.model, self.settings, self.layers = model.clone(), settings, layers
        infer_shapes(self.model)
        self._fills = carried_fills(self.model) if self.has_islands else {}
        facts = probe_tensors(self.model, feeds, settings)
        annotate(self.model, facts)
        live = live_sets(self.model)
        live_bytes = [sum(facts[n].nbytes for n in names if n in facts) for names in live]
        forbidden = inside_layers(self.model, layers) | unknown_borders(live, facts)
        costs = node_costs(self.model, facts)
        self.cuts = choose_cuts(costs, live_bytes, forbidden, max_segments)
        self._set_up()

    def _set_up(self) -> None:
        self.segments: tuple[Segment, ...] = make_segments(self.model, self.cuts)
        self._home = {name: s.index for s in self.segments for name in s.nodes}
        self._sessions: list[Session | None] = [None] * len(self.segments)
        self._parts: list[ir.Model | None] = [None] * len(self.segments)
        self._lock = threading.Lock()

    def with_settings(self, settings: SessionSettings) -> Chain:
        """Return a chain over the same cuts under other session settings; itself if the same."""
        if settings == self.settings:
            return self
        other = Chain.__new__(Chain)
        other.model, other.settings, other.cuts = self.model, settings, self.cuts
        other.layers, other._fills = self.layers, self._fills
        other._set_up()
        return other

    def segments_of(self, layer: Layer) -> tuple[int, ...]:
        """Return the indices of the segments that hold nodes or edges of a layer, ascending."""
        names = [*layer.nodes, *(edge.node for edge in layer.edges)]
        return tuple(sorted({self._home[name] for name in names if name in self._home}))

    def part(self, index: int) -> ir.Model:
        """Return a copy of one segment; its weights are shared."""
        part = self._parts[index]
        if part is None:
            part = self._parts[index] = segment_model(self.model, self.segments[index])
        return part.clone()

    @property
    def has_islands(self) -> bool:
        """Whether the backend's graphs hold fp16 as islands."""
        return BACKENDS[self.settings.backend].variant is Variant.ISLANDS

    def settle(self, part: ir.Model) -> ir.Model:
        """Give a segment, each of its layers in its format, the backend's high precision.

        It is done in place, and last; the same graph is returned.
        """
        if self.has_islands:
            high = BACKENDS[self.settings.backend].high_precision
            formats = {layer.name: high for layer in self.layers.layers}
            whole = high == "fp16"
            make_islands(part, self.layers, formats, whole=whole, fills=self._fills)
            RemoveUnusedNodesPass()(part)
        return part

    def session(self, index: int) -> Session:
        """Return the session of an unchanged segment; it is opened the first time."""
        session = self._sessions[index]
        if session is not None:
            return session
        with self._lock:
            session = self._sessions[index]
            if session is None:
                part = self.settle(self.part(index))
                session = self._sessions[index] = open_session(part, self.settings)
        return session

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(_nbytes(value) for value in self.model.graph.initializers.values())

    @property
    def is_large(self) -> bool:
        """Whether the model is so large that no second copy of it should be in memory."""
        return self.weight_bytes >= LARGE_BYTES

    def largest_segment_bytes(self) -> int:
        """Return the bytes of weights in the heaviest segment: a changed one is loaded beside."""
        initializers = self.model.graph.initializers
        reads = {str(node.name): read_names(node) for node in self.model.graph}
        sizes = [0]
        for segment in self.segments:
            names = {name for node in segment.nodes for name in reads[node]}
            sizes.append(sum(_nbytes(initializers[n]) for n in names if n in initializers))
        return max(sizes)

    def largest_weight_bytes(self) -> int:
        """Return the bytes of the largest weight: a lowering makes a few copies of one."""
        return max((_nbytes(v) for v in self.model.graph.initializers.values()), default=0)

    def make_room(self) -> None:
        """Close the sessions of a large model, for work on the whole graph; they open again.

        No segment may be running meanwhile.
        """
        if self.is_large:
            self.close()
            release_weights(self.model)
            return_free_memory()

    def close(self) -> None:
        """Free the sessions; they are opened again where they are needed again."""
        with self._lock:
            for session in self._sessions:
                if session is not None:
                    session.close()
            self._sessions = [None] * len(self.segments)


def _nbytes(value: ir.Value) -> int:
    return value.const_value.nbytes if value.const_value is not None else 0
