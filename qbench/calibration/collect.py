"""Calibration: one streaming pass that sees every tensor a format could touch.

What is kept of a tensor has the same size however many samples pass. The outputs of one run are
held to a memory budget: a batch is run in pieces where they would take more, and where a single
item takes more, the tapped tensors are split over several sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qbench.calibration.layout import (
    Array,
    Bools,
    Layout,
    Sizes,
    elements,
    kept_positions,
    per_item,
    select,
)
from qbench.calibration.observers import Observation, merge, nothing, observe, to_range
from qbench.calibration.padding import mark_sequence, other_padding
from qbench.calibration.probing import (
    Feeds,
    InputLayouts,
    find_layouts,
    input_layouts,
    real_positions,
)
from qbench.calibration.targets import Target, targets_of
from qbench.errors import DataError, MeasurementError
from qbench.graph.taps import with_taps
from qbench.records import Layers, TensorRange

#: Bytes that the tapped outputs of one run may take.
OUTPUT_BUDGET = 256 << 20


class Batch(Protocol):
    """Some items, ready to run."""

    @property
    def rows(self) -> npt.NDArray[np.integer]:
        """Indices of the items, shape [items]; rows that ``feeds`` has beyond do not count."""
        ...

    @property
    def feeds(self) -> Feeds:
        """Arrays by graph input."""
        ...


class Session(Protocol):
    """A loaded graph."""

    def run(self, feeds: Feeds) -> Mapping[str, Array]:
        """Return every output by name."""
        ...


OpenSession = Callable[[ir.Model], Session]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What calibration saw.

    Attributes:
        ranges: One for each tensor and implicit intermediate, in topological order of the layers.
        histograms: Histogram of magnitudes by the same names, shape [2, occupied bins]: bins (see
            ``observers.bin_edges``) and counts.
    """

    ranges: tuple[TensorRange, ...]
    histograms: Mapping[str, npt.NDArray[np.int64]]

    def by_tensor(self) -> dict[str, TensorRange]:
        """Return the ranges by tensor."""
        return {range_.tensor: range_ for range_ in self.ranges}


def calibrate(
    model: ir.Model,
    layers: Layers,
    batches: Iterable[Batch],
    open_session: OpenSession,
    *,
    output_budget: int = OUTPUT_BUDGET,
) -> Calibration:
    """Run the batches once and return the range of every tensor that a layer's format touches.

    These are the edges, the outputs and everything between them, intermediates inside operators
    too (``graph.intermediates``). Padded positions do not count, nor do the rows of a batch that
    repeat its last item. A tensor that all items of a batch share counts once an item, so no
    figure depends on the batch size.

    Args:
        model: The graph; it is not changed.
        layers: Its layers.
        batches: What to run; consumed once.
        open_session: Loads a graph.
        output_budget: Bytes that the tapped outputs of one run may take.

    Raises:
        DataError: If feeds do not match the graph's inputs; both sides are named.
        MeasurementError: If a tensor was never seen (all are named), was nothing but NaN or
            infinite, or if padding cannot be told from data.
    """
    targets = targets_of(model, layers)
    collector = Collector(model, targets, open_session, output_budget)
    for batch in batches:
        _check_feeds(model, batch.feeds)
        collector.see(batch)
    return _calibration(targets, collector.seen, collector.not_numbers)


class Collector:
    """The running totals of one calibration, and the sessions that feed them."""

    def __init__(
        self,
        model: ir.Model,
        targets: tuple[Target, ...],
        open_session: OpenSession,
        output_budget: int,
    ) -> None:
        self.seen: dict[str, Observation] = {target.name: nothing() for target in targets}
        self.not_numbers: set[str] = set()
        self._model = model
        self._open_session = open_session
        self._budget = output_budget
        self._targets: dict[str, list[Target]] = {}
        for target in targets:
            self._targets.setdefault(target.source, []).append(target)
        self._sessions: list[_TappedSession] = []
        self._layouts: dict[str, Layout] = {}
        self._marked = False

    def see(self, batch: Batch) -> None:
        """Run a batch, in pieces where it takes more than the budget, and add what it gives."""
        real = real_positions(self._model, batch.feeds, len(batch.rows))
        if not self._layouts:
            self._prepare(batch.feeds)
        inputs = input_layouts(self._model, batch.feeds)
        size = self._fit(Sizes(*real.shape)) if inputs.dynamic_batch else len(real)
        if not real.all() and not inputs.dynamic_sequence and not self._marked:
            self._mark(batch.feeds, real, inputs)
        for start in range(0, len(real), size):
            piece = _piece(batch.feeds, inputs, start, size)
            self._see_piece(piece, real[start : start + size])

    def _prepare(self, feeds: Feeds) -> None:
        sources = list(self._targets)
        self._sessions = [self._tap(sources)]
        self._layouts = find_layouts(self._model, feeds, self._sessions[0].run)

    def _tap(self, sources: list[str]) -> _TappedSession:
        tapped = with_taps(self._model, sources)
        return _TappedSession(self._open_session(tapped.model), tapped.outputs)

    def _fit(self, sizes: Sizes) -> int:
        """Return the items to run at once; split the taps where not even one item fits."""
        alone = Sizes(1, sizes.sequence)
        while self._bytes(self._largest(alone), alone) > self._budget:
            sources = [list(session.outputs) for session in self._sessions]
            if all(len(group) == 1 for group in sources):
                break
            halves = [half for group in sources for half in _halves(group)]
            self._sessions = []
            self._sessions = [self._tap(half) for half in halves]
        return max(1, self._budget // max(self._bytes(self._largest(alone), alone), 1))

    def _largest(self, sizes: Sizes) -> Iterable[str]:
        return max(
            (session.outputs for session in self._sessions),
            key=lambda outputs: self._bytes(outputs, sizes),
        )

    def _bytes(self, tensors: Iterable[str], sizes: Sizes) -> int:
        return 4 * sum(elements(self._layouts[tensor], sizes) for tensor in tensors)

    def _mark(self, feeds: Feeds, real: Bools, inputs: InputLayouts) -> None:
        """Find the sequence axes of a graph of fixed length, given an item with padding."""
        partly = np.flatnonzero(real.any(axis=1) & ~real.all(axis=1))
        if not partly.size:
            return
        if inputs.dynamic_batch:
            feeds, real = _piece(feeds, inputs, partly[0], 1), real[partly[0] : partly[0] + 1]
        changed = other_padding(feeds, real)
        for session in self._sessions:
            before, after = session.run(feeds), session.run(changed)
            for tensor in session.outputs:
                layout = self._layouts[tensor]
                self._layouts[tensor] = mark_sequence(
                    tensor, layout, before[tensor], after[tensor], real
                )
        self._marked = True

    def _see_piece(self, feeds: Feeds, real: Bools) -> None:
        for session in self._sessions:
            for tensor, values in session.run(feeds).items():
                for target in self._targets[tensor]:
                    self._add(target, values, real)

    def _add(self, target: Target, values: Array, real: Bools) -> None:
        if values.dtype.kind in "iub":
            self.not_numbers.add(target.name)
            return
        values, layout = target.quantity_of(values, self._layouts[target.source])
        values, layout = per_item(values, layout, len(real))
        kept = kept_positions(target.name, layout, real)
        channels = len(layout) > 1 and layout[-1].is_static and target.implicit is None
        self.take(target, select(values, kept), channels)

    def take(self, target: Target, values: Array, channels: bool) -> None:
        """Add the values of a target at positions that are no padding, shape [..., channels].

        Args:
            target: What was seen.
            values: Its values.
            channels: Whether the last axis has a fixed length.
        """
        part = observe(values, channels=channels)
        self.seen[target.name] = merge(self.seen[target.name], part)


@dataclass(frozen=True, slots=True)
class _TappedSession:
    session: Session
    outputs: Mapping[str, str]

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Return the tapped tensors by name."""
        values = self.session.run(feeds)
        return {tensor: values[output] for tensor, output in self.outputs.items()}


def _piece(feeds: Feeds, inputs: InputLayouts, start: int, size: int) -> Feeds:
    return {
        name: array[start : start + size] if inputs.has_batch(name) else array
        for name, array in feeds.items()
    }


def _halves(names: list[str]) -> list[list[str]]:
    middle = (len(names) + 1) // 2
    return [half for half in (names[:middle], names[middle:]) if half]


def _check_feeds(model: ir.Model, feeds: Feeds) -> None:
    graph = model.graph
    wanted = {str(v.name) for v in graph.inputs if v.name not in graph.initializers}
    missing, unknown = sorted(wanted - set(feeds)), sorted(set(feeds) - wanted)
    if missing or unknown:
        raise DataError(
            f"the batch does not fit the graph: missing inputs {_listed(missing)}, unknown inputs "
            f"{_listed(unknown)}; the graph takes {_listed(sorted(wanted))}, the batch gives "
            f"{_listed(sorted(feeds))}"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def _calibration(
    targets: tuple[Target, ...], seen: Mapping[str, Observation], not_numbers: set[str]
) -> Calibration:
    first = {target.name: target for target in reversed(targets)}
    order = [name for name in dict.fromkeys(t.name for t in targets) if name not in not_numbers]
    empty = [name for name in order if seen[name].moments.count == 0]
    missing = [name for name in empty if seen[name].non_finite == 0]
    if missing:
        raise MeasurementError(
            f"calibration saw no value of {len(missing)} tensors: {_listed(missing)}; give at "
            "least one batch with unmasked positions"
        )
    if empty:
        raise MeasurementError(
            f"every value of {_listed(empty)} was NaN or infinite; the first one named is where "
            "to look: check the model's weights and its inputs"
        )
    ranges = tuple(
        to_range(seen[name], name, first[name].layer, implicit=first[name].implicit is not None)
        for name in order
    )
    return Calibration(ranges, {name: seen[name].histogram for name in order})
