"""Layouts: which axes of a tensor are batch and sequence, and which of its elements are padding.

The meaning of an axis is inferred by running the graph at two different sizes: an axis whose
length is ``factor × batchᵇ × sequenceˢ`` at both is of that kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qbench.errors import MeasurementError

Array = npt.NDArray[np.floating]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of the two axes that differ between batches."""

    batch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of length ``factor × batchᵇ × sequenceˢ``.

    Attributes:
        batch: Exponent of the batch size.
        sequence: Exponent of the sequence length.
        factor: The fixed part; 0 where no such formula holds.
    """

    batch: int
    sequence: int
    factor: int

    @property
    def is_static(self) -> bool:
        """Whether the length never changes."""
        return self.batch == 0 and self.sequence == 0 and self.factor > 0


Layout = tuple[Axis, ...]

BATCH, SEQUENCE, UNKNOWN = Axis(1, 0, 1), Axis(0, 1, 1), Axis(0, 0, 0)
_EXPONENTS = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2))


def infer_layout(first: Sequence[int], second: Sequence[int], sizes: tuple[Sizes, Sizes]) -> Layout:
    """Return the layout of a tensor that had two shapes at two different sizes."""
    if len(first) != len(second):
        return (UNKNOWN,) * len(first)
    return tuple(_axis(a, b, sizes) for a, b in zip(first, second, strict=True))


def _axis(first: int, second: int, sizes: tuple[Sizes, Sizes]) -> Axis:
    for batch, sequence in _EXPONENTS:
        a, b = (size.batch**batch * size.sequence**sequence for size in sizes)
        if first % a == 0 and second % b == 0 and first // a == second // b > 0:
            return Axis(batch, sequence, first // a)
    return UNKNOWN


def elements(layout: Layout, sizes: Sizes) -> int:
    """Return the number of elements of a tensor; an axis without a formula counts as a sequence."""
    lengths = (
        (axis.factor or sizes.sequence) * sizes.batch**axis.batch * sizes.sequence**axis.sequence
        for axis in layout
    )
    return math.prod(lengths)


def per_item(values: Array, layout: Layout, batch: int) -> tuple[Array, Layout]:
    """Return a tensor that all items of a batch share once for each of them.

    Position embeddings, causal masks and the like come once a batch. Counted so, their figures
    would depend on the batch size.
    """
    if any(axis.batch or not axis.factor for axis in layout):
        return values, layout
    if not layout or layout[0] != Axis(0, 0, 1):
        values, layout = values[None], (Axis(0, 0, 1), *layout)
    return np.broadcast_to(values, (batch, *values.shape[1:])), (BATCH, *layout[1:])


def kept_positions(tensor: str, layout: Layout, mask: Bools) -> Bools | None:
    """Return which positions of a tensor are no padding, over as many leading axes as it takes.

    An element counts if it is real on every sequence axis: attention scores [batch, heads,
    sequence, sequence] are kept where query and key are real. An item whose positions are all
    masked does not count at all.

    Args:
        tensor: Its name, for the message.
        layout: Its axes; one of them has the batch.
        mask: Which positions are real, shape [batch, sequence].

    Returns:
        Shape of the leading axes up to the last one that is masked, to be broadcast; ``None``
        where nothing is masked.

    Raises:
        MeasurementError: If padding cannot be told from data in this layout.
    """
    if mask.all():
        return None
    at = next((i for i, axis in enumerate(layout) if axis.batch), None)
    merged = [axis for axis in layout if axis.batch and axis.sequence]
    odd = any(not a.factor or a.sequence > 1 for a in layout)
    scaled = any(a.sequence and not a.batch and a.factor != 1 for a in layout)
    if at is None or odd or scaled or (merged and _has_more(layout, at)):
        raise MeasurementError(_unclear(tensor, layout))
    if merged:
        return _on_axis(np.repeat(mask.reshape(-1), layout[at].factor), (at,), at + 1)
    rows = np.repeat(mask, layout[at].factor, axis=0)
    kept: Bools = _on_axis(np.asarray(rows.any(axis=1)), (at,), len(layout))
    for index, axis in enumerate(layout):
        if axis.sequence:
            kept = np.logical_and(kept, _on_axis(rows, (at, index), len(layout)))
    last = max([at, *(i for i, axis in enumerate(layout) if axis.sequence)])
    return kept.reshape(kept.shape[: last + 1])


def select(values: Array, kept: Bools | None) -> Array:
    """Return the kept positions, shape [positions, ...]; everything, unchanged, for ``None``."""
    if kept is None:
        return values
    return values[np.broadcast_to(kept, values.shape[: kept.ndim])]


def _has_more(layout: Layout, at: int) -> bool:
    return any(i != at and (axis.batch or axis.sequence) for i, axis in enumerate(layout))


def _on_axis(mask: Bools, axes: tuple[int, ...], rank: int) -> Bools:
    """Return a mask of [batch] or [batch, sequence] laid out on ``axes`` of a tensor."""
    if len(axes) == 2 and axes[0] > axes[1]:
        mask, axes = mask.T, (axes[1], axes[0])
    shape = [1] * rank
    for axis, length in zip(axes, mask.shape, strict=True):
        shape[axis] = length
    return mask.reshape(shape)


def _unclear(tensor: str, layout: Layout) -> str:
    return (
        f"cannot tell padding from data in tensor {tensor!r} with axes [{describe(layout)}]: "
        "give batches of equal length, so that nothing is padded"
    )


def describe(layout: Layout) -> str:
    """Return a layout in words: ``batch, 12, sequence, 64``."""
    return ", ".join(_words(axis) for axis in layout)


def _words(axis: Axis) -> str:
    if not axis.factor:
        return "?"
    parts = [str(axis.factor)] * (axis.factor != 1 or axis.is_static)
    parts += ["batch"] * axis.batch + ["sequence"] * axis.sequence
    return "×".join(parts)
