"""Simulations with known truth: how often an interval holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qbench.statistics import mean_interval, paired_drop, rank_correlation

Array = np.ndarray[Any, Any]
Draw = Callable[[np.random.Generator, int], Array]

TRIALS = 800
#: Three standard errors of a share of 95 % in that many trials.
NOISE = 3 * (0.95 * 0.05 / TRIALS) ** 0.5
#: Trials, and two standard errors, where only a lower bound is checked.
FEWER, SLACK = 300, 2 * (0.95 * 0.05 / 300) ** 0.5


@dataclass(frozen=True)
class Metric:
    statistic: Callable[[Array], Array]
    low: float = 0.0
    high: float = 1.0
    higher_is_better: bool = True


RECIPROCAL_RANK = Metric(lambda payload: np.asarray(payload[..., 0].mean(axis=-1)))
SPEARMAN = Metric(rank_correlation, -1.0, 1.0)
LOSS = Metric(RECIPROCAL_RANK.statistic, 0.0, float("inf"), higher_is_better=False)


def answers(share: float, lost: float) -> tuple[Draw, float]:
    """Right or wrong: a share of the samples changes, a part of these to wrong."""

    def draw(rng: np.random.Generator, n: int) -> Array:
        worse = np.where(rng.random(n) < lost, 1.0, -1.0)
        return worse * (rng.random(n) < share)

    return draw, share * (2 * lost - 1)


def ranks(share: float) -> tuple[Draw, float]:
    """Reciprocal ranks: most answers move by a place or so, some far."""
    rng = np.random.default_rng(5)
    before = 1 / np.ceil(rng.pareto(0.7, 100_000) + 1e-9)
    after = 1 / np.ceil(np.maximum(1, np.exp(rng.normal(0.2, 0.7, 100_000)) / before))
    moved = (before - after)[before != after]

    def draw(rng: np.random.Generator, n: int) -> Array:
        return np.asarray(rng.choice(moved, n) * (rng.random(n) < share))

    return draw, share * float(moved.mean())


def won_and_lost(share: float) -> tuple[Draw, float]:
    """Reciprocal ranks that move as often up as down: few of the changed samples carry it."""
    draw, _ = ranks(share)

    def either(rng: np.random.Generator, n: int) -> Array:
        return draw(rng, n) * rng.choice([-1.0, 1.0], n)

    return either, 0.0


def uneven(share: float) -> tuple[Draw, float]:
    """Changes of either sign, log-normal in size."""

    def draw(rng: np.random.Generator, n: int) -> Array:
        signs = rng.choice([-1.0, 1.0], n) * (rng.random(n) < share)
        return np.clip(signs * rng.lognormal(-4.0, 1.0, n), -1.0, 1.0)

    return draw, 0.0


def skewed(share: float) -> tuple[Draw, float]:
    """Changes of one direction and of very unequal size."""

    def draw(rng: np.random.Generator, n: int) -> Array:
        return np.minimum(rng.exponential(0.1, n), 1.0) * (rng.random(n) < share)

    return draw, share * 0.1 * (1 - float(np.exp(-10)))


def one_size(share: float, size: float) -> tuple[Draw, float]:
    def draw(rng: np.random.Generator, n: int) -> Array:
        return size * (rng.random(n) < share)

    return draw, share * size


def rare_and_large(share: float) -> tuple[Draw, float]:
    """Mostly small gains, seldom a full loss: what a bootstrap of few samples never sees."""

    def draw(rng: np.random.Generator, n: int) -> Array:
        sizes = np.where(rng.random(n) < 0.05, 1.0, -0.1)
        return sizes * (rng.random(n) < share)

    return draw, share * (0.05 - 0.095)


def coverage(
    case: tuple[Draw, float], n: int, keep: Callable[[Array], bool], trials: int = TRIALS
) -> float:
    draw, truth = case
    rng = np.random.default_rng(n)
    held = tried = 0
    for _ in range(trials):
        change = draw(rng, n)
        if not keep(change):
            continue
        before = np.maximum(change, 0.0)
        drop = paired_drop(RECIPROCAL_RANK, before, before - change, resamples=1000)
        tried += 1
        held += drop.low <= truth <= drop.high
    assert tried > 0.9 * trials
    return held / tried


@pytest.mark.parametrize("n", [230, 500])
@pytest.mark.parametrize(
    "case",
    [answers(0.15, 0.5), answers(0.15, 0.8), answers(0.5, 0.6), ranks(0.3), skewed(0.25)],
    ids=["answers", "answers-lost", "answers-many", "ranks", "skewed"],
)
def test_coverage_where_twenty_samples_or_more_changed(case: tuple[Draw, float], n: int) -> None:
    share = coverage(case, n, lambda change: np.count_nonzero(change) >= 20)
    assert 0.93 - NOISE / 3 <= share <= 0.97 + NOISE / 3


@pytest.mark.parametrize("n", [30, 230])
@pytest.mark.parametrize("expected", [3.0, 8.0])
@pytest.mark.parametrize("family", ["full", "small", "both", "rare"])
def test_coverage_where_few_samples_changed(family: str, expected: float, n: int) -> None:
    share = expected / n
    case = {
        "full": one_size(share, 1.0),
        "small": one_size(share, 0.05),
        "both": answers(share, 0.5),
        "rare": rare_and_large(share),
    }[family]
    held = coverage(case, n, lambda change: np.count_nonzero(change) < 20)
    assert held >= 0.95 - NOISE / 3


@pytest.mark.parametrize(
    "case", [won_and_lost(0.17), uneven(0.2), uneven(1.0)], ids=["ranks", "few", "all"]
)
def test_coverage_where_few_of_the_changed_samples_carry_it(case: tuple[Draw, float]) -> None:
    """The bootstrap alone covers 0.88 to 0.93 here; being too wide is the better error."""
    share = coverage(case, 230, lambda change: np.count_nonzero(change) >= 20, FEWER)
    assert share >= 0.93 - SLACK


@pytest.mark.parametrize("n", [100, 230])
@pytest.mark.parametrize(("sigma", "least"), [(1.0, 0.93), (1.5, 0.92), (2.0, 0.91)])
def test_coverage_of_a_mean_divergence(n: int, sigma: float, least: float) -> None:
    """Beyond a sigma of 1.5 the nominal level is out of reach without assuming the shape."""
    rng = np.random.default_rng(n)
    truth = float(np.exp(-6 + sigma**2 / 2))
    held = 0
    for _ in range(FEWER):
        seen = mean_interval(rng.lognormal(-6.0, sigma, n), resamples=1000)
        held += seen.low <= truth <= seen.high
    assert held / FEWER >= least - SLACK


def test_coverage_of_a_loss_without_a_range() -> None:
    """Seven of 230 losses change, unequally; no range says how far one could."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(FEWER):
        before = rng.gamma(1.0, 1.5, 230)
        change = 0.1 * (rng.gamma(0.5, 1.0, 230) - rng.exponential(0.3, 230))
        after = before + change * (rng.random(230) < 7 / 230)
        drop = paired_drop(LOSS, before, after, resamples=500)
        held += drop.low <= 0.1 * 0.2 * 7 / 230 <= drop.high
    assert held / FEWER >= 0.95 - SLACK


def test_coverage_of_a_statistic_that_is_no_mean() -> None:
    rng = np.random.default_rng(0)

    def pair(n: int) -> tuple[Array, Array]:
        label = rng.normal(size=n)
        before = label + 0.7 * rng.normal(size=n)
        after = before + 0.4 * rng.normal(size=n)
        return np.stack([before, label], axis=-1), np.stack([after, label], axis=-1)

    many = [pair(100_000) for _ in range(2)]
    truth = float(np.mean([rank_correlation(b) - rank_correlation(a) for b, a in many]))
    trials, held = 60, 0
    for _ in range(trials):
        drop = paired_drop(SPEARMAN, *pair(80), resamples=300)
        held += drop.low <= truth <= drop.high
    assert 0.87 <= held / trials <= 1.0
