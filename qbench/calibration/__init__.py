"""Calibration: ranges of every tensor that a format could touch, in one streaming pass."""

from __future__ import annotations

from qbench.calibration.calibrators import Calibrator, Clip, clip_of, find_clip
from qbench.calibration.collect import Calibration, calibrate
from qbench.calibration.observers import (
    Observation,
    bin_edges,
    merge,
    observe,
    percentile_of,
    to_range,
)

__all__ = [
    "Calibration",
    "Calibrator",
    "Clip",
    "Observation",
    "bin_edges",
    "calibrate",
    "clip_of",
    "find_clip",
    "merge",
    "observe",
    "percentile_of",
    "to_range",
]
