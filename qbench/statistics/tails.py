"""Intervals that allow for what a sample of unequal values has not shown.

A bootstrap knows the values that it saw. Where a few of them carry the variance, that makes it too
narrow in two ways, and each has an answer here; ``tail_interval`` is the wider of the two.

* The spread itself is uncertain: Student's quantile, with the degrees of freedom of a variance that
  is estimated from such values, 2 n / (kurtosis - 1) (F. Satterthwaite, 1946, "An approximate
  distribution of estimates of variance components"), moved by half of the correction for skewness
  (N. Johnson, 1978, "Modified t tests and confidence intervals for asymmetrical populations"):
  all of it would trust a skewness that is as uncertain.
* The largest values are yet to come: the interval of ``few_interval`` with one more observation at
  a multiple of the largest one seen. The multiple grows as the *effective carriers* shrink, n over
  the kurtosis: 0 from 12 carriers on, 2 at five, 8 at two.

The two numbers of the multiple were set by simulation (``benchmarks/coverage.py``), over bounded,
exponential, gamma and log-normal values and mixtures of them.
"""

from __future__ import annotations

import math

import numpy as np

from qbench.statistics.resampling import Floats

#: Multiple of the largest value: ``_REACH / carriers − _ENOUGH``, within 0 and ``FARTHEST``.
_REACH, _ENOUGH, FARTHEST = 20.0, 1.7, 8.0


def effective_carriers(values: Floats) -> float:
    """Return how many equal values would leave a mean's variance as uncertain as ``values`` [n].

    (Σ z²)² / Σ z⁴ of the centred values: n over the kurtosis. 0 where all are equal.
    """
    squares = np.square(values - values.mean())
    fourths = float(np.square(squares).sum())
    return float(squares.sum()) ** 2 / fourths if fourths > 0 else 0.0


def unseen_multiple(carriers: float) -> float:
    """Return how many times the largest value seen the next one is allowed to be."""
    return min(max(_REACH / max(carriers, 1.0) - _ENOUGH, 0.0), FARTHEST)


def student_interval(values: Floats, level: float) -> tuple[float, float]:
    """Return the interval of the mean of ``values`` [n > 1] by Student's t, moved for skewness."""
    from scipy.special import stdtrit

    n, mean = len(values), float(values.mean())
    centred = values - mean
    variance = float(np.square(centred).mean())
    error = math.sqrt(variance / (n - 1))
    freedom = max(2.0, 2.0 * effective_carriers(values))
    t = float(stdtrit(freedom, (1.0 + level) / 2.0))
    skewness = float((centred**3).mean()) / variance**1.5
    moved = skewness * (2.0 * t * t + 1.0) / (12.0 * math.sqrt(n))
    moved = min(max(moved, -t), t)
    return mean + (moved - t) * error, mean + (moved + t) * error
