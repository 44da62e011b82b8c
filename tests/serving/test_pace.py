from __future__ import annotations

import numpy as np
import pytest

from qbench.serving.pace import DEFAULT_OVERHEAD_TOKENS, ArrivalGaps, LaneCost


def learn(overhead_s: float, token_s: float, *, noise: float = 0.0, batches: int = 100) -> LaneCost:
    rng = np.random.default_rng(0)
    cost = LaneCost()
    for padded in rng.integers(8, 256, batches):
        busy_s = (overhead_s + token_s * padded) * (1 + noise * rng.random())
        cost.observe(int(padded), busy_s)
    return cost


def test_the_cost_line_is_learnt_from_batches():
    cost = learn(0.002, 1e-4)
    assert cost.overhead_s == pytest.approx(0.002, rel=1e-6)
    assert cost.overhead_tokens == pytest.approx(20, rel=1e-6)


def test_noise_moves_the_cost_line_little():
    cost = learn(0.002, 1e-4, noise=0.3)
    assert 8 < cost.overhead_tokens < 60


def test_before_enough_unlike_batches_the_overhead_is_unknown():
    assert LaneCost().batch_s is None
    few, alike = learn(0.002, 1e-4, batches=3), LaneCost()
    for _ in range(50):
        alike.observe(64, 0.01)
    for cost in (few, alike):
        assert cost.line is None
        assert cost.overhead_s == 0.0
        assert cost.overhead_tokens == DEFAULT_OVERHEAD_TOKENS
    assert alike.batch_s == pytest.approx(0.01)


def test_a_cost_that_does_not_grow_with_tokens_is_all_overhead():
    cost = learn(0.002, 0.0)
    assert cost.overhead_s == pytest.approx(0.002)
    assert cost.overhead_tokens > 1e6


def test_the_old_is_forgotten():
    cost = learn(0.002, 1e-4)
    for padded in np.random.default_rng(1).integers(8, 256, 300):
        cost.observe(int(padded), 0.004 + 1e-4 * padded)
    assert cost.overhead_s == pytest.approx(0.004, rel=0.01)


def arrivals(gaps: list[float]) -> tuple[ArrivalGaps, float]:
    model, now_s = ArrivalGaps(), 0.0
    model.observe(now_s)
    for gap in gaps:
        now_s += gap
        model.observe(now_s)
    return model, now_s


def test_waiting_pays_while_arrivals_are_denser_than_what_they_save():
    model, now_s = arrivals([0.0001] * 20)
    assert model.worth_waiting_until(now_s, saving_s=0.002) == pytest.approx(now_s + 0.0001)
    assert model.worth_waiting_until(now_s, saving_s=0.00005) is None


def test_waiting_does_not_pay_when_arrivals_are_rare_unknown_or_save_nothing():
    rare, now_s = arrivals([0.05] * 20)
    assert rare.worth_waiting_until(now_s, saving_s=0.002) is None
    young, now_s = arrivals([0.0001] * 3)
    assert young.worth_waiting_until(now_s, saving_s=0.002) is None
    dense, now_s = arrivals([0.0001] * 20)
    assert dense.worth_waiting_until(now_s, saving_s=0.0) is None


def test_bursts_are_waited_for_only_as_long_as_their_own_gaps():
    model, now_s = arrivals(([0.0001] * 7 + [0.05]) * 5 + [0.0001])
    assert model.worth_waiting_until(now_s, saving_s=0.002) == pytest.approx(now_s + 0.0001)
    assert model.worth_waiting_until(now_s + 0.0002, saving_s=0.002) is None


def test_the_best_wait_is_that_of_an_exhaustive_search():
    rng = np.random.default_rng(3)
    for _ in range(50):
        gaps = list(rng.exponential(0.001, 20))
        silence, saving = rng.uniform(0, 0.002), rng.uniform(0, 0.004)
        model, now_s = arrivals(gaps)
        left = np.asarray([gap - silence for gap in gaps if gap > silence + 1e-12])
        values = [
            (saving * np.mean(left <= wait) - np.mean(np.minimum(left, wait)), wait)
            for wait in left[left <= saving]
        ]
        best = max(values, default=(0.0, 0.0))
        until_s = model.worth_waiting_until(now_s + silence, saving)
        if best[0] <= 1e-12:
            assert until_s is None
        else:
            assert until_s == pytest.approx(now_s + silence + best[1], abs=1e-9)


def test_waiting_for_cores_is_no_work_and_does_not_hide_the_overhead():
    """Small batches slip through between others; large ones wait for a core each time."""
    rng = np.random.default_rng(0)
    by_time, by_work = LaneCost(), LaneCost()
    for padded in rng.integers(8, 256, 300):
        work_s = 0.0005 + 1.5e-5 * int(padded)
        busy_s = work_s + float(rng.poisson(work_s / 0.004)) * 0.006
        by_time.observe(int(padded), busy_s)
        by_work.observe(int(padded), busy_s, work_s)
    assert by_work.overhead_tokens == pytest.approx(0.0005 / 1.5e-5, rel=0.01)
    assert by_time.overhead_tokens < 0.7 * by_work.overhead_tokens
    assert by_time.batch_s == by_work.batch_s
