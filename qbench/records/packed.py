"""Vectors as text: half-precision numbers in base64, short enough for a line of a plan."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
import numpy.typing as npt

from qbench.errors import InputError

_TYPE = np.dtype("<f2")
#: Smallest normal and largest number of half precision.
SMALLEST, LARGEST = 6.104e-5, 65504.0


def pack(values: npt.NDArray[np.floating[Any]]) -> str:
    """Return positive numbers as text; they are rounded to 11 bits of mantissa.

    Numbers are bounded to the normal numbers of half precision.

    Args:
        values: Shape [K].

    Raises:
        InputError: If there is none, or one is not finite.
    """
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise InputError(f"got {values.shape} numbers to pack; allowed: finite ones, shape [K]")
    bounded = np.clip(values, SMALLEST, LARGEST).astype(_TYPE)
    return base64.b64encode(bounded.tobytes()).decode("ascii")


def unpack(text: str) -> npt.NDArray[np.float32]:
    """Return the numbers of a packed vector, float32 [K].

    Raises:
        InputError: If the text is no such vector, or a number in it is not above zero.
    """
    try:
        raw = base64.b64decode(text, validate=True)
        values = np.frombuffer(raw, _TYPE).astype(np.float32)
    except (binascii.Error, ValueError) as error:
        raise InputError(
            f"a vector of the plan cannot be read ({error}); delete its `treatment`, or plan again"
        ) from None
    if not values.size or not (np.isfinite(values) & (values > 0)).all():
        raise InputError(
            "a vector of the plan holds a number that is not above zero; delete its `treatment`, "
            "or plan again"
        )
    return values
