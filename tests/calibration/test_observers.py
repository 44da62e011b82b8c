from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qbench.calibration.observers import (
    PERCENTILES,
    Observation,
    bin_edges,
    merge,
    nothing,
    observe,
    percentile_of,
    to_range,
)

FLOATS = st.floats(-1e6, 1e6, width=32)


def parts_of(values: np.ndarray, cuts: list[int]) -> list[np.ndarray]:
    return [part for part in np.split(values, sorted(cuts)) if part.size]


def merged(parts: list[Observation]) -> Observation:
    total = nothing()
    for part in parts:
        total = merge(total, part)
    return total


def assert_equal(first: Observation, second: Observation) -> None:
    assert first.moments.count == second.moments.count
    assert (first.min, first.max) == (second.min, second.max)
    assert first.non_finite == second.non_finite
    np.testing.assert_array_equal(first.histogram, second.histogram)
    np.testing.assert_array_equal(first.channel_absmax, second.channel_absmax)
    scale = first.absmax
    close = {"rel": 1e-12}
    assert first.moments.mean == pytest.approx(second.moments.mean, **close, abs=1e-12 * scale)
    assert first.moments.m2 == pytest.approx(second.moments.m2, **close, abs=1e-12 * scale**2)
    assert first.moments.m4 == pytest.approx(second.moments.m4, **close, abs=1e-12 * scale**4)


@settings(deadline=None, max_examples=60)
@given(
    values=hnp.arrays(np.float32, st.tuples(st.integers(1, 40), st.just(3)), elements=FLOATS),
    cuts=st.lists(st.integers(1, 39), max_size=4, unique=True),
    data=st.data(),
)
def test_merging_in_any_order_is_seeing_all_at_once(
    values: np.ndarray, cuts: list[int], data: st.DataObject
) -> None:
    parts = [observe(part, channels=True) for part in parts_of(values, cuts)]
    shuffled = data.draw(st.permutations(parts))
    whole = observe(values, channels=True)
    assert_equal(merged(parts), whole)
    assert_equal(merged(list(shuffled)), whole)


def test_merging_is_associative() -> None:
    random = np.random.default_rng(0)
    a, b, c = (observe(random.normal(i, 10.0**i, 1000).astype(np.float32)) for i in range(3))
    results = [merge(merge(a, b), c), merge(a, merge(b, c)), merge(merge(c, a), b)]
    for first, second in itertools.combinations(results, 2):
        assert_equal(first, second)


def test_moments_survive_a_large_mean() -> None:
    random = np.random.default_rng(0)
    values = (1e4 + random.normal(size=200_000)).astype(np.float32)
    exact = values.astype(np.float64)
    seen = to_range(merged([observe(part) for part in np.split(values, 8)]), "x")
    assert seen.mean == pytest.approx(exact.mean(), rel=1e-12)
    assert seen.std == pytest.approx(exact.std(), rel=1e-10)
    central = exact - exact.mean()
    assert seen.kurtosis == pytest.approx((central**4).mean() / exact.var() ** 2 - 3, abs=1e-8)


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 3e4, 1e30])
def test_percentiles_lie_within_a_bin(scale: float) -> None:
    values = (np.random.default_rng(1).standard_t(3, 300_000) * scale).astype(np.float32)
    seen = to_range(observe(values), "x")
    for name in PERCENTILES:
        exact = np.percentile(np.abs(values.astype(np.float64)), float(name))
        assert seen.percentiles[name] == pytest.approx(exact, rel=1 / 128)
        assert seen.percentiles[name] <= seen.absmax
    assert list(seen.percentiles.values()) == sorted(seen.percentiles.values())


def test_bins_contain_their_values() -> None:
    values = np.float32([1.0, 1.0078125, 3.3, 1e-30, 6e4])
    for value in values:
        low, high = bin_edges(observe(np.array([value])).histogram[0])[:, 0]
        assert low <= value < high
        assert high / low <= 1 + 1 / 128 + 1e-9


def test_percentile_is_clamped_to_what_was_seen() -> None:
    seen = observe(np.float32([1.0, 2.0, 1.001]))
    assert percentile_of(seen.histogram, 100, seen.absmax) == 2.0
    assert percentile_of(seen.histogram, 99.999, seen.absmax) <= 2.0
    assert percentile_of(observe(np.zeros(5, np.float32)).histogram, 99.9, 0.0) == 0.0
    with pytest.raises(ValueError, match="out of bounds"):
        percentile_of(seen.histogram, 101)
    with pytest.raises(ValueError, match="empty histogram"):
        percentile_of(nothing().histogram, 50)


def test_a_mask_leaves_positions_out() -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    keep = np.array([[True, False, True], [True, False, False]])
    seen = observe(values, keep, channels=True)
    assert_equal(seen, observe(values[keep], channels=True))
    assert tuple(seen.channel_absmax) == (12, 13, 14, 15)
    assert_equal(observe(values, np.zeros((2, 3), bool)), nothing())


def test_channels_of_different_number_are_dropped() -> None:
    first, second = (observe(np.ones((2, n), np.float32), channels=True) for n in (3, 4))
    assert merge(first, second).channel_absmax.size == 0


def test_nothing_finite_has_no_range() -> None:
    seen = observe(np.float32([np.nan, -np.inf]))
    assert (seen.moments.count, seen.non_finite) == (0, 2)
    with pytest.raises(ValueError, match="nothing finite was seen of 'x'"):
        to_range(seen, "x")
    whole = to_range(merge(seen, observe(np.float32([-2.0]))), "x")
    assert (whole.min, whole.max, whole.non_finite, whole.count) == (-2, -2, 2, 1)


def test_zeros_and_extremes_have_a_range() -> None:
    zero = to_range(observe(np.zeros((2, 2), np.float32)), "x")
    assert (zero.absmax, zero.std, zero.kurtosis, zero.fp16_headroom) == (0, 0, 0, math.inf)
    largest = float(np.finfo(np.float32).max)
    wide = to_range(observe(np.float32([-largest, largest])), "x")
    assert wide.std == pytest.approx(largest) and math.isfinite(wide.kurtosis)
    assert wide.fp16_headroom < 1


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_are_seen_as_float32(dtype: type) -> None:
    values = np.array([[0.5, -3.0], [2.0, 1.0]])
    assert_equal(observe(values.astype(dtype)), observe(values.astype(np.float32)))


def test_the_size_does_not_grow() -> None:
    random = np.random.default_rng(2)
    total = nothing()
    for _ in range(40):
        total = merge(total, observe(random.normal(size=(100, 8)).astype(np.float32)))
    assert total.histogram.shape[1] < 4000
    assert total.moments.count == 32_000
