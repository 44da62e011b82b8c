"""Ranks of cells by divergence, with the interval that resampling the samples gives them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qbench.records import Estimate, SweepRecord
from qbench.report.samples import cells_by_format, divergence_samples, is_partial


def ranks_by_divergence(divergences: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return rank 1 for the most divergent cell, from mean divergences of shape [cells]."""
    order = np.argsort(-divergences, kind="stable")
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(1, len(order) + 1)
    return ranks


def rank_intervals(
    samples: NDArray[np.float64], *, seed: int = 0, resamples: int = 1000, level: float = 0.95
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lowest and highest rank of each cell over bootstrap draws of the samples.

    All cells share one draw, for they were measured on the same samples.

    Args:
        samples: Divergence of each cell and sample, shape [cells, n].
        seed: Seed of the draws.
        resamples: Number of draws.
        level: Coverage of the interval.

    Returns:
        Two arrays of shape [cells]: percentile bounds of the rank.
    """
    cells, n = samples.shape
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)
    means = draws @ samples.T / n  # [resamples, cells]
    order = np.argsort(-means, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(1, cells + 1)[None, :], axis=1)
    tail = (1 - level) / 2
    low = np.quantile(ranks, tail, axis=0, method="lower").astype(np.int64)
    high = np.quantile(ranks, 1 - tail, axis=0, method="higher").astype(np.int64)
    return low, high


def half_agreement(records: Sequence[SweepRecord], seed: int = 0) -> dict[str, Estimate]:
    """Return how well two halves of the samples agree on the order of layers, by format.

    Only cells that were measured on all samples count. Formats with fewer than three of them, or
    whose samples were not kept, are left out.
    """
    from qbench.statistics import rank_agreement

    found: dict[str, Estimate] = {}
    whole = [record for record in records if not is_partial(record)]
    for name, places in cells_by_format(whole).items():
        samples = divergence_samples([whole[place] for place in places])
        if samples is not None and len(places) >= 3 and samples.shape[1] >= 4:
            found[name] = rank_agreement(samples, seed=seed)
    return found
