from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qbench.errors import InputError
from qbench.records import Estimate, Verdict
from qbench.statistics import (
    benjamini_hochberg,
    bootstrap_sum,
    describe,
    holm,
    mcnemar,
    mean_interval,
    median_interval,
    non_inferior,
    paired_drop,
    randomisation_p,
    rank_agreement,
    rank_correlation,
    round_up,
    samples_needed,
    spearman,
)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Metric:
    statistic: Callable[[Array], Array]
    low: float = 0.0
    high: float = 1.0
    higher_is_better: bool = True


def mean(payload: Array) -> Array:
    return np.asarray(payload[..., 0].mean(axis=-1))


def macro_f1(payload: Array) -> Array:
    label, answer = payload[..., 0], payload[..., 1]
    total = np.zeros(payload.shape[:-2])
    for c in range(3):
        hit = ((label == c) & (answer == c)).sum(-1)
        total += 2 * hit / np.maximum((label == c).sum(-1) + (answer == c).sum(-1), 1)
    return total / 3


ACCURACY = Metric(mean)
LOSS = Metric(mean, 0.0, math.inf, higher_is_better=False)
PERPLEXITY = Metric(lambda payload: np.exp(mean(payload)), 1.0, math.inf, higher_is_better=False)
SPEARMAN = Metric(rank_correlation, -1.0, 1.0)
F1 = Metric(macro_f1)


def flipped(values: Array, count: int) -> Array:
    changed = values.copy()
    changed[:count] = 1 - changed[:count]
    return changed


def test_a_drop_above_zero_is_worse_whatever_the_direction() -> None:
    rng = np.random.default_rng(0)
    before, worse = np.ones(200), np.where(rng.random(200) < 0.2, 0.0, 1.0)
    assert paired_drop(ACCURACY, before, worse).value == pytest.approx(1 - worse.mean())
    loss = rng.exponential(size=200)
    assert paired_drop(LOSS, loss, loss + 0.1 * rng.random(200)).value > 0
    assert paired_drop(LOSS, loss, loss - 0.1 * rng.random(200)).value < 0
    assert paired_drop(PERPLEXITY, loss, loss + 0.3 * rng.random(200)).low > 0


@pytest.mark.parametrize("metric", [ACCURACY, SPEARMAN, F1])
@pytest.mark.parametrize("n", [1, 2, 5, 30, 330])
def test_nothing_changed_is_never_an_interval_of_no_width(metric: Metric, n: int) -> None:
    rng = np.random.default_rng(n)
    payload = rng.integers(0, 3, size=(n, 1 if metric is ACCURACY else 2)).astype(float)
    payload[0] = 0.0
    drop = paired_drop(metric, payload, payload)
    if drop.method == "undefined":  # Spearman of one pair, or of constants
        assert metric is SPEARMAN
        return
    half = (metric.high - metric.low) * min(1.0, 3 / n)
    assert (drop.value, drop.method, drop.n) == (0.0, "rule_of_three", n)
    assert -drop.low == drop.high == pytest.approx(half, rel=0.01)


def test_few_changes_of_full_size_get_the_exact_binomial_bound() -> None:
    from scipy.stats import beta

    before = np.ones(230)
    for count in (1, 5, 12, 19):
        drop = paired_drop(ACCURACY, before, flipped(before, count))
        assert drop.method == "few_changed"
        assert drop.high == pytest.approx(beta.ppf(0.975, count + 1, 230 - count), rel=0.03)


def test_the_interval_narrows_as_few_become_many() -> None:
    before = np.ones(230)
    widths = []
    for count in (19, 20):
        drop = paired_drop(ACCURACY, before, flipped(before, count))
        widths.append(drop.high - drop.low)
    assert widths[1] < widths[0] < 1.6 * widths[1]


def test_a_trace_of_noise_does_not_make_few_changes_many() -> None:
    rng = np.random.default_rng(3)
    before = rng.exponential(size=300)
    after = before + 1e-7 * rng.normal(size=300)
    after[:6] += 0.8
    assert paired_drop(LOSS, before, after).method == "few_changed"


def test_no_sample_not_finite_and_undefined_are_said() -> None:
    empty = paired_drop(ACCURACY, np.zeros((0, 1)), np.zeros((0, 1)))
    assert (empty.n, empty.method) == (0, "no_samples") and math.isnan(empty.value)
    broken = np.ones(50)
    broken[3] = np.nan
    drop = paired_drop(ACCURACY, np.ones(50), broken)
    assert drop.method == "non_finite" and math.isnan(drop.high)
    assert non_inferior(drop, 0.1) is Verdict.NOT_RESOLVABLE
    constant = np.ones((50, 2))
    assert paired_drop(SPEARMAN, constant, constant).method == "undefined"
    one = paired_drop(ACCURACY, [1.0], [0.0])
    assert one.value == 1.0 and one.low < 0 and one.high == 1.0


def test_payloads_that_are_no_pair_are_refused() -> None:
    with pytest.raises(InputError, match=r"\[3, 1\] and \[4, 1\]"):
        paired_drop(ACCURACY, np.ones((3, 1)), np.ones((4, 1)))


def test_a_mean_is_recognised_and_a_median_is_not() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.random(100), rng.random(100)
    median = Metric(lambda payload: np.median(payload[..., 0], axis=-1))
    assert paired_drop(ACCURACY, before, after).method == "bootstrap_t"
    assert paired_drop(median, before, after).method == "bootstrap_bca"


def test_the_general_path_agrees_with_the_mean_path() -> None:
    rng = np.random.default_rng(4)
    before = rng.random((200, 2))
    after = np.clip(before - 0.1 * rng.random((200, 2)), 0, 1)
    general = paired_drop(ACCURACY, before, after)  # two columns: not taken for a plain mean
    plain = paired_drop(ACCURACY, before[:, :1], after[:, :1])
    assert general.method == "bootstrap_bca"
    assert general.value == pytest.approx(plain.value)
    assert [general.low, general.high] == pytest.approx([plain.low, plain.high], abs=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 10_000))
def test_a_drop_is_in_its_interval_and_mirrors(n: int, changed: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    before, after = rng.random(n), rng.random(n)
    after[min(changed, n) :] = before[min(changed, n) :]
    drop = paired_drop(ACCURACY, before, after, resamples=200)
    assert -1 <= drop.low <= drop.value <= drop.high <= 1
    assert drop.high > drop.low
    back = paired_drop(ACCURACY, after, before, resamples=200)
    assert back.value == pytest.approx(-drop.value)


def test_same_seed_same_interval() -> None:
    rng = np.random.default_rng(5)
    before, after = rng.exponential(size=100), rng.exponential(size=100) ** 2
    assert paired_drop(LOSS, before, after, seed=3) == paired_drop(LOSS, before, after, seed=3)
    assert paired_drop(LOSS, before, after, seed=3) != paired_drop(LOSS, before, after, seed=4)


def test_memory_stays_small_for_many_samples() -> None:
    rng = np.random.default_rng(6)
    before = rng.integers(0, 3, size=(8_000, 2)).astype(float)
    after = before.copy()
    after[:3000, 1] = rng.integers(0, 3, size=3000)
    tracemalloc.start()
    paired_drop(F1, before, after, resamples=200)
    paired_drop(ACCURACY, rng.random(8_000), rng.random(8_000), resamples=500)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6


# ---------------------------------------------------------------------------- divergences


def test_all_zero_divergences_get_a_bound() -> None:
    none = mean_interval(np.zeros(300))
    assert (none.value, none.low, none.method) == (0.0, 0.0, "rule_of_three")
    assert none.high == pytest.approx(0.01, rel=0.01)
    assert mean_interval(np.zeros(300), high=2.0).high == pytest.approx(0.02, rel=0.01)


def test_divergences_are_never_negative_in_their_interval() -> None:
    rng = np.random.default_rng(7)
    skewed = mean_interval(rng.lognormal(-6, 1.5, 230))
    assert 0 <= skewed.low < skewed.value < skewed.high
    few = mean_interval(np.where(np.arange(230) < 3, 0.01, 0.0))
    assert few.method == "few_changed" and 0 <= few.low < few.value < few.high
    assert mean_interval([]).method == "no_samples"
    assert mean_interval([1.0, math.inf]).method == "non_finite"


def test_equal_divergences_do_not_claim_certainty() -> None:
    same = mean_interval(np.full(40, 0.1))
    assert same.value == pytest.approx(0.1) and same.low < 0.1 < same.high


def test_the_sum_over_cells_keeps_their_correlation() -> None:
    rng = np.random.default_rng(8)
    shared = rng.exponential(size=300)
    together = bootstrap_sum(np.stack([shared] * 10))
    apart = bootstrap_sum(rng.exponential(size=(10, 300)))
    assert together.value == pytest.approx(10 * shared.mean())
    assert together.high - together.low > 2.5 * (apart.high - apart.low)
    assert bootstrap_sum(np.zeros((0, 300))).value == 0
    with pytest.raises(InputError, match="cells, n"):
        bootstrap_sum(np.zeros(5))


def test_the_interval_of_a_median_is_order_statistics() -> None:
    values = np.arange(1.0, 21.0)
    middle = median_interval(values)
    assert (middle.value, middle.low, middle.high) == (10.5, 6.0, 15.0)  # binomial table, n = 20
    assert middle.level == 0.95
    three = median_interval([3.0, 1.0, 2.0])
    assert (three.value, three.low, three.high, three.level) == (2.0, 1.0, 3.0, 0.75)
    assert median_interval([4.0]).level == 0.0
    assert median_interval([]).method == "no_samples"


# ------------------------------------------------------------------------------ decisions


def test_the_three_verdicts() -> None:
    assert non_inferior(Estimate(0.0, -0.01, 0.02, 100), 0.02) is Verdict.VERIFIED
    assert non_inferior(Estimate(0.05, 0.03, 0.07, 100), 0.02) is Verdict.FAILED
    assert non_inferior(Estimate(0.02, 0.01, 0.03, 100), 0.02) is Verdict.NOT_RESOLVABLE
    assert non_inferior(Estimate(0.05, 0.02, 0.07, 100), 0.02) is Verdict.NOT_RESOLVABLE


def test_the_n_that_would_do() -> None:
    drop = Estimate(0.0021, -0.0079, 0.0121, 330)
    assert samples_needed(drop) == 7500
    assert describe(drop) == (
        "0.0021 [-0.0079, 0.0121]: not resolvable at n = 330; about 7,500 would do"
    )
    assert samples_needed(drop, 0.0121) == 330
    assert samples_needed(Estimate(0.02, 0.01, 0.03, 100), 0.02) is None
    assert "no n would do" in describe(Estimate(0.02, 0.01, 0.03, 100), 0.02)
    assert samples_needed(Estimate(0.0, -0.03, 0.03, 100, method="rule_of_three"), 0.01) == 300
    assert samples_needed(Estimate(math.nan, math.nan, math.nan, 0)) is None
    assert describe(Estimate(0.05, 0.03, 0.07, 1200), 0.02).endswith("above 0.02 at n = 1,200")
    assert "no samples" in describe(Estimate(math.nan, math.nan, math.nan, 0, method="no_samples"))


def test_that_many_samples_do_resolve_it() -> None:
    rng = np.random.default_rng(9)

    def changed(n: int) -> Estimate:
        after = np.where(rng.random(n) < 0.15, rng.random(n) < 0.8, 1.0).astype(float)
        return paired_drop(ACCURACY, np.ones(n), after, resamples=500)

    drop = changed(100)
    assert non_inferior(drop, 0.05) is Verdict.NOT_RESOLVABLE
    needed = samples_needed(drop, 0.05)
    assert needed is not None
    assert non_inferior(changed(2 * needed), 0.05) is Verdict.VERIFIED


@pytest.mark.parametrize(
    ("number", "rounded"),
    [(7401.2, 7500), (330, 330), (331, 340), (0.2, 1), (99.1, 100), (9.5, 10)],
)
def test_rounding_up_to_two_digits(number: float, rounded: int) -> None:
    assert round_up(number) == rounded


def test_adjusted_p_values() -> None:
    p = [0.01, 0.04, 0.03, 0.005]
    assert holm(p) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert benjamini_hochberg(p) == pytest.approx([0.02, 0.04, 0.04, 0.02])
    assert holm([0.9, 0.8]).tolist() == [1.0, 1.0]
    assert holm([]).size == 0
    with pytest.raises(InputError, match=r"\[0, 1\]"):
        holm([0.1, 1.2])
    with pytest.raises(InputError):
        benjamini_hochberg([math.nan])


def test_p_values_of_paired_answers() -> None:
    before = np.ones(100, dtype=bool)
    after = before.copy()
    assert mcnemar(before, after) == 1.0
    after[:10] = False
    assert mcnemar(before, after) == pytest.approx(2 * 0.5**10)
    swapped = randomisation_p(ACCURACY, before.astype(float), after.astype(float), draws=4000)
    assert swapped == pytest.approx(2 * 0.5**10, abs=0.002)
    assert randomisation_p(ACCURACY, before.astype(float), before.astype(float)) == 1.0
    with pytest.raises(InputError, match="same samples"):
        mcnemar([True], [True, False])


# ---------------------------------------------------------------------------------- ranks


def test_spearman_equals_scipy_with_ties() -> None:
    from scipy.stats import spearmanr

    rng = np.random.default_rng(10)
    x, y = rng.integers(0, 6, 40), rng.integers(0, 6, 40)
    got = spearman(x, y)
    assert got.value == pytest.approx(spearmanr(x, y).statistic)
    assert -1 <= got.low < got.value < got.high <= 1
    assert spearman([1, 2, 3], [1, 2, 4]).low == -1
    assert spearman([1, 1, 1], [1, 2, 3]).method == "undefined"
    assert spearman(range(40), range(40)).value == pytest.approx(1)
    with pytest.raises(InputError, match="equally many"):
        spearman([1], [1, 2])


def test_halves_agree_where_cells_differ_and_not_where_they_do_not() -> None:
    rng = np.random.default_rng(11)
    scale = np.geomspace(1e-5, 1e-2, 36)[:, None]
    clear = rank_agreement(scale * rng.lognormal(0, 1, (36, 230)))
    noise = rank_agreement(rng.lognormal(0, 1, (36, 230)))
    assert clear.value > 0.97 and clear.low <= clear.value <= clear.high <= 1
    assert abs(noise.value) < 0.3
    assert rank_agreement(np.ones((36, 230))).method == "undefined"
    assert rank_agreement(np.ones((1, 230))).method == "undefined"
    assert rank_agreement(np.ones((36, 1))).method == "undefined"
