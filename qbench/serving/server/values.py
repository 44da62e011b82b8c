"""The values of a tensor in JSON: as many as its shape says, each of its type.

NOTE: NumPy is never asked to find the type by itself: for a list with one long string among a
million short ones it takes as much memory as a million long ones.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from qbench.serving.server.contract import Tensor
from qbench.serving.server.terms import BadRequestError

_TYPES: dict[str, frozenset[type]] = {
    "b": frozenset({bool}),
    "f": frozenset({int, float}),
    "i": frozenset({int}),
    "u": frozenset({int}),
}
_WIDEST = {"b": np.bool_, "f": np.float64, "i": np.int64, "u": np.uint64}


def values_of(data: Any, tensor: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """Return the values of an input, ``shape``, from a list of them or of lists of them.

    Raises:
        BadRequestError: If they are not as many, or not of the input's type.
    """
    if not isinstance(data, list):
        raise BadRequestError(f'input {tensor.name!r} has no "data" (a list of numbers)')
    flat = _flat(data, shape)
    if flat is None:
        raise BadRequestError(
            f"input {tensor.name!r}: shape {list(shape)} takes {math.prod(shape)} values, in one "
            f"list or nested as the shape; data holds {_told(data)}, or is ragged"
        )
    kind = np.dtype(tensor.dtype).kind
    if not _TYPES[kind].issuperset(map(type, flat)):
        raise BadRequestError(
            f"input {tensor.name!r}: data does not hold values of {tensor.datatype} alone"
        )
    try:
        array: np.ndarray = np.array(flat, _WIDEST[kind])
        fits = kind not in "iu" or _fits(array, tensor.dtype)
    except OverflowError:
        fits = False
    if not fits:
        raise BadRequestError(f"input {tensor.name!r}: a value is out of {tensor.datatype}")
    with np.errstate(over="ignore"):
        return array.astype(tensor.dtype).reshape(shape)


def _flat(data: list[Any], shape: tuple[int, ...]) -> list[Any] | None:
    """Return all values in one list; ``None`` if they are not nested as the shape says."""
    if type(data[0] if data else None) is not list:
        return data if len(data) == math.prod(shape) else None
    level = data if len(data) == shape[0] else None
    for size in shape[1:]:
        if level is None or any(type(part) is not list or len(part) != size for part in level):
            return None
        level = list(itertools.chain.from_iterable(level))
    return level


def _told(data: list[Any]) -> str:
    """Return how many a list holds, in words."""
    return f"{len(data)} lists" if data and type(data[0]) is list else str(len(data))


def _fits(array: np.ndarray, dtype: str) -> bool:
    info = np.iinfo(dtype)
    return bool(info.min <= int(array.min()) and int(array.max()) <= info.max)
