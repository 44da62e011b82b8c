"""Padding in graphs of a fixed sequence length: found by what depends on padded tokens.

Such a graph cannot be run at another length, so an axis as long as the sequence may be the
sequence or, say, the size of a head. But other token ids at padded positions change the padded
positions of a tensor and nothing else, because nothing attends to them: what changed says where
they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from qbench.calibration.layout import Array, Axis, Bools, Layout, kept_positions
from qbench.calibration.probing import MASKS
from qbench.errors import MeasurementError

#: A score this low is a mask's fill: it swallows any change of what it was added to.
_FILL = -1e9


def other_padding(
    feeds: Mapping[str, npt.NDArray[np.generic]], mask: Bools
) -> dict[str, npt.NDArray[np.generic]]:
    """Return feeds with other numbers at padded positions: each item's first token, repeated.

    Args:
        feeds: Arrays by input; integers of shape [batch, sequence] are changed, but no mask.
        mask: Which positions are real, shape [batch, sequence].
    """
    changed = dict(feeds)
    for name, array in feeds.items():
        tokens = array.shape == mask.shape and array.dtype.kind == "i"
        if tokens and name not in MASKS:
            changed[name] = np.where(mask, array, array[:, :1])
    return changed


def mark_sequence(tensor: str, layout: Layout, before: Array, after: Array, mask: Bools) -> Layout:
    """Return a layout with its sequence axes marked.

    Args:
        tensor: Name of the tensor, for the message.
        layout: Its axes so far: batch, or of fixed length.
        before: Its values.
        after: Its values after the numbers at padded positions were changed.
        mask: Which positions are real, shape [batch, sequence]; some are not.

    Raises:
        MeasurementError: If no choice of axes explains what changed.
    """
    length = mask.shape[1]
    own = [i for i, axis in enumerate(layout) if _may_hold(axis, length)]
    if not own:
        return layout
    differs = (before != after) & ~(np.isnan(before) & np.isnan(after))
    if not differs.any():
        return _untouched(layout, own, before, mask)
    alone = [i for i in own if _explains(differs, _marked(layout, [i], length), mask)]
    if len(alone) == 1:
        silent = [
            i for i in own if i not in alone and _sees_nothing(before, layout, mask, alone[0], i)
        ]
        return _marked(layout, [*alone, *silent], length)
    if len(own) == 2 and _explains(differs, _marked(layout, own, length), mask):
        return _marked(layout, own, length)
    raise MeasurementError(
        f"cannot tell padding from data in tensor {tensor!r} of shape {list(before.shape)}: real "
        f"positions depend on padded tokens, or too many of its axes are {length} long; export "
        "the model with a dynamic sequence axis"
    )


def _untouched(layout: Layout, own: Sequence[int], values: Array, mask: Bools) -> Layout:
    """Mark a tensor that no padded token changes.

    With a batch axis it was multiplied by the mask (then padding is silent), is pooled (two axes)
    or made of the mask (more). Without, it is a table of positions (up to three axes) or a mask
    of query and key positions.
    """
    length = mask.shape[1]
    own = [i for i in own if layout[i].is_static]
    if not any(axis.batch for axis in layout):
        return _marked(layout, own[:1] if len(layout) <= 3 else own, length)
    silent = [
        i
        for i in own
        if _are_silent(values, ~_real(_marked(layout, [i], length), mask, values.shape))
    ]
    if len(layout) == 2 or silent:
        return _marked(layout, silent, length)
    return _marked(layout, own, length)


def _may_hold(axis: Axis, length: int) -> bool:
    if axis.is_static:
        return axis.factor == length
    return axis.batch == 1 and axis.sequence == 0 and axis.factor % length == 0 and length > 1


def _marked(layout: Layout, axes: Sequence[int], length: int) -> Layout:
    return tuple(
        axis if i not in axes else Axis(axis.batch, 1, axis.factor // length)
        for i, axis in enumerate(layout)
    )


def _explains(differs: Bools, layout: Layout, mask: Bools) -> bool:
    return not (differs & _real(layout, mask, differs.shape)).any()


def _sees_nothing(values: Array, layout: Layout, mask: Bools, query: int, key: int) -> bool:
    """Whether real queries see nothing of padded keys."""
    real_query = _real(_marked(layout, [query], mask.shape[1]), mask, values.shape)
    real_key = _real(_marked(layout, [key], mask.shape[1]), mask, values.shape)
    return _are_silent(values, real_query & ~real_key)


def _are_silent(values: Array, where: Bools) -> bool:
    """Whether some values are chosen and all of them are 0 or a mask's fill."""
    there = values[where]
    return there.size > 0 and bool(((there == 0) | (there < _FILL)).all())


def _real(layout: Layout, mask: Bools, shape: Sequence[int]) -> Bools:
    kept = kept_positions("", layout, mask)
    if kept is None:
        return np.ones(shape, np.bool_)
    return np.broadcast_to(kept.reshape(kept.shape + (1,) * (len(shape) - kept.ndim)), shape)
