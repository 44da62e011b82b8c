"""The largest drop that is allowed, in the metric's own unit."""

from __future__ import annotations

import math

from qbench.errors import InputError
from qbench.limits import MaxDrop, parse_max_drop

__all__ = ["MaxDrop", "margin_of", "parse_max_drop"]


def margin_of(max_drop: MaxDrop | str | float, reference: float) -> float:
    """Return the margin of a ``max_drop`` (``"5 %"``, ``0.01``, ``"0.01"``) for a reference value.

    Raises:
        InputError: If it is nonsense, negative or zero, 100 % or more, or a share of a reference
            value that is zero or not finite.
    """
    if isinstance(max_drop, bool):
        raise InputError(f"max_drop: got {max_drop!r}; allowed: '5 %' or a number such as 0.01")
    drop = max_drop if isinstance(max_drop, MaxDrop) else parse_max_drop(max_drop)
    if drop.amount == 0:
        raise InputError(
            "max_drop: got 0; no interval of finite width lies at or below zero, so nothing could "
            "be accepted: give a margin that matters, such as '1 %' or 0.005"
        )
    if drop.relative and drop.amount >= 1:
        raise InputError(f"max_drop: got {drop}; a share of the reference is below 100 %")
    if drop.relative and (not math.isfinite(reference) or reference == 0):
        raise InputError(
            f"max_drop: {drop} of a reference value of {reference:g} is no margin; "
            "give a number in the metric's own unit"
        )
    return drop.margin(reference)
