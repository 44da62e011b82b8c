from __future__ import annotations

import numpy as np
import pytest

from qbench.calibration.calibrators import find_clip
from qbench.calibration.observers import observe, to_range
from qbench.calibration.searched import cut_off, least_entropy_clip, least_error_clip
from qbench.errors import ConfigError


def seen(values: np.ndarray):
    observation = observe(values.astype(np.float32))
    return to_range(observation, "x"), observation.histogram


def squared_error(values: np.ndarray, clip: float) -> float:
    step = clip / 127
    return float(np.square(np.clip(np.rint(values / step), -127, 127) * step - values).mean())


def test_least_error_is_that_of_a_search_over_the_values() -> None:
    values = np.random.default_rng(0).laplace(size=50_000)
    range_, histogram = seen(values)
    found = least_error_clip(histogram, range_.absmax)
    grid = np.linspace(0.05, 1, 200) * range_.absmax
    best = grid[int(np.argmin([squared_error(values, clip) for clip in grid]))]
    assert found == pytest.approx(best, rel=0.06)
    assert squared_error(values, found) <= 1.01 * squared_error(values, best)
    assert squared_error(values, found) < squared_error(values, range_.absmax)


@pytest.mark.parametrize("search", [least_error_clip, least_entropy_clip])
def test_what_fills_its_range_is_not_clipped(search) -> None:
    values = np.random.default_rng(0).uniform(-1, 1, size=50_000)
    range_, histogram = seen(values)
    assert search(histogram, range_.absmax) >= 0.97 * range_.absmax


@pytest.mark.parametrize("search", [least_error_clip, least_entropy_clip])
def test_a_lone_outlier_is_cut(search) -> None:
    values = np.append(np.random.default_rng(0).normal(size=200_000), 100.0)
    range_, histogram = seen(values)
    assert 2 < search(histogram, range_.absmax) < 60


@pytest.mark.parametrize("calibrator", ["entropy", "mse"])
def test_calibrators_take_the_search(calibrator: str) -> None:
    range_, histogram = seen(np.random.default_rng(1).normal(size=20_000))
    clip = find_clip(range_, calibrator, histogram=histogram)
    assert 0.3 * range_.absmax < clip.magnitude <= range_.absmax and clip.note == ""
    with pytest.raises(ConfigError, match="needs the histogram"):
        find_clip(range_, calibrator)
    zero, nothing = seen(np.zeros(5))
    assert find_clip(zero, calibrator, histogram=nothing).magnitude == 1.0


@pytest.mark.parametrize("clip", [0.5, 2.0, 5.0])
def test_what_is_cut_off_is_counted(clip: float) -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    range_, histogram = seen(values)
    share, error = cut_off(histogram, range_.absmax, clip)
    size = np.abs(values)
    assert share == pytest.approx((size > clip).mean(), rel=0.02, abs=1e-5)
    exact = np.square(np.maximum(size - clip, 0)).sum() / np.square(size).sum()
    assert error == pytest.approx(exact, rel=0.03, abs=1e-6)
    assert cut_off(histogram, range_.absmax, range_.absmax) == (0.0, 0.0)
