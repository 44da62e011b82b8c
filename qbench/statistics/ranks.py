"""Rank correlations: between two scores, and between two halves of the samples."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from qbench.errors import InputError
from qbench.records import Estimate
from qbench.statistics.drops import bca_ends
from qbench.statistics.intervals import no_estimate
from qbench.statistics.resampling import Floats, leave_out, replicate


def rank_correlation(pairs: Floats) -> Floats:
    """Return Spearman's ρ of ``pairs`` [..., n, 2] → [...], ties by average rank; NaN if constant.

    The Pearson correlation of the ranks.
    """
    from scipy.stats import rankdata

    ranks = rankdata(pairs, axis=-2)
    ranks = ranks - ranks.mean(axis=-2, keepdims=True)
    cross = (ranks[..., 0] * ranks[..., 1]).sum(axis=-1)
    scale = np.sqrt(np.square(ranks[..., 0]).sum(axis=-1) * np.square(ranks[..., 1]).sum(axis=-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(scale > 0, cross / scale, np.nan))


def spearman(
    x: ArrayLike, y: ArrayLike, *, seed: int = 0, resamples: int = 2000, level: float = 0.95
) -> Estimate:
    """Return Spearman's ρ of two scores [n] with its bias-corrected, accelerated interval.

    NaN (method ``undefined``) with fewer than two pairs, a constant score or a value that is not
    finite. With fewer than five pairs the interval is [-1, 1].

    Raises:
        InputError: If the two differ in length.
    """
    one, two = np.asarray(x, dtype=np.float64).ravel(), np.asarray(y, dtype=np.float64).ravel()
    if one.shape != two.shape:
        raise InputError(f"scores have {one.size} and {two.size} values; needed: equally many")
    pairs = np.stack([one, two], axis=-1)
    n = len(pairs)
    if n < 2 or not np.isfinite(pairs).all():
        return no_estimate(n, level, "undefined")
    value = float(rank_correlation(pairs))
    if not math.isfinite(value):
        return no_estimate(n, level, "undefined")
    ends = None
    if n >= 5:
        groups = list(np.array_split(np.arange(n), min(n, 500)))
        influence = value - leave_out(rank_correlation, pairs, groups)
        influence = np.nan_to_num(influence)
        replicates = replicate(rank_correlation, pairs, seed, resamples)
        ends = bca_ends(replicates, value, influence - influence.mean(), level)
    low, high = ends or (-1.0, 1.0)
    return Estimate(value, min(low, value), max(high, value), n, level, "bootstrap_bca")


def rank_agreement(
    divergences: ArrayLike, *, seed: int = 0, splits: int = 200, level: float = 0.95
) -> Estimate:
    """Return how well two halves of the samples agree on the ranking of the cells.

    The samples are split at random into two halves; each half ranks the cells by mean divergence;
    Spearman's ρ of the two rankings is taken. Repeated over ``splits`` splits: the value is the
    mean, the interval holds ``level`` of the splits.

    Args:
        divergences: Shape [cells, n].
        seed: Seed of the splits.
        splits: Number of random splits.
        level: Share of the splits inside the interval.

    Returns:
        The agreement, at most 1; NaN (method ``undefined``) with fewer than two cells or samples,
        with a value that is not finite, or where all cells are equal.

    Raises:
        InputError: If ``divergences`` is not two-dimensional.
    """
    array = np.asarray(divergences, dtype=np.float64)
    if array.ndim != 2:
        raise InputError(f"divergences have shape {list(array.shape)}; needed: [cells, n]")
    cells, n = array.shape
    if cells < 2 or n < 2 or not np.isfinite(array).all():
        return no_estimate(n, level, "undefined")
    rng = np.random.default_rng([seed, n, 3])
    half = n // 2
    correlations = np.empty(splits)
    for at in range(splits):
        order = rng.permutation(n)
        first = array[:, order[:half]].mean(axis=1)
        second = array[:, order[half:]].mean(axis=1)
        correlations[at] = rank_correlation(np.stack([first, second], axis=-1))
    usable = correlations[np.isfinite(correlations)]
    if not len(usable):
        return no_estimate(n, level, "undefined")
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(usable, [tail, 1.0 - tail])
    return Estimate(float(usable.mean()), float(low), float(high), n, level, "split_half")
