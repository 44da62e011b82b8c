"""Lowerings: the graph rewrite that gives a layer a format, one file a format."""

from __future__ import annotations

from collections.abc import Callable

from qbench.backends import Backend, Variant
from qbench.errors import InputError
from qbench.lowering.base import Change, Lowering, Refusal, unusable_clips
from qbench.lowering.bf16 import Bf16Lowering
from qbench.lowering.fp8 import Fp8Lowering
from qbench.lowering.fp16 import Fp16Lowering
from qbench.lowering.fp32 import Fp32Lowering
from qbench.lowering.int8 import Int8Lowering
from qbench.lowering.int8_dynamic import Int8DynamicLowering
from qbench.lowering.w4a8 import W4A8Lowering
from qbench.lowering.w4a16 import W4A16Lowering
from qbench.lowering.w8a16 import W8A16Lowering

__all__ = ["LOWERINGS", "Change", "Lowering", "Refusal", "lowering_for", "unusable_clips"]

#: Lowerings by format; fp32 needs one only beside fp16 (``fp32``).
LOWERINGS: dict[str, Lowering] = {
    lowering.format.name: lowering
    for lowering in (
        Fp16Lowering(),
        Bf16Lowering(),
        Int8Lowering(),
        Int8DynamicLowering(),
        W8A16Lowering(),
        W4A16Lowering(),
        W4A8Lowering(),
        Fp8Lowering(),
    )
}
#: Lowerings whose block size a plan may write down.
_IN_BLOCKS: dict[str, Callable[[int], Lowering]] = {
    "w4a16": W4A16Lowering,
    "w4a8": W4A8Lowering,
    "w8a16": W8A16Lowering,
}


#: Keeps a layer in fp32 where fp16 is the high precision.
_WIDE: Lowering = Fp32Lowering()
#: Lowerings that write Q/DQ and nothing beside it, for a backend that reads no other operators.
_BARE: dict[str, Lowering] = {"int8": Int8Lowering(bare=True), "fp8": Fp8Lowering(bare=True)}


def lowering_for(
    format_name: str, block: int | None = None, backend: Backend | None = None
) -> Lowering:
    """Return the lowering of a format.

    Args:
        format_name: The format.
        block: Elements of K that share a scale, where the format lets a layer choose; ``None`` to
            choose from the weight.
        backend: The backend that it is for; ``None`` for ``ort-cpu``.

    Raises:
        InputError: If this version has none.
    """
    if format_name == "fp32" and backend is not None and backend.variant is Variant.ISLANDS:
        return _WIDE
    try:
        lowering = LOWERINGS[format_name]
    except KeyError:
        raise InputError(
            f"format {format_name!r} has no lowering in this version; "
            f"offered: {', '.join(LOWERINGS)}"
        ) from None
    if backend is not None and not backend.contrib and format_name in _BARE:
        return _BARE[format_name]
    if block is not None and format_name in _IN_BLOCKS:
        return _IN_BLOCKS[format_name](block)
    return lowering
