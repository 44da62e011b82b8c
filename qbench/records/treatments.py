"""How a layer is lowered in another way than a format's plain one, and why it suffers from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Treatment:
    """What a remedy changes in the lowering of one layer in one format.

    It holds all that an engine needs beside the model.

    Attributes:
        variant: Name of the remedy and its number: ``smoothquant:0.5``, ``percentile:99.9``,
            ``entropy``, ``mse``, ``awq:0.45``, ``awq:0.45,clip``, ``block:32``, ``rows``.
        clips: Clipping magnitude by tensor, in place of the calibrated one; for ``smoothquant`` it
            is that of the smoothed activation.
        vectors: Packed numbers by name (``records.packed``): ``scale``, shape [K], divides the
            activation and multiplies the rows of the weight; ``importance``, shape [K], is the
            mean square of each channel of the activation, which weighs errors of clipped blocks.
        block: Elements of K that share a scale, where the format has blocks.
    """

    variant: str
    clips: Mapping[str, float] = field(default_factory=dict)
    vectors: Mapping[str, str] = field(default_factory=dict)
    block: int | None = None

    @property
    def remedy(self) -> str:
        """Name of the remedy without its number."""
        return self.variant.partition(":")[0]


class CauseName(StrEnum):
    """Why a layer diverges in a format."""

    OUTLIER_CHANNELS = "outlier channels"
    CLIPPED_RANGE = "clipped range"
    WEIGHT_OUTLIERS = "weight outliers"
    FP16_OVERFLOW = "fp16 overflow"
    AMPLIFICATION = "amplification downstream"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a cell diverges more than others, with the evidence.

    Attributes:
        layer: Name of the layer.
        format: Name of the format.
        cause: The cause.
        evidence: Numbers that say so, in words.
        strength: How far the number lies beyond its threshold, as a ratio ≥ 1.
    """

    layer: str
    format: str
    cause: CauseName
    evidence: str
    strength: float


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """What the weight of a linear layer looks like, seen as W [K, N].

    Attributes:
        layer: Name of the layer.
        absmax: Largest magnitude.
        kurtosis: Excess kurtosis of all elements (0 for a normal distribution).
        peak: Largest magnitude of a block over its root mean square, the 99th percentile over
            blocks of up to 128 elements along K.
        typical_peak: The same for a normal distribution of that block size.
    """

    layer: str
    absmax: float
    kurtosis: float
    peak: float
    typical_peak: float
