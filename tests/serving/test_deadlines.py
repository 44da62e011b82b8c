"""Deadlines and cancellation, by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from serving_sim import play, poisson

from qbench.serving.batcher import Accept, Batcher, BatchLimits, Dispatch, Priority, Refuse, Terms
from qbench.serving.cost import BatchCost, Point


def cost_s(batch: int, length: int) -> float:
    return 0.002 + 5e-5 * batch * length


def knowing() -> BatchCost:
    shapes = [(b, n) for b in (1, 2, 4, 8) for n in (8, 16, 32)]
    return BatchCost(Point(b, n, cost_s(b, n)) for b, n in shapes)


def offer(batcher: Batcher, tokens: int, deadline_s: float | None, now_s: float = 0.0) -> int:
    answer = batcher.admit(now_s, Terms(deadline_s=deadline_s))
    assert isinstance(answer, Accept)
    batcher.ready(answer.ticket, tokens, now_s)
    return answer.ticket


def test_a_request_that_cannot_make_it_is_shed_and_not_computed():
    batcher = Batcher(BatchLimits(lanes=1), knowing())
    hopeless = offer(batcher, 40, 0.003)  # 40 tokens take 4 ms
    possible = offer(batcher, 8, 0.003)  # 8 tokens take 2.4 ms
    decision = batcher.decide(0.0)
    assert decision.tickets == (possible,)
    (shed,) = batcher.take_shed()
    assert shed.ticket == hopeless
    assert shed.late_s == pytest.approx(0.001, rel=0.05)
    assert batcher.take_shed() == ()
    assert batcher.queued == 0


def test_a_deadline_that_has_passed_is_refused_at_once():
    assert Batcher(BatchLimits()).admit(1.0, Terms(deadline_s=0.5)) == Refuse(
        "its deadline has passed", None, late=True
    )


def test_a_deadline_is_noticed_while_all_lanes_are_busy():
    batcher = Batcher(BatchLimits(lanes=1), knowing())
    offer(batcher, 8, None)
    running = batcher.decide(0.0)
    assert isinstance(running, Dispatch)
    late = offer(batcher, 8, 0.004)
    batcher.expire(0.001)
    assert not batcher.take_shed()
    batcher.expire(0.002)
    assert [one.ticket for one in batcher.take_shed()] == [late]


def test_a_deadline_that_passes_before_a_request_is_ready_is_noticed_then():
    batcher = Batcher(BatchLimits(lanes=1), knowing())
    late = batcher.admit(0.0, Terms(deadline_s=0.01)).ticket
    kept = batcher.admit(0.0, Terms(deadline_s=0.05)).ticket
    batcher.expire(0.02)
    assert [one.ticket for one in batcher.take_shed()] == [late]
    batcher.ready(kept, 8, 0.03)
    assert batcher.queued == 1 and batcher.decide(0.03).tickets == (kept,)


def test_a_batch_is_kept_small_enough_for_the_first_deadline_in_it():
    batcher = Batcher(BatchLimits(token_budget=256, lanes=1), knowing())
    tight = offer(batcher, 16, 0.0062)  # alone 2.8 ms, with all eight 8.4 ms
    for _ in range(7):
        offer(batcher, 16, None)
    decision = batcher.decide(0.0)
    assert tight in decision.tickets
    assert 2 <= len(decision.tickets) < 8
    assert cost_s(len(decision.tickets), 16) <= 0.0062


def taught(**limits) -> tuple[Batcher, float]:
    """Return a batcher that knows costs and has just seen arrivals every 0.1 ms."""
    batcher, now_s = Batcher(BatchLimits(max_wait_s=0.05, **limits), knowing()), 0.0
    for index in range(16):
        offer(batcher, 4 + 8 * (index % 4), None, now_s)
        decision = batcher.decide(now_s)
        batcher.complete(decision.batch, now_s + cost_s(1, decision.longest))
        now_s += 10.0
    for _ in range(60):
        batcher.withdraw(offer(batcher, 10, None, now_s))
        now_s += 1e-4
    return batcher, now_s


def test_no_wait_for_more_makes_a_request_miss_its_deadline():
    batcher, now_s = taught()
    offer(batcher, 10, None, now_s)
    assert not isinstance(batcher.decide(now_s), Dispatch), "waiting pays"
    batcher, now_s = taught()
    tight = offer(batcher, 10, now_s + cost_s(2, 10) + 5e-5, now_s)
    decision = batcher.decide(now_s)
    assert isinstance(decision, Dispatch) and decision.tickets == (tight,)


@pytest.mark.parametrize("seed", range(5))
def test_batches_that_are_cut_for_a_deadline_keep_to_the_padding(seed):
    rng = np.random.default_rng(seed)
    asked = poisson(2500, 1.0, rng)
    for one in asked[::2]:
        one.deadline_s = one.at_s + float(rng.exponential(0.03))
    batcher = Batcher(BatchLimits(token_budget=256, lanes=2, queue=200), knowing())
    formed, decide = [], batcher.decide

    def noting(now_s):
        decision = decide(now_s)
        if isinstance(decision, Dispatch):
            formed.append(decision)
        return decision

    batcher.decide = noting
    play(batcher, asked, cost_s)
    assert sum(len(one.tickets) > 1 for one in formed) > 100
    assert all(1 - one.tokens / one.padded_tokens <= 0.2 + 1e-9 for one in formed)


def test_what_has_left_is_not_remembered_however_far_its_deadline_or_its_ageing():
    batcher = Batcher(BatchLimits(ageing_s=1e9), knowing())
    for index in range(500):
        now_s = index * 0.01
        answer = batcher.admit(now_s, Terms("", Priority.BATCH, now_s + 1e9))
        batcher.ready(answer.ticket, 8, now_s)
        batcher.complete(batcher.decide(now_s).batch, now_s + 0.002)
    assert len(batcher._latest) < 3 and len(batcher._line._ageing) < 3


def test_under_overload_what_is_answered_is_answered_in_time_and_the_rest_is_shed():
    rng = np.random.default_rng(0)
    asked = poisson(3000, 3.0, rng)
    for one in asked:
        one.deadline_s = one.at_s + 0.05
    batcher = Batcher(BatchLimits(token_budget=256, lanes=2, queue=1000), knowing())
    play(batcher, asked, cost_s)
    done = [one for one in asked if one.what == "ok"]
    late = [one for one in done if one.latency_s > 0.05 + 1e-3]
    assert len(done) > 1000
    assert len(late) <= 0.001 * len(done)
    assert sum(one.what == "shed" for one in asked) > 500


def test_cancelled_requests_never_run():
    rng = np.random.default_rng(1)
    asked = poisson(2000, 1.0, rng)
    for one in asked[::5]:
        one.cancel_s = one.at_s + 0.003
    play(Batcher(BatchLimits(queue=500)), asked, cost_s)
    cancelled = [one for one in asked if one.what == "cancelled"]
    assert len(cancelled) > 20
    assert all(one.latency_s <= 0.003 + 1e-9 for one in cancelled)
    assert all(len(one.ends) == 1 for one in asked)
