from __future__ import annotations

import time

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import f1_score

from qbench.errors import DataError, InputError
from qbench.tasks import check_expectation
from qbench.tasks.metrics import (
    ACCURACY,
    CROSS_ENTROPY,
    MRR,
    NDCG,
    macro_f1_statistic,
    put_first,
    spearman_statistic,
)


@pytest.mark.parametrize("decimals", [0, 1, 9])
def test_spearman_is_scipys_with_and_without_ties(decimals: int) -> None:
    payload = np.random.default_rng(decimals).normal(size=(6, 40, 2)).round(decimals)
    expected = [spearmanr(*pairs.T).statistic for pairs in payload]
    np.testing.assert_allclose(spearman_statistic(payload), expected, atol=1e-12)


def test_spearman_of_a_bootstrap_whose_late_sets_hold_new_values() -> None:
    payload = np.zeros((70, 5, 2))
    payload[:, :, 1] = np.arange(5)
    payload[69, :, 0] = [3, 1, 2, 5, 4]
    values = spearman_statistic(payload)
    assert (values[:69] == 0).all()
    assert values[69] == pytest.approx(spearmanr(*payload[69].T).statistic)


@pytest.mark.parametrize("classes", [2, 7, 200])
def test_macro_f1_is_scikit_learns(classes: int) -> None:
    payload = np.random.default_rng(classes).integers(0, classes, (6, 50, 2)).astype(float)
    expected = [f1_score(p[:, 1], p[:, 0], average="macro") for p in payload]
    np.testing.assert_allclose(macro_f1_statistic(payload), expected, atol=1e-12)


def test_statistics_are_fast_enough_to_bootstrap() -> None:
    rng = np.random.default_rng(0)
    draws = rng.integers(0, 400, (2000, 400))
    ranks = rng.normal(size=(400, 2))
    classes = rng.integers(0, 50, (400, 2)).astype(float)
    started = time.process_time()
    spearman_statistic(ranks[draws])
    macro_f1_statistic(classes[draws])
    assert time.process_time() - started < 2  # about 0.25 s; the rest is for a busy machine


def test_the_chosen_metric_judges() -> None:
    assert put_first((MRR, NDCG), "ndcg@10") == (NDCG, MRR)
    assert put_first((MRR, NDCG), None) == (MRR, NDCG)
    with pytest.raises(InputError, match="unknown metric 'acuracy' .did you mean 'accuracy'"):
        put_first((ACCURACY, CROSS_ENTROPY), "acuracy")


def test_a_missed_expectation_names_both_numbers() -> None:
    check_expectation("mrr", 0.498, 0.5, 0.005)
    with pytest.raises(DataError, match=r"mrr = 0.31, and 0.5 ± 0.005"):
        check_expectation("mrr", 0.31, 0.5, 0.005)
    with pytest.raises(DataError):
        check_expectation("mrr", float("nan"), 0.5, 10)
