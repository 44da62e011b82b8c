from __future__ import annotations

import numpy as np
import pytest

from qbench.errors import MeasurementError
from qbench.serving.percentiles import Histogram, bucket_of, middle_of, percentile_interval


def test_every_latency_is_kept_to_a_thousandth():
    values = np.concatenate([np.arange(1, 3000) * 1e-6, np.geomspace(1e-5, 1e4, 5000)])
    buckets = np.array([bucket_of(value) for value in values])
    error = np.abs(middle_of(buckets) - values)
    assert (error <= np.maximum(values / 1024, 1.01e-6)).all()
    assert (np.diff([bucket_of(value) for value in np.sort(values)]) >= 0).all()


def test_percentiles_are_those_of_the_raw_latencies():
    rng = np.random.default_rng(0)
    values = rng.lognormal(-4, 1, 20_000)
    histogram = Histogram()
    for value in values:
        histogram.record(float(value))
    for percent in (50, 95, 99, 99.9):
        assert histogram.percentile_s(percent) == pytest.approx(
            np.percentile(values, percent), rel=0.005
        )
    assert histogram.percentile_s(100) == pytest.approx(values.max(), rel=0.002)
    assert histogram.total_s == pytest.approx(values.sum())


def test_histograms_add_up():
    one, other = Histogram(), Histogram()
    one.record(0.001)
    other.record(0.1)
    one.add(other)
    assert (one.count, one.largest_s) == (2, 0.1)
    assert one.at_most([0.0005, 0.01, 1.0]) == [0, 1, 2]
    twin = one.copy()
    one.record(1.0)
    assert (twin.count, one.count) == (2, 3)


def test_a_latency_beyond_the_last_bucket_is_counted_and_an_empty_one_has_none():
    histogram = Histogram()
    assert np.isnan(histogram.percentile_s(50))
    histogram.record(1e9)
    assert histogram.count == 1


def test_the_interval_covers_the_true_percentile():
    covered = 0
    truth = np.percentile(np.random.default_rng(1).exponential(1.0, 10**6), 95)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        blocks = [rng.exponential(1.0, rng.poisson(50)) for _ in range(30)]
        found = percentile_interval(blocks, 95, draws=300)
        covered += found.low <= truth <= found.high
    assert covered >= 50


def queue_of(seconds: float, rate: float, busy: float, rng: np.random.Generator) -> np.ndarray:
    """Return [arrival, latency] of one server in order of arrival (Lindley's recursion)."""
    gaps = rng.exponential(1 / rate, int(seconds * rate))
    work = rng.uniform(0.5, 1.5, len(gaps)) * busy / rate
    walk = np.concatenate([[0.0], np.cumsum((work - gaps)[:-1])])
    return np.array([np.cumsum(gaps), walk - np.minimum.accumulate(walk) + work])


@pytest.mark.parametrize(("rate", "busy"), [(200.0, 0.5), (1000.0, 0.8)])
def test_the_interval_is_honest_where_latencies_hang_together_in_a_queue(rate, busy):
    rng = np.random.default_rng(3)
    at, latency = queue_of(2000.0, rate, busy, rng)
    for percent in (95, 99):
        truth, covered = np.percentile(latency, percent), 0
        for begin in rng.uniform(0, at[-1] - 4, 80):
            edges = np.searchsorted(at, np.arange(begin, begin + 4.01, 0.25))
            blocks = [latency[low:high] for low, high in zip(edges, edges[1:], strict=False)]
            found = percentile_interval(blocks, percent, draws=200)
            covered += found.low <= truth <= found.high
        assert covered >= 62  # blocks of a quarter of a second alone: 49 and less of P99


def test_few_latencies_do_not_bound_a_tail_from_above():
    rng = np.random.default_rng(4)
    few = percentile_interval(np.array_split(rng.exponential(1.0, 100), 8), 99)
    many = percentile_interval(np.array_split(rng.exponential(1.0, 4000), 8), 99)
    assert few.high == np.inf and few.low < few.value
    assert many.high < np.inf
    assert percentile_interval(np.array_split(np.full(100, 2.0), 8), 50).high == 2.0


def test_latencies_that_hang_together_make_it_wider():
    rng = np.random.default_rng(2)
    blocks = [np.full(50, rng.exponential(1.0)) for _ in range(30)]
    together = percentile_interval(blocks, 50)
    apart = percentile_interval(list(np.array(blocks).T.reshape(-1, 50)), 50)
    assert together.high - together.low > 2 * (apart.high - apart.low)


def test_no_latency_has_no_percentile():
    with pytest.raises(MeasurementError, match="measure for longer"):
        percentile_interval([np.array([])], 99)
