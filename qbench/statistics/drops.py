"""Paired drop of a task metric: changed against reference, on the same samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qbench.errors import InputError
from qbench.records import Estimate
from qbench.statistics.intervals import (
    CARRY_SHARE,
    FEW,
    UNLIMITED,
    bounded_mean,
    few_interval,
    no_estimate,
    rule_of_three,
    tail_interval,
)
from qbench.statistics.resampling import Floats, Statistic, index_blocks, leave_out, replicate
from qbench.statistics.tails import FARTHEST

#: Most evaluations of a statistic with samples left out; beyond it samples are left out in groups.
MOST_LEFT_OUT = 500


class MetricLike(Protocol):
    """What a paired drop needs to know of a metric.

    ``statistic`` maps payloads [..., n, k] to values [...].
    """

    @property
    def statistic(self) -> Callable[[Any], Any]:
        """The metric's value from the payloads of its samples."""

    @property
    def low(self) -> float:
        """The lowest value that the metric can take."""

    @property
    def high(self) -> float:
        """The highest value that the metric can take."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value is a better one."""


def paired_drop(
    metric: MetricLike,
    reference_payload: ArrayLike,
    payload: ArrayLike,
    *,
    seed: int = 0,
    resamples: int = 2000,
    level: float = 0.95,
) -> Estimate:
    """Return how much worse ``payload`` is than ``reference_payload``; above zero is always worse.

    * Metrics that are the mean of a payload of one column: studentised bootstrap of the samples'
      differences, widened by ``intervals.tail_interval`` where few of them carry the variance.
    * Any other statistic (Spearman, F1, perplexity): bias-corrected and accelerated bootstrap of
      the pair (B. Efron, 1987, "Better bootstrap confidence intervals"), widened likewise.
    * Fewer than 20 samples changed: the bound of ``intervals.few_interval``; none changed: plus
      and minus the rule of three times the metric's range. A statistic that is not a mean goes
      in by its jackknife pseudo-values. Never [0, 0].

    Args:
        metric: Statistic, range and direction. An infinite range is replaced by the largest
            change that one sample of the reference could bring.
        reference_payload: Payloads of the reference, shape [n, k] or [n].
        payload: Payloads of the changed model, same shape, same samples in the same order.
        seed: Seed of the resamples; cells with one seed and n share them.
        resamples: Number of bootstrap resamples.
        level: Two-sided coverage.

    Returns:
        The drop. With no sample it is NaN with method ``no_samples``; with a NaN or infinite
        payload, NaN with ``non_finite`` (no sample is left out in silence); where the statistic
        itself is not defined on these samples, NaN with ``undefined``.

    Raises:
        InputError: If the two payloads differ in shape.
    """
    before, after = _pair(reference_payload, payload)
    n = len(before)
    if n == 0:
        return no_estimate(0, level, "no_samples")
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        return no_estimate(n, level, "non_finite")
    sign = 1.0 if metric.higher_is_better else -1.0
    if is_mean(metric.statistic, before) and is_mean(metric.statistic, after):
        worse = sign * (before - after)[:, 0]
        span = _span_of_mean(metric, before[:, 0], after[:, 0])
        limits = (-span, span) if math.isfinite(metric.high - metric.low) else UNLIMITED
        return bounded_mean(worse, -span, span, (seed, resamples, level), limits)
    return _drop_of_statistic(metric, before, after, (seed, resamples, level))


def is_mean(statistic: Statistic, payload: Floats) -> bool:
    """Return whether ``statistic`` is the mean of a payload [n, 1], tried on the payload itself."""
    n, k = payload.shape
    if k != 1:
        return False
    index = next(iter(index_blocks(n, 0, 3)))
    tried = np.concatenate([payload[None, :, :], payload[index]])
    got = np.asarray(statistic(tried), dtype=np.float64)
    return got.shape == (len(tried),) and bool(
        np.allclose(got, tried[..., 0].mean(axis=-1), rtol=1e-9, atol=1e-12)
    )


def randomisation_p(
    metric: MetricLike,
    reference_payload: ArrayLike,
    payload: ArrayLike,
    *,
    seed: int = 0,
    draws: int = 5000,
) -> float:
    """Return the two-sided p-value of "reference and changed are exchangeable", 1 if none changed.

    Each draw swaps the two payloads of a random half of the samples; the p-value counts the draws
    whose difference is as large as the one seen, itself included, so it is never 0. Adjust it
    over the cells of a run with ``holm`` or ``benjamini_hochberg``.

    Raises:
        InputError: If the payloads differ in shape or hold a value that is not finite.
    """
    before, after = _pair(reference_payload, payload)
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        raise InputError("payloads hold NaN or infinite values: no p-value can be given")
    changed = np.any(before != after, axis=1)
    if not changed.any():
        return 1.0
    statistic = metric.statistic
    seen = abs(float(statistic(before)) - float(statistic(after)))
    rng = np.random.default_rng([seed, len(before), 2])
    rows = max(1, 250_000 // before.size)
    extreme = 0
    for start in range(0, draws, rows):
        swap = rng.random((min(rows, draws - start), len(before), 1)) < 0.5
        one, other = np.where(swap, after, before), np.where(swap, before, after)
        extreme += int(np.count_nonzero(np.abs(statistic(one) - statistic(other)) >= seen - 1e-12))
    return (extreme + 1) / (draws + 1)


def _pair(reference_payload: ArrayLike, payload: ArrayLike) -> tuple[Floats, Floats]:
    before = np.asarray(reference_payload, dtype=np.float64)
    after = np.asarray(payload, dtype=np.float64)
    if before.shape != after.shape or before.ndim not in (1, 2):
        raise InputError(
            f"paired payloads have shapes {list(before.shape)} and {list(after.shape)}; needed: "
            "the same [n, k], the same samples in the same order"
        )
    if before.ndim == 1:
        before, after = before[:, None], after[:, None]
    return before, after


def _span_of_mean(metric: MetricLike, before: Floats, after: Floats) -> float:
    """Return the largest change of one sample.

    Where the metric has no range, it is the range seen, or a multiple of the largest change seen.
    """
    largest = float(np.abs(before - after).max())
    span = float(metric.high) - float(metric.low)
    if math.isfinite(span):
        return max(span, largest)
    both = np.concatenate([before, after])
    seen = max(float(both.max() - both.min()), FARTHEST * largest)
    return seen or max(float(np.abs(both).max()), 1.0)


def _drop_of_statistic(
    metric: MetricLike, before: Floats, after: Floats, draws: tuple[int, int, float]
) -> Estimate:
    seed, resamples, level = draws
    sign = 1.0 if metric.higher_is_better else -1.0
    n, k = before.shape
    both = np.concatenate([before, after], axis=1)

    def drop(paired: Floats) -> Floats:
        old, new = metric.statistic(paired[..., :k]), metric.statistic(paired[..., k:])
        return np.asarray(sign * (np.asarray(old) - np.asarray(new)), dtype=np.float64)

    value = float(drop(both))
    if not math.isfinite(value):
        return no_estimate(n, level, "undefined")
    changed = _changed(before, after)
    span = float(metric.high) - float(metric.low)
    if not math.isfinite(span):
        span = _reference_reach(metric.statistic, before)
    method = "few_changed"
    if not changed.any():
        half = span * rule_of_three(n, level)
        low, high, method = value - half, value + half, "rule_of_three"
    else:
        influence = _influences(drop, both, value, changed)
        few = int(changed.sum()) < FEW
        ends = None if few else _bca(metric, before, after, value, influence, draws)
        if ends is None:  # a rare class weighs more than the metric's range times one sample
            reach = max(span, _reference_reach(metric.statistic, before))
            low, high = few_interval(value + influence, -reach, reach, seed=seed, level=level)
        else:
            wide = tail_interval(value + influence, UNLIMITED, seed=seed, level=level)
            low, high, method = min(ends[0], wide[0]), max(ends[1], wide[1]), "bootstrap_bca"
    low, high = max(low, -span), min(high, span)
    return Estimate(value, min(low, value), max(high, value), n, level, method)


def _changed(before: Floats, after: Floats) -> NDArray[np.bool_]:
    """Return which samples changed by more than a trace beside the largest change [n]."""
    change = np.abs(before - after)
    largest = change.max(axis=0, initial=0.0)
    return np.asarray(((change > CARRY_SHARE * largest) & (change > 0)).any(axis=1))


def _influences(
    statistic: Statistic, payload: Floats, value: float, single: NDArray[np.bool_]
) -> Floats:
    """Return the jackknife influence of each sample on ``statistic`` [n]; their mean is 0.

    Up to ``MOST_LEFT_OUT`` samples are left out one by one, the ``single`` ones first; the rest
    are left out in groups that share their influence.
    """
    n = len(payload)
    if n < 2:
        return np.zeros(n)
    alone, rest = np.flatnonzero(single), np.flatnonzero(~single)
    if len(alone) >= MOST_LEFT_OUT:
        alone, rest = alone[:0], np.arange(n)
    groups = [np.array([i]) for i in alone]
    if len(rest):
        pieces = min(len(rest), max(1, MOST_LEFT_OUT - len(alone)))
        groups += list(np.array_split(rest, pieces))
    without = leave_out(statistic, payload, groups)
    influence = np.zeros(n)
    for group, left in zip(groups, without, strict=True):
        if math.isfinite(left):
            influence[group] = (n - len(group)) / len(group) * (value - left)
    return np.asarray(influence - influence.mean())


def _reference_reach(statistic: Statistic, payload: Floats) -> float:
    """Return twice the largest influence of a sample of the reference [n, k], or 1; it is kept."""
    try:
        return _kept_reach(statistic, payload.tobytes(), payload.shape)
    except TypeError:  # a statistic that cannot be hashed
        return _largest_influence(statistic, payload)


def _largest_influence(statistic: Statistic, payload: Floats) -> float:
    value = float(statistic(payload))
    influence = _influences(statistic, payload, value, np.zeros(len(payload), dtype=bool))
    return 2.0 * float(np.abs(influence).max(initial=0.0)) or 1.0


@lru_cache(maxsize=4)
def _kept_reach(statistic: Statistic, content: bytes, shape: tuple[int, ...]) -> float:
    return _largest_influence(statistic, np.frombuffer(content, dtype=np.float64).reshape(shape))


def _bca(
    metric: MetricLike,
    before: Floats,
    after: Floats,
    value: float,
    influence: Floats,
    draws: tuple[int, int, float],
) -> tuple[float, float] | None:
    seed, resamples, level = draws
    sign = 1.0 if metric.higher_is_better else -1.0
    new = replicate(metric.statistic, after, seed, resamples)
    old = _reference_replicates(metric.statistic, before, seed, resamples)
    return bca_ends(sign * (old - new), value, influence, level)


def _reference_replicates(
    statistic: Statistic, payload: Floats, seed: int, resamples: int
) -> Floats:
    """Return the reference's replicates, kept from one cell to the next."""
    try:
        hash(statistic)
    except TypeError:
        return replicate(statistic, payload, seed, resamples)
    return _kept_replicates(statistic, payload.tobytes(), payload.shape, seed, resamples)


def bca_ends(
    replicates: Floats, value: float, influence: Floats, level: float
) -> tuple[float, float] | None:
    """Return the bias-corrected and accelerated ends, ``None`` where the bootstrap broke down.

    The quantiles are Student's, not the normal's: few or unequal influences make the spread
    itself uncertain, and the plain interval too narrow. The degrees of freedom are those of a
    variance estimated from them, 2 n / (kurtosis - 1) (F. Satterthwaite, 1946).

    Args:
        replicates: The statistic of each resample [resamples]; those that are NaN (a resample
            without one of the classes) are left out, up to a half of them.
        value: The statistic of the sample.
        influence: Influence of each sample on it [n].
        level: Two-sided coverage.
    """
    from scipy.special import ndtr, ndtri, stdtrit

    usable = replicates[np.isfinite(replicates)]
    if 2 * len(usable) < len(replicates) or np.ptp(usable) == 0:
        return None
    below = np.mean(usable < value) + 0.5 * np.mean(usable == value)
    edge = 1.0 / (len(usable) + 1)
    bias = float(ndtri(np.clip(below, edge, 1.0 - edge)))
    squares = float(np.square(influence).sum())
    if squares == 0:
        return None
    skew = float((influence**3).sum()) / (6.0 * squares**1.5)
    kurtosis = len(influence) * float((influence**4).sum()) / squares**2
    freedom = max(2.0, 2.0 * len(influence) / max(kurtosis - 1.0, 1e-6))
    z = stdtrit(freedom, np.array([(1.0 - level) / 2.0, (1.0 + level) / 2.0])) + bias
    shares = ndtr(bias + z / np.maximum(1.0 - skew * z, 1e-3))
    low, high = np.quantile(usable, shares)
    return float(low), float(high)


@lru_cache(maxsize=4)
def _kept_replicates(
    statistic: Statistic, content: bytes, shape: tuple[int, ...], seed: int, resamples: int
) -> Floats:
    payload = np.frombuffer(content, dtype=np.float64).reshape(shape)
    kept = replicate(statistic, payload, seed, resamples)
    kept.setflags(write=False)
    return kept
