"""What an interval decides: non-inferior or not, how many samples would do, many tests at once."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from qbench.errors import InputError
from qbench.records import Estimate, Verdict
from qbench.statistics.resampling import Floats


def non_inferior(drop: Estimate, margin: float) -> Verdict:
    """Return the verdict on a drop (> 0 is worse) against the largest drop allowed.

    ``verified`` if the whole interval is at or below ``margin``, ``failed`` if the whole interval
    is above it, ``not_resolvable`` if the interval holds it (or is NaN).
    """
    if drop.high <= margin:
        return Verdict.VERIFIED
    if drop.low > margin:
        return Verdict.FAILED
    return Verdict.NOT_RESOLVABLE


def samples_needed(drop: Estimate, margin: float = 0.0) -> int | None:
    """Return the n at which a drop of this size would be told from ``margin``.

    The half-width on the side of ``margin`` shrinks with the square root of n; where no sample
    changed (rule of three) it shrinks with n. Rounded up to two significant digits.

    Returns:
        The number of samples; ``None`` where no number would do (the drop lies on the margin) or
        where the drop is no number.
    """
    gap = abs(margin - drop.value)
    half = drop.high - drop.value if drop.value < margin else drop.value - drop.low
    if not (math.isfinite(half) and math.isfinite(gap)) or gap == 0 or drop.n == 0:
        return None
    ratio = half / gap
    needed = drop.n * (ratio if drop.method == "rule_of_three" else ratio * ratio)
    return round_up(needed) if needed < 1e12 else None


def round_up(number: float, digits: int = 2) -> int:
    """Return the least integer ≥ ``number`` that has at most ``digits`` significant digits."""
    whole = max(1, math.ceil(number - 1e-9))
    step = int(10 ** max(0, len(str(whole)) - digits))
    return -(-whole // step) * step


def describe(drop: Estimate, margin: float = 0.0) -> str:
    """Return a drop in words: value, interval, and whether it can be told from ``margin``.

    Example: ``0.0031 [-0.0002, 0.0064]: not resolvable at n = 330; about 7,500 would do``.
    """
    if not math.isfinite(drop.value):
        return f"no drop ({drop.method.replace('_', ' ')}, n = {drop.n})"
    text = f"{drop.value:.4f} [{drop.low:.4f}, {drop.high:.4f}]"
    if drop.high < margin or drop.low > margin:
        side = "below" if drop.high < margin else "above"
        return f"{text}: {side} {margin:g} at n = {drop.n:,}"
    needed = samples_needed(drop, margin)
    rest = f"about {needed:,} would do" if needed else f"it lies on {margin:g}: no n would do"
    return f"{text}: not resolvable at n = {drop.n:,}; {rest}"


def holm(pvalues: ArrayLike) -> Floats:
    """Return p-values adjusted for the family-wise error rate, in the order given (Holm, 1979).

    Raises:
        InputError: If a p-value is outside [0, 1].
    """
    p = _pvalues(pvalues)
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def benjamini_hochberg(pvalues: ArrayLike) -> Floats:
    """Return p-values adjusted for the false discovery rate (Benjamini & Hochberg, 1995).

    Raises:
        InputError: If a p-value is outside [0, 1].
    """
    p = _pvalues(pvalues)
    order = np.argsort(-p, kind="stable")
    stepped = np.minimum.accumulate(p[order] * len(p) / np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def mcnemar(reference_correct: ArrayLike, correct: ArrayLike) -> float:
    """Return the exact two-sided p-value of McNemar's test on paired right and wrong answers.

    Under the null hypothesis a sample that changed is as likely to have become right as wrong, so
    the count of losses among the changed is binomial with 1/2. 1 if nothing changed.

    Raises:
        InputError: If the two differ in length.
    """
    before, after = np.asarray(reference_correct, bool), np.asarray(correct, bool)
    if before.shape != after.shape:
        raise InputError(
            f"paired answers have shapes {list(before.shape)} and {list(after.shape)}; needed: "
            "the same samples in the same order"
        )
    lost = int(np.count_nonzero(before & ~after))
    won = int(np.count_nonzero(~before & after))
    if lost + won == 0:
        return 1.0
    from scipy.stats import binom

    return min(1.0, 2.0 * float(binom.cdf(min(lost, won), lost + won, 0.5)))


def _pvalues(pvalues: ArrayLike) -> Floats:
    p = np.asarray(pvalues, dtype=np.float64).ravel()
    if not ((p >= 0) & (p <= 1)).all():
        raise InputError(f"p-values must lie in [0, 1]; got {p.tolist()}")
    return p
