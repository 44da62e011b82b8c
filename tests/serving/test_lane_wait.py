"""P99 at 70 % load, in simulated time: within the longest wait and two batches."""

from __future__ import annotations

import numpy as np
import pytest
from serving_sim import Asked, p99_ms, play

from qbench.serving.batcher import Batcher, BatchLimits
from qbench.serving.cost import BatchCost, Point
from qbench.serving.estimator import Demand, size_batches

MAX_WAIT_S = 0.005


def cost_s(batch: int, length: int) -> float:
    """Return what a small encoder takes on one core of a CPU, seconds."""
    return 0.0023 + batch * length * (1e-4 + 5e-8 * length)


def known() -> BatchCost:
    shapes = [(b, n) for n in (16, 64, 136, 240) for b in (1, 2, 4)]
    return BatchCost(Point(b, n, cost_s(b, n)) for b, n in shapes)


def arrivals(rate: float, lengths: tuple[int, ...], seconds: float) -> list[Asked]:
    rng = np.random.default_rng(3)
    times = np.sort(rng.random(rng.poisson(rate * seconds)) * seconds)
    drawn = rng.integers(lengths[0], lengths[-1] + 1, len(times))
    return [Asked(float(at_s), [1] * int(n)) for at_s, n in zip(times, drawn, strict=True)]


@pytest.mark.parametrize(("low", "high", "capacity"), [(16, 256, 124.0), (16, 48, 530.0)])
def test_p99_at_seventy_per_cent_is_within_the_wait_and_two_batches(low, high, capacity):
    lengths = tuple(range(low, high + 1))
    sizing = size_batches(known(), Demand(lengths, lanes=2, max_wait_s=MAX_WAIT_S))
    budget = sizing.token_budget
    limits = BatchLimits(token_budget=budget, max_wait_s=MAX_WAIT_S, lanes=2, odd_lane=True)
    asked = arrivals(0.7 * capacity, lengths, 4000 / capacity)
    play(Batcher(limits, known()), asked, cost_s)
    batch_s = max(cost_s(max(budget // n, 1), n) for n in lengths)
    assert p99_ms(asked) <= 1e3 * (MAX_WAIT_S + 2 * batch_s)
    assert max(one.latency_s for one in asked) < 10 * batch_s  # and nothing starves


def test_a_short_queue_is_served_in_small_batches():
    """A large budget is for long queues: at the same load it does not make answers later."""
    found = {}
    for budget in (256, 1024):
        asked = arrivals(80.0, (16, 256), 40.0)
        limits = BatchLimits(token_budget=budget, max_wait_s=MAX_WAIT_S, lanes=2, odd_lane=True)
        play(Batcher(limits, known()), asked, cost_s)
        found[budget] = np.median([one.latency_s for one in asked]), p99_ms(asked)
    assert found[1024][0] < 1.1 * found[256][0]
    assert found[1024][1] < 1.2 * found[256][1]


@pytest.mark.parametrize("queue", [64, 1000])
def test_a_long_queue_is_served_as_fast_as_a_short_one(queue):
    """Three times what the lanes carry: a long queue must not make batches small."""
    call_s, token_s, lengths = 3e-4, 8e-6, tuple(range(4, 61))
    shapes = [(b, n) for n in (4, 32, 60) for b in (1, 2, 4, 8)]
    model = BatchCost(Point(b, n, call_s + token_s * b * n) for b, n in shapes)
    sizing = size_batches(model, Demand(lengths, lanes=2))
    limits = BatchLimits(sizing.token_budget, lanes=2, queue=queue, odd_lane=True)
    asked = arrivals(3 * sizing.requests_per_s, lengths, 6000 / (3 * sizing.requests_per_s))
    play(Batcher(limits, model), asked, lambda b, n: call_s + token_s * b * n)
    ends = [one.ends[0][1] for one in asked if one.what == "ok"]
    assert len(ends) / max(ends) > 0.8 * sizing.requests_per_s
    if queue > 64:
        assert len(ends) / max(ends) > 0.86 * sizing.requests_per_s


@pytest.mark.parametrize(("lanes", "rate"), [(2, 300.0), (8, 600.0), (8, 1500.0), (16, 1500.0)])
def test_while_lanes_are_free_a_long_max_wait_costs_nothing_however_dense_arrivals_are(lanes, rate):
    """Up to half of what the lanes carry, with gaps shorter than a call: the next finds a lane."""
    found = []
    for max_wait_s in (0.0, 0.05):
        asked = arrivals(rate, (4, 32), 2000 / rate)
        shapes = [(b, n) for n in (4, 16, 32) for b in (1, 2, 4)]
        model = BatchCost(Point(b, n, 0.002 + 5e-5 * b * n) for b, n in shapes)
        limits = BatchLimits(1024, max_wait_s, queue=1000, lanes=lanes)
        play(Batcher(limits, model), asked, lambda b, n: 0.002 + 5e-5 * b * n)
        found.append(p99_ms(asked))
    assert found[1] < 1.2 * found[0]
