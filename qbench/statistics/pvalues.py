"""The p-value of one paired change, at a price that fits a family of hundreds."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from qbench.statistics.decisions import mcnemar
from qbench.statistics.drops import MetricLike, randomisation_p

#: A first look of so many draws ends the test where it gives more than ``_CLEARLY_NOT``.
_FIRST_LOOK, _CLEARLY_NOT = 1000, 0.05
_LEAST_DRAWS, _DRAWS_A_TEST = 5000, 40


def family_draws(tests: int) -> int:
    """Return the draws a test that let the smallest p-value survive Holm over so many tests.

    With 40 draws a test the smallest p-value times the number of tests is 0.025.
    """
    return max(_LEAST_DRAWS, _DRAWS_A_TEST * tests)


def paired_p(
    metric: MetricLike,
    reference_payload: ArrayLike,
    payload: ArrayLike,
    *,
    seed: int = 0,
    family: int = 1,
) -> float | None:
    """Return the two-sided p-value of "nothing changed", 1 if no sample did.

    Payloads of rights and wrongs (0 and 1) get McNemar's exact test; all else swaps the two sides
    of random samples (``randomisation_p``).

    NOTE: a second, longer look follows only where the first gives at most 0.05. At any level up to
    0.05 the error rate is that of the second look, or less: the first can only withhold.

    Args:
        metric: Statistic, range and direction.
        reference_payload: Payloads of the reference, shape [n, k] or [n].
        payload: Payloads of the changed model, same shape and samples.
        seed: Seed of the draws.
        family: Number of tests that it will be adjusted with.

    Returns:
        The p-value; ``None`` without samples, or where a payload is not finite.

    Raises:
        InputError: If the payloads differ in shape.
    """
    before, after = (np.asarray(x, dtype=np.float64) for x in (reference_payload, payload))
    if not before.size or not (np.isfinite(before).all() and np.isfinite(after).all()):
        return None
    if _is_binary(before) and _is_binary(after):
        return mcnemar(before.ravel() == 1, after.ravel() == 1)
    first = randomisation_p(metric, before, after, seed=seed, draws=_FIRST_LOOK)
    if first > _CLEARLY_NOT:
        return first
    return randomisation_p(metric, before, after, seed=seed + 1, draws=family_draws(family))


def _is_binary(payload: np.ndarray) -> bool:
    single = payload.ndim == 1 or payload.shape[1] == 1
    return single and bool(np.isin(payload, (0.0, 1.0)).all())
