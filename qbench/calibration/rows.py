"""Samples of activations: a few rows of some tensors, with what each channel looks like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qbench.calibration.collect import OUTPUT_BUDGET, Batch, Collector, OpenSession
from qbench.calibration.layout import Array
from qbench.calibration.targets import Target

#: Rows that are kept of a tensor.
ROWS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Activation:
    """What was seen of one tensor, its last axis taken for channels.

    Attributes:
        rows: A random few of all rows, shape [rows, K].
        absmax: Largest magnitude a channel over all rows, shape [K].
        mean_abs: Mean magnitude a channel over all rows, shape [K].
        mean_square: Mean square a channel over all rows, shape [K].
        count: Rows seen.
    """

    rows: npt.NDArray[np.float32]
    absmax: npt.NDArray[np.float32]
    mean_abs: npt.NDArray[np.float32]
    mean_square: npt.NDArray[np.float32]
    count: int


def sample_activations(
    model: ir.Model,
    tensors: Sequence[str],
    batches: Iterable[Batch],
    open_session: OpenSession,
    *,
    rows: int = ROWS,
    seed: int = 0,
) -> Mapping[str, Activation]:
    """Run the batches once and return a sample of each tensor; padded positions do not count.

    A tensor whose last axis has no fixed length is left out. Rows are drawn evenly over all that
    was seen, in one pass; memory does not grow with the number of batches.

    Args:
        model: The graph; it is not changed.
        tensors: Names of its tensors.
        batches: What to run; consumed once.
        open_session: Loads a graph.
        rows: Rows to keep of each.
        seed: Seed of the draw.

    Raises:
        MeasurementError: If padding cannot be told from data.
    """
    targets = tuple(Target(name, name, "") for name in dict.fromkeys(tensors))
    if not targets:
        return {}
    collector = _RowCollector(model, targets, open_session, (rows, seed))
    for batch in batches:
        collector.see(batch)
    return {name: totals.done() for name, totals in collector.totals.items() if totals.count}


class _RowCollector(Collector):
    """Keeps rows where calibration keeps ranges."""

    def __init__(
        self,
        model: ir.Model,
        targets: tuple[Target, ...],
        open_session: OpenSession,
        how: tuple[int, int],
    ) -> None:
        super().__init__(model, targets, open_session, OUTPUT_BUDGET)
        rows, seed = how
        self.totals = {
            target.name: _Totals(rows, np.random.default_rng([seed, index]))
            for index, target in enumerate(targets)
        }

    def take(self, target: Target, values: Array, channels: bool) -> None:
        """Add rows; of a tensor without fixed channels nothing."""
        if channels and values.size:
            self.totals[target.name].add(values.reshape(-1, values.shape[-1]))


class _Totals:
    """Running totals of one tensor, and the rows with the lowest of random numbers."""

    def __init__(self, rows: int, random: np.random.Generator) -> None:
        self.count = 0
        self._limit, self._random = rows, random
        self._places = np.zeros(0)
        self._rows = np.zeros((0, 0), np.float32)
        self._absmax = self._sums = self._squares = np.zeros(0)

    def add(self, values: Array) -> None:
        wide = np.abs(values.astype(np.float64))
        if not self.count:
            width = values.shape[-1]
            self._rows = np.zeros((0, width), np.float32)
            self._absmax = self._sums = self._squares = np.zeros(width)
        self.count += len(values)
        self._absmax = np.maximum(self._absmax, wide.max(axis=0))
        self._sums = self._sums + wide.sum(axis=0)
        self._squares = self._squares + np.square(wide).sum(axis=0)
        places = np.concatenate([self._places, self._random.random(len(values))])
        rows = np.concatenate([self._rows, values.astype(np.float32)])
        best = np.sort(np.argsort(places, kind="stable")[: self._limit])
        self._places, self._rows = places[best], rows[best]

    def done(self) -> Activation:
        return Activation(
            self._rows,
            self._absmax.astype(np.float32),
            (self._sums / self.count).astype(np.float32),
            (self._squares / self.count).astype(np.float32),
            self.count,
        )
