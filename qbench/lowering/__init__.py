"""Lowerings: the graph rewrite that gives a layer a format, one file a format."""

from __future__ import annotations

from qbench.errors import InputError
from qbench.lowering.base import Change, Lowering, Refusal, unusable_clips
from qbench.lowering.fp16 import Fp16Lowering
from qbench.lowering.int8 import Int8Lowering
from qbench.lowering.int8_dynamic import Int8DynamicLowering
from qbench.lowering.w4a16 import W4A16Lowering
from qbench.lowering.w8a16 import W8A16Lowering

__all__ = ["LOWERINGS", "Change", "Lowering", "Refusal", "lowering_for", "unusable_clips"]

#: Lowerings of ``ort-cpu`` by format; the high precision there, fp32, needs none.
LOWERINGS: dict[str, Lowering] = {
    lowering.format.name: lowering
    for lowering in (
        Fp16Lowering(),
        Int8Lowering(),
        Int8DynamicLowering(),
        W8A16Lowering(),
        W4A16Lowering(),
    )
}


def lowering_for(format_name: str) -> Lowering:
    """Return the lowering of a format.

    Raises:
        InputError: If this version has none.
    """
    try:
        return LOWERINGS[format_name]
    except KeyError:
        raise InputError(
            f"format {format_name!r} has no lowering in this version; "
            f"offered: {', '.join(LOWERINGS)}"
        ) from None
