"""Statistics of paired measurements: intervals, decisions and rank agreement (pure functions)."""

from __future__ import annotations

from qbench.statistics.decisions import (
    benjamini_hochberg,
    describe,
    holm,
    mcnemar,
    non_inferior,
    round_up,
    samples_needed,
)
from qbench.statistics.drops import MetricLike, paired_drop, randomisation_p
from qbench.statistics.intervals import (
    bootstrap_sum,
    difference_interval,
    mean_interval,
    median_interval,
)
from qbench.statistics.pvalues import family_draws, paired_p
from qbench.statistics.ranks import rank_agreement, rank_correlation, spearman

__all__ = [
    # intervals
    "MetricLike",
    "bootstrap_sum",
    "difference_interval",
    "mean_interval",
    "median_interval",
    "paired_drop",
    # decisions
    "benjamini_hochberg",
    "describe",
    "family_draws",
    "holm",
    "mcnemar",
    "non_inferior",
    "paired_p",
    "randomisation_p",
    "round_up",
    "samples_needed",
    # ranks
    "rank_agreement",
    "rank_correlation",
    "spearman",
]
