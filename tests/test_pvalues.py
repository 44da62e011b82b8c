"""p-values of paired changes, and intervals of signed differences."""

from __future__ import annotations

import numpy as np
import pytest

from qbench.errors import InputError
from qbench.sensitivity.multiplicity import p_values
from qbench.statistics import difference_interval, family_draws, holm, mcnemar, paired_p
from qbench.tasks.base import Metric, Scores
from qbench.tasks.metrics import MRR


def shifted(n: int, by: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    before = rng.uniform(0.2, 0.8, (n, 1))
    return before, before - by + rng.normal(0, 0.02, (n, 1))


def test_binary_payloads_get_the_exact_test() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.integers(0, 2, (2, 80, 1)).astype(float)
    expected = mcnemar(before.ravel() == 1, after.ravel() == 1)
    assert paired_p(MRR, before, after) == expected


def test_a_clear_change_survives_holm_over_the_family_and_none_is_one() -> None:
    before, after = shifted(100, 0.05)
    family = 500
    p = paired_p(MRR, before, after, family=family)
    assert p == pytest.approx(1 / (family_draws(family) + 1))
    assert holm([p, *[1.0] * (family - 1)])[0] < 0.05
    assert paired_p(MRR, before, before) == 1.0


def test_what_cannot_be_tested_has_no_p_value() -> None:
    before, after = shifted(10, 0.1)
    broken = after.copy()
    broken[3] = np.nan
    assert paired_p(MRR, before, broken) is None
    assert paired_p(MRR, np.zeros((0, 1)), np.zeros((0, 1))) is None
    with pytest.raises(InputError):
        paired_p(MRR, before, after[:-1])


def test_simulation_the_error_rate_without_any_change_is_the_level() -> None:
    rejected = 0
    runs = 400
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        before, after = rng.normal(0.5, 0.1, (2, 40, 1))
        p = paired_p(MRR, before, after, seed=seed)
        rejected += p is not None and p <= 0.05
    assert 0.02 * runs <= rejected <= 0.08 * runs


def scores(payload: np.ndarray, pairs: np.ndarray) -> Scores:
    return Scores({"mrr": payload, "rho": pairs}, np.zeros(len(payload), np.int64))


def correlation(pairs: np.ndarray) -> np.ndarray:
    return np.asarray(pairs[..., 0] - pairs[..., 1]).mean(axis=-1)


RHO = Metric("rho", "", True, -1.0, 1.0, correlation)


def test_every_metric_has_one() -> None:
    before, after = shifted(30, 0.05)
    reference = scores(before, np.hstack([before, before]))
    changed = scores(after, np.hstack([before, after]))
    full = p_values((MRR, RHO), reference, changed)
    assert set(full) == {"mrr", "rho"}


def test_differences_have_an_interval_of_either_sign() -> None:
    rng = np.random.default_rng(1)
    for mean in (-0.02, 0.02):
        found = difference_interval(rng.normal(mean, 0.01, 100))
        assert found.low < mean < found.high and found.resolvable
        assert np.sign(found.value) == np.sign(mean)
    assert difference_interval([]).method == "no_samples"
    assert difference_interval([np.inf, 1.0]).method == "non_finite"
    few = difference_interval([0.0] * 99 + [-0.5])
    assert few.low < -0.005 and few.high > 0, "one sample carries it: nothing is resolved"


def test_simulation_intervals_of_differences_cover() -> None:
    covered = 0
    runs = 300
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        found = difference_interval(rng.lognormal(0, 1, 115) - np.exp(0.5), seed=0)
        covered += found.low <= 0 <= found.high
    assert 0.91 * runs <= covered <= 0.99 * runs
