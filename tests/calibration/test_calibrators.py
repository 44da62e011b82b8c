from __future__ import annotations

import numpy as np
import pytest

from qbench.calibration import clip_of, find_clip, observe, to_range
from qbench.errors import ConfigError


def seen(values: np.ndarray) -> tuple:
    observation = observe(values.astype(np.float32))
    return to_range(observation, "x"), observation.histogram


NORMAL = np.random.default_rng(0).normal(size=1_000_000)


def test_minmax_is_the_largest_magnitude() -> None:
    range_, _ = seen(np.array([-7.0, 3.0]))
    assert clip_of(range_) == 7.0


@pytest.mark.parametrize("percentile", [99, 99.9, 99.99, 99.999])
def test_recorded_percentiles_need_no_histogram(percentile: float) -> None:
    range_, histogram = seen(NORMAL)
    clip = clip_of(range_, "percentile", percentile)
    assert clip == clip_of(range_, "percentile", percentile, histogram)
    assert clip == pytest.approx(np.percentile(np.abs(NORMAL), percentile), rel=1 / 64)


def test_other_percentiles_come_from_the_histogram() -> None:
    range_, histogram = seen(NORMAL)
    clip = clip_of(range_, "percentile", 95, histogram)
    assert clip == pytest.approx(np.percentile(np.abs(NORMAL), 95), rel=1 / 128)
    assert clip_of(range_, "percentile", 100) == range_.absmax
    with pytest.raises(ConfigError, match="95 of 'x' is not recorded; recorded: 99, 99.9"):
        clip_of(range_, "percentile", 95)


@pytest.mark.parametrize("calibrator", ["minmax", "percentile"])
def test_zeros_clip_at_a_positive_magnitude_with_a_note(calibrator: str) -> None:
    for values in (np.zeros(10), np.full(10, 1e-41)):
        clip = find_clip(seen(values)[0], calibrator)
        assert clip.magnitude == 1.0 and "zero throughout" in clip.note


def test_a_sparse_tensor_falls_back_to_its_largest_magnitude() -> None:
    values = np.zeros(1_000_000)
    values[3] = -5.0
    clip = find_clip(seen(values)[0], "percentile", 99.99)
    assert clip.magnitude == 5.0 and "percentile 99.99 is zero" in clip.note


def test_a_constant_clips_at_itself() -> None:
    clip = find_clip(seen(np.full(10, -2.5))[0])
    assert clip.magnitude == 2.5 and clip.note == "constant"


def test_bad_settings_are_named() -> None:
    range_, _ = seen(NORMAL)
    with pytest.raises(ConfigError, match=r"unknown calibrator 'minimax' .did you mean 'minmax'"):
        clip_of(range_, "minimax")
    with pytest.raises(ConfigError, match="0 is out of bounds"):
        clip_of(range_, "percentile", 0)
