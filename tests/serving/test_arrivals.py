from __future__ import annotations

import numpy as np
import pytest

from qbench.errors import ConfigError
from qbench.serving.arrivals import Arrivals, Process, read_trace


def draw(seconds: float = 100.0, seed: int = 0, **how) -> np.ndarray:
    return Arrivals(**how).draw(seconds, np.random.default_rng(seed))


def test_poisson_arrivals_have_the_rate_and_gaps_without_memory():
    times = draw(rate=50.0)
    gaps = np.diff(times)
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert gaps.mean() == pytest.approx(0.02, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.06)
    assert (draw(rate=50.0) == times).all() and len(draw(rate=50.0, seed=1)) != len(times)


def test_poisson_gaps_are_exponential_and_counts_are_poisson():
    from scipy import stats

    gaps = np.diff(draw(rate=50.0, seed=7))
    assert stats.kstest(gaps, "expon", args=(0, 1 / 50.0)).pvalue > 0.001
    counts = [len(draw(seconds=2.0, rate=50.0, seed=seed)) for seed in range(400)]
    assert np.var(counts) / np.mean(counts) == pytest.approx(1.0, abs=0.25)


def test_constant_arrivals_tick():
    times = draw(seconds=1.0, rate=10.0, process=Process.CONSTANT)
    assert times == pytest.approx(np.arange(10) / 10)


def test_bursts_keep_the_mean_and_reach_ten_times_of_it():
    times = draw(rate=100.0, process=Process.BURSTS, burst_s=0.5)
    assert len(times) == pytest.approx(10_000, rel=0.1)
    counts = np.histogram(times, bins=np.arange(0, 100.01, 0.25))[0] / 0.25
    assert np.percentile(counts, 99) > 700
    assert np.median(counts) < 30


def test_a_trace_is_replayed_again_and_again_and_stretched_to_a_rate():
    trace = (5.0, 5.1, 5.4)
    assert draw(seconds=0.5, process=Process.TRACE, trace_s=trace) == pytest.approx([0, 0.1, 0.4])
    times = draw(seconds=60.0, rate=30.0, process=Process.TRACE, trace_s=trace)
    assert len(times) == pytest.approx(1800, abs=3)
    assert (np.diff(times) > 0).all()
    gaps = np.diff(times[:4])
    assert gaps[1] / gaps[0] == pytest.approx(3.0)


def test_whole_periods_of_bursts_and_traces_offer_the_rate_that_was_asked_for():
    bursts = Arrivals(200.0, Process.BURSTS)
    assert bursts.period_s == pytest.approx(2.2)
    counts = [
        len(draw(seconds=4.4, seed=seed, rate=200.0, process=Process.BURSTS)) for seed in range(40)
    ]
    assert np.mean(counts) == pytest.approx(880, rel=0.03)
    trace = Arrivals(10.0, Process.TRACE, trace_s=(0.0, 0.1, 5.0))
    assert trace.period_s == pytest.approx(0.3)
    assert len(trace.draw(0.6, np.random.default_rng(0))) == 6
    assert Arrivals(10.0).period_s == 0.0


def test_a_trace_of_one_moment_is_a_burst_at_a_rate():
    times = draw(seconds=1.0, rate=4.0, process=Process.TRACE, trace_s=(3.0, 3.0))
    assert times == pytest.approx([0.0, 0.0, 0.5, 0.5])


@pytest.mark.parametrize("line", ["nan", "inf", "-inf"])
def test_a_trace_has_no_endless_times(line):
    with pytest.raises(ConfigError, match=f"line 2 of the trace is '{line}'"):
        read_trace(["1", line])


def test_a_trace_file_has_a_time_on_each_line():
    assert read_trace(["2.5", "", "1.0 "]) == (1.0, 2.5)
    with pytest.raises(ConfigError, match="line 2 of the trace is 'noon'"):
        read_trace(["1", "noon"])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"rate": 0.0}, "rate is 0.0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"process": Process.TRACE}, "two arrivals or more"),
        ({"process": Process.TRACE, "trace_s": (2.0, 1.0)}, "in order of time"),
        ({"rate": 1.0, "burst_times": 1.0}, "burst_times is 1.0"),
    ],
)
def test_schedules_without_arrivals_are_refused(bad, words):
    with pytest.raises(ConfigError, match=words):
        Arrivals(**bad)


def test_a_trace_without_length_needs_a_rate():
    with pytest.raises(ConfigError, match="give it a rate"):
        draw(process=Process.TRACE, trace_s=(1.0, 1.0))
