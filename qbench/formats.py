"""Number formats that a layer can take: frozen values, looked up by name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from qbench.errors import InputError, unknown_name


class Granularity(StrEnum):
    """What shares one scale."""

    NONE = "none"
    PER_TENSOR = "per_tensor"
    PER_CHANNEL = "per_channel"
    PER_BLOCK = "per_block"


@dataclass(frozen=True, slots=True)
class Format:
    """A number format of a layer.

    Attributes:
        name: The word used in configurations, plans and tables.
        weight_bits: Bits a stored weight element.
        activation_bits: Bits of the activation that enters the layer.
        weight_granularity: What shares one weight scale.
        activation_granularity: What shares one activation scale.
        block_size: Elements of K that share a scale where the granularity is ``PER_BLOCK``.
        symmetric: Whether zero points are zero.
        dynamic: Whether the activation scale is found at run time.
    """

    name: str
    weight_bits: int
    activation_bits: int
    weight_granularity: Granularity = Granularity.NONE
    activation_granularity: Granularity = Granularity.NONE
    block_size: int | None = None
    symmetric: bool = True
    dynamic: bool = False

    @property
    def is_float(self) -> bool:
        """Whether the format keeps floating-point weights."""
        return self.weight_granularity is Granularity.NONE

    @property
    def needs_range(self) -> bool:
        """Whether lowering needs a calibrated activation range."""
        return self.activation_granularity is not Granularity.NONE and not self.dynamic


_CHANNEL, _TENSOR, _BLOCK = Granularity.PER_CHANNEL, Granularity.PER_TENSOR, Granularity.PER_BLOCK

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp32", 32, 32),
        Format("fp16", 16, 16),
        Format("bf16", 16, 16),
        Format("int8", 8, 8, _CHANNEL, _TENSOR),
        Format("int8_dynamic", 8, 8, _CHANNEL, _TENSOR, symmetric=False, dynamic=True),
        Format("w8a16", 8, 16, _BLOCK, block_size=128),
        Format("w4a16", 4, 16, _BLOCK, block_size=128),
        Format("w4a8", 4, 8, _BLOCK, _BLOCK, block_size=128, dynamic=True),
        Format("fp8", 8, 8, _CHANNEL, _TENSOR),
    )
}


def format_named(name: str) -> Format:
    """Return the format called ``name``.

    Raises:
        InputError: If there is no such format; the message names near misses.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise InputError(unknown_name("format", name, FORMATS)) from None
