from __future__ import annotations

import numpy as np
import pytest

from qbench.serving.cost import BatchCost, BatchMemory, Point, fit_memory


def seconds(batch: int, length: int) -> float:
    return 0.002 + 4e-5 * batch * length + 2e-7 * batch * length**2


SHAPES = [(batch, length) for length in (16, 64, 192) for batch in (1, 2, 4, 8)]


def test_a_warm_up_grid_gives_the_cost_of_shapes_that_were_not_measured():
    cost = BatchCost(Point(b, n, seconds(b, n)) for b, n in SHAPES)
    assert cost.known
    assert cost.predict(3, 100) == pytest.approx(seconds(3, 100), rel=0.01)
    assert cost.predict(1, 256) == pytest.approx(seconds(1, 256), rel=0.02)


def test_noise_of_a_tenth_is_averaged_away():
    rng = np.random.default_rng(0)
    cost = BatchCost()
    for _ in range(400):
        batch, length = SHAPES[rng.integers(len(SHAPES))]
        cost.observe(batch, length, seconds(batch, length) * rng.normal(1, 0.1))
    for batch, length in SHAPES:
        assert cost.predict(batch, length) == pytest.approx(seconds(batch, length), rel=0.06)
    assert 1.05 < cost.spread < 1.3


def test_it_follows_a_machine_that_slows_down():
    cost = BatchCost(Point(b, n, seconds(b, n)) for b, n in SHAPES)
    for _ in range(40):
        for batch, length in SHAPES:
            cost.observe(batch, length, 2 * seconds(batch, length))
    assert cost.predict(4, 64) == pytest.approx(2 * seconds(4, 64), rel=0.15)


def test_what_the_warm_up_saw_is_not_forgotten_under_one_shape_only():
    cost = BatchCost(Point(b, n, seconds(b, n)) for b, n in SHAPES)
    for _ in range(2000):
        cost.observe(8, 16, seconds(8, 16))
    assert cost.predict(2, 192) == pytest.approx(seconds(2, 192), rel=0.1)


def test_no_weight_is_negative_whatever_the_times():
    cost = BatchCost(Point(b, 16, 0.01 / b) for b in (1, 2, 3, 4, 5, 6))
    assert all(weight >= 0 for weight in cost.weights)
    assert cost.predict(100, 100) >= 0


def test_nothing_is_predicted_from_nothing():
    cost = BatchCost()
    assert not cost.known and cost.predict(4, 4) == 0.0
    cost.observe(1, 1, 0.0)
    assert not cost.known


def test_memory_is_rounded_up_and_never_short_where_it_was_measured():
    points = [(b, n, 1_000_000 + 4000 * b * n + 12 * b * n * n) for b, n in SHAPES]
    points.append((4, 192, points[-2][2] + 5_000_000))
    memory = fit_memory(points, round_to=1 << 16)
    for batch, length, needed in points:
        assert memory.need(batch, length) >= needed
        assert memory.need(batch, length) % (1 << 16) == 0


def test_the_largest_batch_keeps_to_the_share_of_what_is_free():
    memory = BatchMemory(fixed=0, token=1000, pair=0, round_to=1)
    assert memory.most(100, free=10_000_000) == 80
    assert memory.need(80, 100) <= 0.8 * 10_000_000 < memory.need(81, 100)
    assert memory.most(100_000, free=10_000_000) == 0


def test_a_memory_model_needs_three_shapes():
    with pytest.raises(ValueError, match="three shapes or more, got 1"):
        fit_memory([(1, 1, 1)])
