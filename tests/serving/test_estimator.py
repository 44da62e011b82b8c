from __future__ import annotations

import numpy as np
import pytest

from qbench.serving.cost import BatchCost, BatchMemory, Point
from qbench.serving.estimator import (
    Demand,
    expect,
    lane_wait_s,
    largest_within_memory,
    size_batches,
)


def cost_of(call_s: float, token_s: float, pair_s: float = 0.0) -> BatchCost:
    shapes = [(b, n) for n in (16, 64, 256) for b in (1, 2, 4, 8, 16)]
    return BatchCost(Point(b, n, call_s + token_s * b * n + pair_s * b * n * n) for b, n in shapes)


LENGTHS = tuple([16, 24, 32, 48] * 10)


def test_where_a_call_costs_much_batches_are_large():
    dear = size_batches(cost_of(0.01, 1e-6), Demand(LENGTHS, lanes=4))
    cheap = size_batches(cost_of(1e-5, 1e-4), Demand(LENGTHS, lanes=4))
    assert dear.token_budget > 500
    assert cheap.token_budget <= 64


def test_an_sla_makes_batches_smaller_and_is_kept():
    cost = cost_of(0.01, 2e-4)
    free = size_batches(cost, Demand(LENGTHS))
    bound = size_batches(cost, Demand(LENGTHS, sla_s=0.08))
    assert bound.within_sla and bound.p99_ms <= 80
    assert bound.token_budget < free.token_budget
    assert bound.requests_per_s < free.requests_per_s
    assert expect(cost, Demand(LENGTHS, sla_s=0.08), free.token_budget).within_sla is False


def test_an_sla_that_no_batch_keeps_gives_the_quickest_and_says_so():
    found = size_batches(cost_of(0.05, 1e-4), Demand(LENGTHS, sla_s=0.01))
    assert not found.within_sla and found.reason == "the SLA is too tight"
    assert found.token_budget <= 48


def test_memory_of_all_lanes_keeps_to_four_fifths_of_what_is_free():
    memory = BatchMemory(fixed=0, token=1000, pair=0, round_to=1)
    demand = Demand(LENGTHS, lanes=2, memory=memory, free_bytes=500_000)
    found = size_batches(cost_of(0.01, 1e-6), demand)
    assert found.within_memory
    assert found.token_budget * 1000 * 2 <= 0.8 * 500_000
    assert not expect(cost_of(0.01, 1e-6), demand, 256).within_memory


def test_a_budget_that_was_given_keeps_to_the_memory_too():
    memory = BatchMemory(fixed=0, token=1000, pair=0, round_to=1)
    demand = Demand(LENGTHS, lanes=2, memory=memory, free_bytes=500_000)
    assert largest_within_memory(demand, 192) == 192
    found = largest_within_memory(demand, 4096)
    assert found < 4096 and all((found // n) * n * 1000 * 2 <= 400_000 for n in LENGTHS)
    tight = Demand(LENGTHS, lanes=2, memory=memory, free_bytes=1000)
    assert largest_within_memory(tight, 4096) <= 2 * min(LENGTHS), "requests then go alone"


def test_no_more_requests_are_expected_in_a_batch_than_it_may_hold():
    cost = cost_of(0.01, 1e-6)
    found = expect(cost, Demand((16,), most_rows=2), 256)
    assert found.requests_per_s == pytest.approx(2 / cost.predict(2, 16))


def test_no_budget_beyond_what_was_measured():
    found = size_batches(cost_of(0.01, 1e-6), Demand(LENGTHS, most_tokens=128))
    assert found.token_budget <= 128


def test_throughput_counts_all_lanes():
    one = expect(cost_of(0.01, 1e-5), Demand((16,)), 64)
    two = expect(cost_of(0.01, 1e-5), Demand((16,), lanes=2), 64)
    assert two.requests_per_s == pytest.approx(2 * one.requests_per_s)
    assert one.requests_per_s == pytest.approx(4 / (0.01 + 64e-5), rel=0.02)


def test_many_lengths_are_asked_for_by_rank():
    demand = Demand(tuple(range(1, 10_001)))
    assert len(demand.picked) == 64
    assert (demand.picked[0], demand.picked[-1]) == (1, 10_000)


def test_of_budgets_that_carry_alike_one_whose_latency_holds_at_seventy_per_cent_is_taken():
    cost = cost_of(0.0023, 1e-4, 5e-8)  # a small encoder on a CPU
    demand = Demand(tuple(range(16, 257)), lanes=2)
    small, found = expect(cost, demand, 256), size_batches(cost, demand)
    assert small.queues  # long requests run alone: two lanes are a plain queue
    assert not found.queues and found.token_budget == 512
    assert not expect(cost, Demand(tuple(range(16, 49)), lanes=2), 128).queues


def test_the_wait_for_a_lane_is_that_of_the_textbook():
    # M/M/1 at 70 %: P(W > t) = 0.7 exp(-0.3 t / S); one size of batch has half of its mean wait
    one = lane_wait_s(np.array([1.0]), np.array([1.0]), 1)
    assert one == pytest.approx(np.log(70) / 0.3 / 2)
    # Erlang's C of two servers at 70 % is 2·0.7² / 1.7
    two = lane_wait_s(np.array([1.0]), np.array([1.0]), 2)
    assert two == pytest.approx(np.log(100 * 0.98 / 1.7) / 0.3 / 4)
    assert lane_wait_s(np.array([1.0]), np.array([0.1]), 1) == pytest.approx(one / 10)
