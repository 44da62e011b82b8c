"""A clock that steps: time goes on, so that no wait is as long as the step."""

from __future__ import annotations

import time

from serving_fakes import Summing, answer_of, encode, pad

from qbench.serving.batcher import Batcher, BatchLimits, Dispatch, Refuse, Terms, Wait
from qbench.serving.clock import SteadyTime, steady
from qbench.serving.cost import BatchCost, Point
from qbench.serving.flights import LoopOptions
from qbench.serving.gates import BreakerRules, BreakerState
from qbench.serving.request import Work
from qbench.serving.service import Gates, Request, Service


def test_time_stands_still_over_a_step_back_and_goes_on_after_it():
    steady_time = SteadyTime()
    said = [steady_time.advance(at_s) for at_s in (10.0, 11.0, 5.0, 5.5, 7.0, 1.0, 2.0)]
    assert said == [10.0, 11.0, 11.0, 11.5, 13.0, 13.0, 14.0]


def test_a_clock_that_cannot_step_is_read_as_it_is():
    assert steady(time.perf_counter) is time.perf_counter
    wrapped = steady(time.time)
    assert wrapped is not time.time and steady(wrapped) is wrapped


def waiting_for_more(now_s: float = 1000.0) -> tuple[Batcher, float]:
    """Return a batcher that waits for more: arrivals are dense and a call is dear."""
    batcher = Batcher(BatchLimits(max_wait_s=0.05))
    for index in range(16):
        offer(batcher, 4 + 8 * (index % 4), now_s)
        decision = batcher.decide(now_s)
        batcher.complete(decision.batch, now_s + 0.002 + 1e-4 * decision.padded_tokens)
        now_s += 10.0
    for _ in range(60):
        batcher.withdraw(offer(batcher, 10, now_s))
        now_s += 1e-4
    return batcher, now_s


def offer(batcher: Batcher, tokens: int, now_s: float, deadline_s: float | None = None) -> int:
    ticket = batcher.admit(now_s, Terms(deadline_s=deadline_s)).ticket
    batcher.ready(ticket, tokens, now_s)
    return ticket


def test_after_a_step_back_a_wait_ends_in_the_caller_s_time_and_within_the_longest_wait():
    batcher, now_s = waiting_for_more()
    now_s -= 900.0
    ticket = offer(batcher, 10, now_s)
    decision = batcher.decide(now_s)
    assert isinstance(decision, Wait) and now_s < decision.until_s <= now_s + 0.05
    decision = batcher.decide(now_s + 0.0501)
    assert isinstance(decision, Dispatch) and decision.tickets == (ticket,)


def test_a_deadline_after_a_step_back_is_a_time_of_the_clock_as_it_is_now():
    cost = BatchCost(Point(b, n, 0.002 + 5e-5 * b * n) for b in (1, 2, 4) for n in (8, 16))
    batcher = Batcher(BatchLimits(), cost)
    offer(batcher, 8, 5000.0)
    batcher.complete(batcher.decide(5000.0).batch, 5000.01)
    assert isinstance(batcher.admit(10.0, Terms(deadline_s=9.0)), Refuse)
    kept, lost = offer(batcher, 8, 10.0, 10.1), offer(batcher, 8, 10.0, 10.001)
    decision = batcher.decide(10.0)
    assert decision.tickets == (kept,)
    assert [shed.ticket for shed in batcher.take_shed()] == [lost]


class Clock:
    """A clock that can be set."""

    def __init__(self) -> None:
        self.offset_s = 3600.0

    def __call__(self) -> float:
        return time.perf_counter() + self.offset_s


def test_an_hour_back_keeps_neither_a_request_nor_an_open_breaker_for_an_hour():
    clock, engine = Clock(), Summing(0.03)
    rules = BreakerRules(p99_ms=20.0, window_s=0.1, least=3, open_s=0.2, probes=2)
    gates = Gates(breaker=rules, default=-1.0)
    options = LoopOptions(clock=clock)
    with Service([engine], Work(pad, encode), BatchLimits(), options, gates) as service:
        while service.stats().breaker is not BreakerState.OPEN:
            service.submit(Request("abc")).result(10)
        engine.overhead_s = 0.0
        clock.offset_s = 0.0
        answers, until_s = [], time.perf_counter() + 5
        while service.stats().breaker is not BreakerState.CLOSED:
            answers.append(service.submit(Request("abc")).result(5))
            time.sleep(0.005)
            assert time.perf_counter() < until_s
    assert answers[-1].value == answer_of("abc")
    assert all(one.times is None or 0 <= one.times.total_s < 5 for one in answers)
