from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy import stats

from qbench.errors import MeasurementError
from qbench.records import RequestLatency
from qbench.serving.summary import (
    Slice,
    describe_lengths,
    median_interval,
    narrow_enough,
    paired_ratio,
    summarise,
)


def request(engine, round_index, start_s, total_ms, *, warmup=False, batch_size=2):
    return RequestLatency(
        engine, round_index, start_s, total_ms / 2, 0.0, total_ms / 2, 0.0, total_ms,
        batch_size, 8, 16, warmup,
    )  # fmt: skip


def piece(engine, round_index, start_s, *, cpu_s=0.5, rejected=0):
    return Slice(engine, round_index, start_s, start_s + 1.0, cpu_s, rejected)


def hand_made():
    """Engine b answers exactly twice what a does, in two rounds of one second."""
    latencies, slices = [], []
    for round_index in range(2):
        for engine, start_s, count in (("a", 0.0, 10), ("b", 2.0, 20)):
            origin_s = start_s + 10 * round_index
            slices.append(piece(engine, round_index, origin_s, rejected=round_index))
            latencies += [
                request(engine, round_index, origin_s + 0.9 * i / count, 1 + i)
                for i in range(count)
            ]
            latencies.append(request(engine, round_index, origin_s - 0.5, 400.0, warmup=True))
            latencies.append(request(engine, round_index, origin_s + 0.95, 900.0, batch_size=1))
    return latencies, slices


def test_statistics_by_hand():
    latencies, slices = hand_made()
    a, b = summarise(latencies, slices, ["a", "b"])
    assert (a.engine, b.engine) == ("a", "b")
    assert a.throughput_rps.value == 10.0  # the one that ends after the slice does not count
    assert b.throughput_rps.value == 20.0
    assert b.speedup.value == pytest.approx(2.0)
    assert (b.speedup.low, b.speedup.high) == pytest.approx((2.0, 2.0))
    assert (a.speedup.value, a.speedup.low, a.speedup.high) == (1.0, 1.0, 1.0)
    assert a.requests == 22  # ... but its latency does; warm-up is left out
    assert a.p50_ms == pytest.approx(np.percentile([*range(1, 11), 900] * 2, 50))
    assert a.p99_ms == pytest.approx(np.percentile([*range(1, 11), 900] * 2, 99))
    assert a.stages_ms["queue"] == pytest.approx(np.mean([*range(1, 11), 900]) / 2)
    assert a.batch_sizes == {1: 2, 2: 20}
    assert a.cpu_ms_per_request == pytest.approx(1000 * 1.0 / 20)
    assert a.rejected == 1


def test_warm_up_that_ends_inside_the_slice_counts_for_throughput_only():
    latencies = [request("a", r, 10.0 * r - 0.1, 300.0, warmup=True) for r in range(2)]
    latencies += [request("a", r, 10.0 * r + 0.5, 100.0) for r in range(2)]
    (a,) = summarise(latencies, [piece("a", 0, 0.0), piece("a", 1, 10.0)], ["a"])
    assert (a.throughput_rps.value, a.requests, a.p50_ms) == (2.0, 2, 100.0)


def test_a_slice_without_an_answer_is_an_error():
    with pytest.raises(MeasurementError, match="'a' answered no request within a slice of 1 s"):
        summarise([], [piece("a", 0, 0.0)], ["a"])
    only_warm = [request("a", 0, -0.5, 900.0, warmup=True)]
    with pytest.raises(MeasurementError, match="no request after the warm-up"):
        summarise(only_warm, [piece("a", 0, 0.0)], ["a"])


@given(st.integers(2, 40))
@hypothesis_settings(max_examples=40, deadline=None)
def test_the_median_interval_has_the_level_that_it_says(n):
    estimate = median_interval(np.arange(1.0, n + 1))
    below = int(estimate.low)  # the values are their own ranks
    assert estimate.high == n + 1 - below
    exact = 1 - 2 * stats.binom.cdf(below - 1, n, 0.5)
    assert estimate.level == pytest.approx(exact, abs=1e-12)
    if n >= 6:
        assert estimate.level >= 0.95
        narrower = 1 - 2 * stats.binom.cdf(below, n, 0.5)
        assert narrower < 0.95 or below + 1 > (n + 1) // 2
    else:
        assert (estimate.low, estimate.high) == (1.0, float(n))


def test_the_paired_ratio_is_student_s_interval_on_logarithms():
    rng = np.random.default_rng(0)
    reference = rng.uniform(50, 100, 6)
    values = reference * 1.5 * np.exp(rng.normal(0, 0.05, 6))
    estimate = paired_ratio(values, reference)
    test = stats.ttest_1samp(np.log(values / reference), 0.0).confidence_interval(0.95)
    assert (estimate.low, estimate.high) == pytest.approx((math.exp(test.low), math.exp(test.high)))
    assert estimate.value == pytest.approx(stats.gmean(values / reference))
    assert (estimate.n, estimate.level, estimate.method) == (6, 0.95, "paired_log_t")


def test_pairing_removes_what_slows_both():
    speed = np.asarray([1.0, 0.3, 0.9, 0.5, 1.1, 0.2])  # a neighbour comes and goes
    estimate = paired_ratio(130 * speed, 100 * speed)
    assert (estimate.low, estimate.high) == pytest.approx((1.3, 1.3))


def test_a_ratio_needs_two_rounds():
    with pytest.raises(MeasurementError, match="two rounds"):
        paired_ratio(np.ones(1), np.ones(1))


def test_lengths_are_described():
    described = describe_lengths([4, 8, 12])
    assert (described["requests"], described["min"], described["mean"]) == (3, 4, 8)
    assert (described["p50"], described["max"]) == (8, 12)


def test_rounds_end_once_ratios_are_known_well_and_never_before_three():
    def measured(rounds, factors):
        latencies, slices = [], []
        for index in range(rounds):
            for name, count in (("a", 20), ("b", round(40 * factors[index % len(factors)]))):
                slices.append(piece(name, index, 10.0 * index + 2 * (name == "b")))
                start_s = slices[-1].measured_from_s
                latencies += [
                    request(name, index, start_s + i / (2 * count), 1) for i in range(count)
                ]
        return latencies, slices

    assert not narrow_enough(*measured(2, [1.0]), ["a", "b"], 0.05)
    assert narrow_enough(*measured(3, [1.0]), ["a", "b"], 0.05)
    assert not narrow_enough(*measured(3, [0.7, 1.0, 1.3]), ["a", "b"], 0.05)
    assert not narrow_enough(*measured(3, [1.0]), ["a", "b"], 0.0)
