"""The token budget of a running service: it follows costs, and noise does not move it."""

from __future__ import annotations

import numpy as np

from qbench.serving.cost import BatchCost, Point
from qbench.serving.estimator import Demand
from qbench.serving.resizing import Resizer

LENGTHS = tuple(range(16, 257, 8))


def known(call_s: float, token_s: float = 1e-4) -> BatchCost:
    shapes = [(b, n) for n in (16, 64, 256) for b in (1, 2, 4, 8)]
    return BatchCost(Point(b, n, call_s + token_s * b * n) for b, n in shapes)


def test_a_gain_must_be_seen_three_times_and_is_taken_in_steps():
    resizer, cost, demand = Resizer(), known(0.05), Demand(LENGTHS)
    assert [resizer.look(cost, demand, 32) for _ in range(2)] == [None, None]
    move = resizer.look(cost, demand, 32)
    assert move is not None and move.budget == 64
    assert move.expected.requests_per_s > move.before.requests_per_s
    further = resizer.look(cost, demand, 64)
    assert further is not None and further.budget == 128


def test_a_look_without_a_gain_begins_anew():
    resizer, demand = Resizer(), Demand(LENGTHS)
    dear, cheap = known(0.05), known(1e-5)
    seen = [resizer.look(cost, demand, 32) for cost in (dear, dear, cheap, dear, dear)]
    assert seen == [None] * 5


def test_an_sla_that_is_broken_is_answered_at_once():
    demand = Demand(LENGTHS, sla_s=0.12)
    move = Resizer().look(known(0.002), demand, 1024)
    assert move is not None and move.expected.within_sla and not move.before.within_sla


def test_noisy_times_that_hold_no_gain_move_nothing():
    """Times with a scatter of 40 %, as lanes on a busy machine have; five minutes of looks."""
    moves = 0
    for seed in range(3):
        rng, cost = np.random.default_rng(seed), known(3e-4)
        demand, resizer = Demand(LENGTHS), Resizer()
        for _ in range(60):
            for _ in range(50):
                length = int(rng.choice(LENGTHS))
                batch = max(64 // length, 1)
                real_s = 3e-4 + 1e-4 * batch * length
                cost.observe(batch, length, real_s * float(rng.lognormal(0, 0.4)))
            moves += resizer.look(cost, demand, 64) is not None
    assert moves == 0


def test_a_real_gain_is_found_through_noise():
    rng, cost, demand, resizer = np.random.default_rng(1), known(2e-2), Demand(LENGTHS), Resizer()
    budget = 64
    for _ in range(20):
        for _ in range(50):
            length = int(rng.choice(LENGTHS))
            batch = max(budget // length, 1)
            real_s = 2e-2 + 1e-4 * batch * length
            cost.observe(batch, length, real_s * float(rng.lognormal(0, 0.15)))
        move = resizer.look(cost, demand, budget)
        budget = move.budget if move is not None else budget
    assert budget >= 256
