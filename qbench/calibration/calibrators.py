"""Calibrators: from the range of a tensor to the magnitude at which a format clips it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from qbench.calibration.observers import PERCENTILES, percentile_of
from qbench.calibration.searched import least_entropy_clip, least_error_clip
from qbench.errors import ConfigError, unknown_name
from qbench.records import TensorRange

#: Clip of a tensor that was zero throughout. Any positive clip represents zero exactly; this one
#: leaves scales (clip / 127) and their products normal numbers in fp16 and fp32.
ZERO_CLIP = 1.0

#: Below it a scale would no longer be a normal number of fp32; such a tensor counts as zero.
_SMALLEST = 1e-30


class Calibrator(StrEnum):
    """How a clipping magnitude is chosen."""

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    ENTROPY = "entropy"
    MSE = "mse"


@dataclass(frozen=True, slots=True)
class Clip:
    """A clipping magnitude and how it came about.

    Attributes:
        magnitude: Values in [−magnitude, magnitude] are represented, others saturate; > 0.
        note: What is out of the ordinary, or "".
    """

    magnitude: float
    note: str = ""


def clip_of(
    range_: TensorRange,
    calibrator: str = "minmax",
    percentile: float = 99.99,
    histogram: npt.NDArray[np.int64] | None = None,
) -> float:
    """Return the magnitude, always positive, at which a symmetric format clips a tensor.

    See ``find_clip``, which also says what is out of the ordinary.
    """
    return find_clip(range_, calibrator, percentile, histogram).magnitude


def find_clip(
    range_: TensorRange,
    calibrator: str = "minmax",
    percentile: float = 99.99,
    histogram: npt.NDArray[np.int64] | None = None,
) -> Clip:
    """Return the clipping magnitude of a tensor, with a note where it is out of the ordinary.

    A tensor that was zero throughout is valid: it clips at ``ZERO_CLIP``. A tensor whose
    percentile is zero, because most of its elements are, falls back to its absmax. A constant
    clips at its own magnitude.

    Args:
        range_: What calibration saw.
        calibrator: ``minmax``, ``percentile``, ``entropy`` or ``mse``.
        percentile: Percentile of magnitude, used by ``percentile``.
        histogram: Histogram of the tensor; needed by ``entropy`` and ``mse``, and for a percentile
            that the range has no record of.

    Raises:
        ConfigError: If the calibrator is unknown, or the percentile is out of (0, 100], or there
            is no histogram where it is needed.
    """
    if calibrator not in list(Calibrator):
        raise ConfigError(unknown_name("calibrator", calibrator, [c.value for c in Calibrator]))
    if range_.absmax < _SMALLEST:
        return Clip(ZERO_CLIP, "zero throughout calibration; any scale represents it")
    if calibrator == Calibrator.MINMAX:
        return Clip(range_.absmax, "constant" if range_.min == range_.max else "")
    if calibrator in (Calibrator.ENTROPY, Calibrator.MSE):
        return Clip(_searched(range_, Calibrator(calibrator), histogram))
    found = _magnitude(range_, percentile, histogram)
    if found <= 0:
        return Clip(range_.absmax, f"percentile {percentile:g} is zero; absmax is used")
    return Clip(found)


def _searched(
    range_: TensorRange, calibrator: Calibrator, histogram: npt.NDArray[np.int64] | None
) -> float:
    if histogram is None or not histogram.size:
        raise ConfigError(
            f"calibrator {calibrator.value!r} needs the histogram of {range_.tensor!r}, and there "
            "is none; calibrate again, or use minmax or percentile"
        )
    search = least_error_clip if calibrator is Calibrator.MSE else least_entropy_clip
    return search(histogram, range_.absmax)


def _magnitude(
    range_: TensorRange, percentile: float, histogram: npt.NDArray[np.int64] | None
) -> float:
    if not 0 < percentile <= 100:
        raise ConfigError(
            f"percentile {percentile:g} is out of bounds; allowed: above 0, at most 100"
        )
    recorded = _named(range_.percentiles, percentile)
    if recorded is not None:
        return recorded
    if percentile == 100:
        return range_.absmax
    if histogram is None:
        raise ConfigError(
            f"percentile {percentile:g} of {range_.tensor!r} is not recorded; recorded: "
            f"{', '.join(PERCENTILES)}; others need the tensor's histogram"
        )
    return percentile_of(histogram, percentile, range_.absmax)


def _named(percentiles: Mapping[str, float], percentile: float) -> float | None:
    return next((v for name, v in percentiles.items() if float(name) == percentile), None)
