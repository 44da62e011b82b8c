"""Intervals of means: studentised bootstrap, and an exact kind of bound where few samples carry it.

Why two. A bootstrap learns the size of a change from the samples that changed. Where fewer than
twenty did, it is blind to what it has not drawn yet and covers the truth too seldom; with none it
would say [0, 0]. There the interval is taken from the sample itself plus **one more observation
at the largest possible value**, under weights that are uniform on the simplex (N. Gaffke, 2005,
"Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative
variable"; E. Learned-Miller & P. Thomas, 2019, "A new confidence interval for the mean of a
bounded random variable"). For changes that are all of one size it *is* the Clopper-Pearson bound
on the share of changed samples times that size; with no change at all it is the rule of three
times the range; between the two it is far tighter than their product.

A bootstrap is also too narrow where many samples changed and few of them carry the variance; there
it is widened by ``tails``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from qbench.errors import InputError
from qbench.records import Estimate
from qbench.statistics.resampling import Floats, count_blocks, simplex_blocks
from qbench.statistics.tails import effective_carriers, student_interval, unseen_multiple

#: Limits of values that have none.
UNLIMITED = (-math.inf, math.inf)
#: Below this number of samples that carry a mean, the bootstrap is not trusted.
FEW = 20
#: A sample carries a mean if its magnitude passes this share of the largest one.
CARRY_SHARE = 1e-3
#: Draws behind the interval of few changes (its ends are quantiles, so it takes more of them).
SIMPLEX_DRAWS = 4000
#: Draws behind the interval that allows for what was not seen: it has to be cheap.
TAIL_DRAWS = 1000


def no_estimate(n: int, level: float, method: str) -> Estimate:
    """Return the estimate that says nothing: value and both ends are NaN, ``method`` tells why."""
    return Estimate(math.nan, math.nan, math.nan, n, level, method)


def carriers(values: Floats) -> int:
    """Return how many of ``values`` [n] are more than a trace beside the largest magnitude."""
    magnitude = np.abs(values)
    largest = float(magnitude.max(initial=0.0))
    return int(np.count_nonzero(magnitude > CARRY_SHARE * largest)) if largest > 0 else 0


def rule_of_three(n: int, level: float) -> float:
    """Return the largest share of a population that ``n`` samples may all have missed.

    −ln(1 − level) / n, at most 1: 3 / n at 95 %.
    """
    return min(1.0, -math.log(1.0 - level) / n)


def few_interval(
    values: Floats,
    low: float,
    high: float,
    *,
    seed: int,
    level: float,
    draws: int = SIMPLEX_DRAWS,
) -> tuple[float, float]:
    """Return an interval of the mean of ``values`` [n], each of which lies in [low, high].

    It covers at ``level`` or more, whatever the distribution (see the module's text).
    """
    n = len(values)
    if low < 0 < high and not np.any(values):
        half = rule_of_three(n, level)
        return low * half, high * half
    sums, extra = [], []
    for weights in simplex_blocks(n, seed, draws):
        sums.append(weights[:, :n] @ values)
        extra.append(weights[:, n])
    inner, outer = np.concatenate(sums), np.concatenate(extra)
    tail = (1.0 - level) / 2.0
    return (
        float(np.quantile(inner + outer * low, tail)),
        float(np.quantile(inner + outer * high, 1.0 - tail)),
    )


def studentised_interval(
    values: Floats, *, seed: int, resamples: int, level: float
) -> tuple[float, float] | None:
    """Return the bootstrap-t interval of the mean of ``values`` [n]; ``None`` without spread.

    Second-order accurate under skew (B. Efron & R. Tibshirani, 1993, "An Introduction to the
    Bootstrap", chapter 12).
    """
    n = len(values)
    mean = float(values.mean())
    centred = values - mean
    error = math.sqrt(float(np.square(centred).sum()) / n)
    if error <= 1e-12 * max(abs(mean), float(np.abs(values).max(initial=0.0))):
        return None
    pivots = []
    for counts in count_blocks(n, seed, resamples):
        first = counts @ centred / n
        second = counts @ np.square(centred) / n
        spread = np.sqrt(np.maximum(second - np.square(first), 0.0))
        pivots.append(first / np.maximum(spread, 1e-9 * error))
    tail = (1.0 - level) / 2.0
    lower, upper = np.quantile(np.concatenate(pivots), [tail, 1.0 - tail])
    return mean - float(upper) * error, mean - float(lower) * error


def tail_interval(
    values: Floats, limits: tuple[float, float], *, seed: int, level: float
) -> tuple[float, float]:
    """Return an interval of the mean of ``values`` [n > 1] that allows for what was not seen.

    Args:
        values: The values; they are not all equal.
        limits: What a value can be, at least and at most.
        seed: Seed of the draws.
        level: Two-sided coverage.
    """
    low, high = student_interval(values, level)
    times = unseen_multiple(effective_carriers(values))
    if times > 0:
        least = max(limits[0], times * min(float(values.min()), 0.0))
        most = min(limits[1], times * max(float(values.max()), 0.0))
        lower, upper = few_interval(values, least, most, seed=seed, level=level, draws=TAIL_DRAWS)
        low, high = min(low, lower), max(high, upper)
    return low, high


def bounded_mean(
    values: Floats,
    low: float,
    high: float,
    draws: tuple[int, int, float],
    limits: tuple[float, float] | None = None,
) -> Estimate:
    """Return the mean of ``values`` [n > 0] with its interval.

    Args:
        values: The values.
        low: The least value that one can take, where few carry the mean.
        high: The largest, likewise.
        draws: Seed, number of resamples and level.
        limits: What a value and a mean can be at all; ``low`` and ``high`` by default.
    """
    seed, resamples, level = draws
    n, mean = len(values), float(values.mean())
    ends, method = None, "bootstrap_t"
    if carriers(values) >= FEW:
        ends = studentised_interval(values, seed=seed, resamples=resamples, level=level)
    if ends is None:
        ends = few_interval(values, low, high, seed=seed, level=level)
        method = "few_changed" if np.any(values) else "rule_of_three"
        lower, upper = max(ends[0], low), min(ends[1], high)
    else:
        least, most = limits or (low, high)
        wide = tail_interval(values, (least, most), seed=seed, level=level)
        lower, upper = max(min(ends[0], wide[0]), least), min(max(ends[1], wide[1]), most)
    return Estimate(mean, min(lower, mean), max(upper, mean), n, level, method)


def mean_interval(
    values: ArrayLike,
    *,
    high: float | None = None,
    seed: int = 0,
    resamples: int = 2000,
    level: float = 0.95,
) -> Estimate:
    """Return the mean of non-negative ``values`` [n] (divergences) with its interval.

    Args:
        values: One number a sample, shape [n].
        high: The largest value that a sample can take. Where fewer than 20 samples carry the
            mean, the interval's upper end depends on it. ``None``: 1, or the largest value seen
            if that is more (a divergence has no natural limit).
        seed: Seed of the resamples.
        resamples: Number of bootstrap resamples.
        level: Two-sided coverage.

    Returns:
        The estimate; its ``method`` is ``bootstrap_t``, ``few_changed`` or ``rule_of_three`` (all
        zeros: the upper end is the rule of three times ``high``, never 0). With no sample it is
        NaN with method ``no_samples``; with a NaN or infinite sample, NaN with ``non_finite``.
    """
    array = np.asarray(values, dtype=np.float64).ravel()
    if array.size == 0:
        return no_estimate(0, level, "no_samples")
    if not np.isfinite(array).all():
        return no_estimate(array.size, level, "non_finite")
    low = min(0.0, float(array.min()))
    top = max(1.0 if high is None else high, float(array.max()))
    limits = (low, math.inf if high is None else top)
    if not np.any(array):
        upper = top * rule_of_three(array.size, level)
        return Estimate(0.0, 0.0, upper, array.size, level, "rule_of_three")
    return bounded_mean(array, low, top, (seed, resamples, level), limits)


def difference_interval(
    differences: ArrayLike, *, seed: int = 0, resamples: int = 2000, level: float = 0.95
) -> Estimate:
    """Return the mean of paired differences [n], of either sign, with its interval.

    Each difference is taken to lie within plus and minus 1, or the largest magnitude seen if that
    is more; it matters where fewer than 20 samples carry the mean.

    Returns:
        The estimate, by the methods of ``mean_interval``.
    """
    array = np.asarray(differences, dtype=np.float64).ravel()
    if array.size == 0:
        return no_estimate(0, level, "no_samples")
    if not np.isfinite(array).all():
        return no_estimate(array.size, level, "non_finite")
    span = max(1.0, float(np.abs(array).max()))
    return bounded_mean(array, -span, span, (seed, resamples, level), UNLIMITED)


def bootstrap_sum(
    divergences: ArrayLike | Sequence[ArrayLike],
    *,
    seed: int = 0,
    resamples: int = 2000,
    level: float = 0.95,
) -> Estimate:
    """Return the sum over cells of their mean divergence, with its interval.

    The cells share their samples, so whole samples are drawn: the cells' errors are not taken as
    independent.

    Args:
        divergences: Shape [cells, n]; column i is sample i in every cell.
        seed: Seed of the resamples.
        resamples: Number of bootstrap resamples.
        level: Two-sided coverage.

    Raises:
        InputError: If ``divergences`` is not two-dimensional.
    """
    array = np.asarray(divergences, dtype=np.float64)
    if array.ndim != 2:
        raise InputError(
            f"divergences have shape {list(array.shape)}; needed: [cells, n], the same n samples "
            "in every cell"
        )
    if array.shape[0] == 0:
        return Estimate(0.0, 0.0, 0.0, array.shape[1], level, "no_cells")
    total = array.sum(axis=0)
    return mean_interval(total, high=float(len(array)), seed=seed, resamples=resamples, level=level)


def median_interval(values: ArrayLike, *, level: float = 0.95) -> Estimate:
    """Return the median of ``values`` [n] with its order-statistic interval.

    Distribution-free: the ends are the k-th values from both sides, k by the binomial
    distribution. With fewer than six values no pair of them covers at 95 %; then it is the
    smallest and the largest, and ``level`` says what they cover.
    """
    array = np.sort(np.asarray(values, dtype=np.float64).ravel())
    n = array.size
    if n == 0:
        return no_estimate(0, level, "no_samples")
    if not np.isfinite(array).all():
        return no_estimate(n, level, "non_finite")
    from scipy.stats import binom

    tails = binom.cdf(np.arange(n), n, 0.5)  # P(fewer than k + 1 values below the median)
    inside = int(np.count_nonzero(tails[: n // 2 + 1] <= (1.0 - level) / 2.0))
    k = min(max(inside, 1), (n + 1) // 2)
    reached = 1.0 - 2.0 * float(tails[k - 1]) if n > 1 else 0.0
    covered = level if inside >= 1 else max(reached, 0.0)
    return Estimate(
        float(np.median(array)),
        float(array[k - 1]),
        float(array[n - k]),
        n,
        covered,
        "order_statistics",
    )
