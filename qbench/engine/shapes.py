"""Sizes of dynamic axes that a serialized engine is built for: from data, or as asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qbench.errors import ConfigError, unknown_name
from qbench.graph.model import TensorSpec
from qbench.runtime.tensorrt import Profile

_MASK = "attention_mask"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one dynamic axis.

    Attributes:
        least: The least that the engine takes.
        best: What it is tuned for.
        most: The most that it takes.
    """

    least: int
    best: int
    most: int


def axis_name(spec: TensorSpec, axis: int) -> str | None:
    """Return the name of a dynamic axis (``batch``, or ``INPUT.AXIS``); ``None`` if it is fixed."""
    size = spec.shape[axis]
    if isinstance(size, int):
        return None
    return size or f"{spec.name}.{axis}"


def sizes_of(
    inputs: Sequence[TensorSpec], feeds: Iterable[Mapping[str, np.ndarray]]
) -> dict[str, Sizes]:
    """Return the sizes of each dynamic axis as data has them.

    The first axis of an input is the batch: it begins at 1. An axis of tokens begins at the
    shortest item, padding left out. Best is the median over batches, most is the largest.

    Args:
        inputs: Inputs of the graph.
        feeds: Arrays of each input, by batch.
    """
    seen: dict[str, list[int]] = {}
    shortest: dict[str, int] = {}
    firsts = {name for spec in inputs if spec.shape and (name := axis_name(spec, 0))}
    for batch in feeds:
        for spec in inputs:
            array = batch.get(spec.name)
            if array is None:
                continue
            for axis, size in enumerate(array.shape):
                name = axis_name(spec, axis)
                if name is None:
                    continue
                seen.setdefault(name, []).append(int(size))
                least = int(size)
                if spec.name == _MASK and axis == 1:
                    least = int(array.sum(axis=1).min())
                shortest[name] = min(shortest.get(name, least), least)
    return {
        name: Sizes(
            1 if name in firsts else max(1, shortest[name]),
            int(np.median(sizes)),
            max(sizes),
        )
        for name, sizes in seen.items()
    }


def asked_sizes(
    told: Sequence[str], inputs: Sequence[TensorSpec], known: Mapping[str, Sizes]
) -> dict[str, Sizes]:
    """Return the sizes with those that a user gave as ``NAME=LEAST,BEST,MOST`` in their place.

    Raises:
        ConfigError: If one is written in another way, names no dynamic axis, does not grow, or
            an axis has no sizes at all.
    """
    axes = [name for s in inputs for i in range(len(s.shape)) if (name := axis_name(s, i))]
    found = dict(known)
    for text in told:
        name, equals, numbers = text.partition("=")
        parts = [part.strip() for part in numbers.split(",")]
        if not equals or len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise ConfigError(
                f"--dim: got {text!r}; allowed: NAME=LEAST,BEST,MOST, such as batch=1,8,32"
            )
        if name.strip() not in axes:
            raise ConfigError(
                f"--dim: {unknown_name('dynamic axis', name.strip(), sorted({*axes}))}"
            )
        sizes = Sizes(*(int(part) for part in parts))
        if not 1 <= sizes.least <= sizes.best <= sizes.most:
            raise ConfigError(
                f"--dim: got {text!r}; allowed: three sizes from 1 on that do not shrink"
            )
        found[name.strip()] = sizes
    missing = [name for name in dict.fromkeys(axes) if name not in found]
    if missing:
        raise ConfigError(
            f"no data tells the sizes of {', '.join(missing)}; give --dim {missing[0]}=1,8,32"
        )
    return found


def profile_of(inputs: Sequence[TensorSpec], sizes: Mapping[str, Sizes]) -> Profile:
    """Return the shapes of each input that has a dynamic axis."""
    profile: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {}
    for spec in inputs:
        names = [axis_name(spec, axis) for axis in range(len(spec.shape))]
        if not any(names):
            continue
        least, best, most = (
            tuple(
                getattr(sizes[name], which) if name else int(size or 1)
                for name, size in zip(names, spec.shape, strict=True)
            )
            for which in ("least", "best", "most")
        )
        profile[spec.name] = (least, best, most)
    return profile
