from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qbench.tasks.ranking import Rights, best_candidates, discounted_gains, reciprocal_ranks


def over_all_orders(scores: np.ndarray, right: list[int]) -> tuple[float, float]:
    """Return MRR and nDCG@10 averaged over every way to break ties."""
    ideal = sum(1 / np.log2(rank + 1) for rank in range(1, len(right) + 1))
    reciprocal, gain = [], []
    for order in itertools.permutations(range(len(scores))):
        ranked = sorted(order, key=lambda candidate: -scores[candidate])
        ranks = [ranked.index(candidate) + 1 for candidate in right]
        reciprocal.append(1 / min(ranks))
        gain.append(sum(1 / np.log2(rank + 1) for rank in ranks) / ideal)
    return float(np.mean(reciprocal)), float(np.mean(gain))


@given(
    levels=st.lists(st.integers(0, 2), min_size=2, max_size=5),
    chosen=st.sets(st.integers(0, 4), min_size=1),
)
def test_ties_are_the_expectation_over_all_orders(levels: list[int], chosen: set[int]) -> None:
    right = sorted({index % len(levels) for index in chosen})
    scores = np.array(levels, float)
    rights = Rights(np.zeros(len(right), int), np.array(right))
    reciprocal, gain = over_all_orders(scores, right)
    assert reciprocal_ranks(scores[None], rights)[0] == pytest.approx(reciprocal, abs=1e-12)
    assert discounted_gains(scores[None], rights)[0] == pytest.approx(gain, abs=1e-12)


def test_a_collapsed_model_gets_what_chance_gives() -> None:
    scores = np.full((1, 4), 0.5)
    rights = Rights(np.array([0]), np.array([0]))
    assert reciprocal_ranks(scores, rights)[0] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)


def test_rounding_noise_breaks_no_tie() -> None:
    rights = Rights(np.array([0]), np.array([1]))
    tied, noisy = np.array([[0.5, 0.5, 0.1]]), np.array([[0.5 + 4e-7, 0.5, 0.1]])
    assert reciprocal_ranks(tied, rights) == reciprocal_ranks(noisy, rights) == [0.75]
    assert best_candidates(tied) == best_candidates(noisy) == [0]


def test_place_in_the_pool_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (20, 30)) / 4
    right = rng.integers(0, 30, 20)
    order = rng.permutation(30)
    place = np.argsort(order)
    before, after = Rights(np.arange(20), right), Rights(np.arange(20), place[right])
    for metric in (reciprocal_ranks, discounted_gains):
        np.testing.assert_allclose(metric(scores, before), metric(scores[:, order], after))


def test_gains_end_at_depth_ten() -> None:
    scores = -np.arange(12.0)[None]
    assert discounted_gains(scores, Rights(np.array([0]), np.array([10])))[0] == 0
    assert discounted_gains(scores, Rights(np.array([0]), np.array([9])))[0] > 0
