"""Probing: what the axes of inputs and tensors mean, learnt from two small runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qbench.calibration.layout import (
    BATCH,
    SEQUENCE,
    Array,
    Axis,
    Bools,
    Layout,
    Sizes,
    infer_layout,
)

Feeds = Mapping[str, npt.NDArray[np.generic]]

#: Names under which graphs take the mask of real positions [batch, sequence].
MASKS = ("attention_mask", "input_mask", "mask")

#: No formula of ``layout.infer_layout`` gives equal lengths for two kinds of axes at both sizes.
_PROBES = (Sizes(2, 5), Sizes(3, 7))


@dataclass(frozen=True, slots=True)
class InputLayouts:
    """What the axes of the graph's inputs mean.

    Attributes:
        by_name: Layout of each input.
    """

    by_name: Mapping[str, Layout]

    @property
    def dynamic_batch(self) -> bool:
        """Whether the graph takes any batch size."""
        return any(axis == BATCH for layout in self.by_name.values() for axis in layout)

    @property
    def dynamic_sequence(self) -> bool:
        """Whether the graph takes any sequence length."""
        return any(axis == SEQUENCE for layout in self.by_name.values() for axis in layout)

    def has_batch(self, name: str) -> bool:
        """Whether the first axis of an input is the batch."""
        return self.by_name[name][:1] == (BATCH,)


def input_layouts(model: ir.Model, feeds: Feeds) -> InputLayouts:
    """Return what the axes of the inputs mean: a free first axis is the batch, a free second one
    of a matrix is the sequence, and so is every axis with the same symbol as that."""
    values = {str(value.name): value for value in model.graph.inputs if value.name in feeds}
    dims = {name: _dims(value, feeds[name].ndim) for name, value in values.items()}
    symbols = {
        d[1] for d in dims.values() if len(d) == 2 and isinstance(d[1], str) and d[0] != d[1]
    }
    return InputLayouts(
        {
            name: tuple(
                _meaning(index, dim, feeds[name].shape, symbols) for index, dim in enumerate(own)
            )
            for name, own in dims.items()
        }
    )


def real_positions(model: ir.Model, feeds: Feeds, items: int) -> Bools:
    """Return which positions are real, shape [batch, sequence].

    A graph without a sequence has one of length 1. Rows from ``items`` on are not real.
    """
    mask = next((feeds[name] != 0 for name in MASKS if name in feeds), None)
    if mask is None or mask.ndim != 2:
        matrices = [array for array in feeds.values() if array.ndim == 2]
        any_feed = next(iter(feeds.values()))
        shape = matrices[0].shape if matrices else (*any_feed.shape[:1], 1)
        mask = np.ones(shape, np.bool_)
    real = np.array(mask)
    real[items:] = False
    return real


def find_layouts(
    model: ir.Model, feeds: Feeds, run: Callable[[Feeds], Mapping[str, Array]]
) -> dict[str, Layout]:
    """Return the layout of every tensor that ``run`` gives, from two small runs.

    Where the graph fixes batch or sequence, axes of that length cannot be told from others: a
    first axis as long as the batch is then taken for it, and the sequence is left unmarked.

    Args:
        model: The graph.
        feeds: A batch, whose first item is repeated and cut to size.
        run: Runs the tapped graph.
    """
    inputs = input_layouts(model, feeds)
    own = Sizes(*real_positions(model, feeds, 1).shape)
    first, second = (
        Sizes(
            probe.batch if inputs.dynamic_batch else own.batch,
            probe.sequence if inputs.dynamic_sequence else own.sequence,
        )
        for probe in _PROBES
    )
    before = run(_resized(feeds, inputs, first))
    after = before if first == second else run(_resized(feeds, inputs, second))
    layouts = {
        name: infer_layout(values.shape, after[name].shape, (first, second))
        for name, values in before.items()
    }
    if inputs.dynamic_batch:
        return layouts
    return {name: _with_fixed_batch(layout, own.batch) for name, layout in layouts.items()}


def _with_fixed_batch(layout: Layout, batch: int) -> Layout:
    if layout[:1] == (Axis(0, 0, batch),):
        return (BATCH, *layout[1:])
    if layout[:1] == (Axis(0, 1, batch),) and batch > 1:
        return (Axis(1, 1, 1), *layout[1:])
    return layout


def _resized(
    feeds: Feeds, inputs: InputLayouts, sizes: Sizes
) -> dict[str, npt.NDArray[np.generic]]:
    probes = {}
    for name, array in feeds.items():
        shape = [
            axis.factor * sizes.batch**axis.batch * sizes.sequence**axis.sequence
            for axis in inputs.by_name[name]
        ]
        if name in MASKS:
            probes[name] = np.ones(shape, array.dtype)
        else:
            probes[name] = np.resize(array[:1], shape)
    return probes


def _dims(value: ir.Value, rank: int) -> tuple[int | str | None, ...]:
    if value.shape is None:
        return (None,) * rank
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def _meaning(
    index: int,
    dim: int | str | None,
    shape: tuple[int, ...],
    sequences: AbstractSet[str | int | None],
) -> Axis:
    if isinstance(dim, int):
        return Axis(0, 0, dim)
    if index == 0:
        return BATCH
    if (index == 1 and len(shape) == 2) or dim in sequences:
        return SEQUENCE
    return Axis(0, 0, shape[index])
