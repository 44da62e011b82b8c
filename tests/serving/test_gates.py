from __future__ import annotations

import pytest

from qbench.errors import ConfigError
from qbench.serving.gates import (
    Breaker,
    BreakerRules,
    BreakerState,
    MemoryGate,
    MemoryRules,
    Route,
)

RULES = BreakerRules(p99_ms=50.0, window_s=1.0, least=10, open_s=2.0, probes=3)


def test_memory_at_nine_tenths_halves_the_batch_limit_and_again_if_it_stays():
    gate = MemoryGate(MemoryRules(settle_s=1.0))
    assert gate.observe(89, 100, 0.0) is None
    change = gate.observe(90, 100, 0.1)
    assert (change.before, change.after, change.reason) == (
        "1",
        "0.5",
        "memory at 90% of its limit",
    )
    assert gate.observe(95, 100, 0.5) is None, "what is freed needs time to show"
    assert gate.observe(95, 100, 1.2).after == "0.25"
    for step in range(20):
        gate.observe(99, 100, 3.0 + 2 * step)
    assert gate.scale == 1 / 16


def test_it_is_restored_with_hysteresis():
    gate = MemoryGate(MemoryRules(hold_s=5.0))
    gate.observe(95, 100, 0.0)
    assert gate.observe(80, 100, 10.0) is None and gate.scale == 0.5, "between low and high"
    assert gate.observe(70, 100, 11.0) is None
    assert gate.observe(70, 100, 15.9) is None
    assert gate.observe(76, 100, 16.0) is None, "the time below starts anew"
    assert gate.observe(70, 100, 17.0) is None
    assert gate.observe(70, 100, 22.0).after == "1"
    assert gate.observe(10, 100, 60.0) is None


def test_rules_without_hysteresis_are_refused():
    with pytest.raises(ConfigError, match=r"low is 0.9 and high 0.9"):
        MemoryRules(low=0.9)


def feed(breaker: Breaker, start_s: float, latency_ms: float, count: int = 20) -> None:
    for index in range(count):
        now_s = start_s + index / count
        route = breaker.route(now_s)
        breaker.answered(route, latency_ms, False, now_s)


def test_a_slow_window_opens_it_and_good_probes_close_it():
    breaker = Breaker(RULES)
    feed(breaker, 0.0, 10.0)
    feed(breaker, 1.0, 80.0)
    assert breaker.state is BreakerState.CLOSED, "a window is judged when it is over"
    assert breaker.route(2.01) is Route.FALLBACK
    assert breaker.route(3.0) is Route.FALLBACK
    routes = [breaker.route(4.1) for _ in range(5)]
    assert routes == [Route.PROBE] * 3 + [Route.FALLBACK] * 2
    for _ in range(3):
        breaker.answered(Route.PROBE, 10.0, False, 4.2)
    assert breaker.route(4.3) is Route.ENGINE
    changes = breaker.take_changes()
    assert [(one.before, one.after) for one in changes] == [
        ("closed", "open"), ("open", "half_open"), ("half_open", "closed"),
    ]  # fmt: skip
    assert "P99 was 80.0 ms, over 50 ms" in changes[0].reason
    assert breaker.take_changes() == ()


def test_one_bad_probe_opens_it_again():
    breaker = Breaker(RULES)
    feed(breaker, 0.0, 80.0)
    breaker.tick(1.1)
    assert breaker.route(3.2) is Route.PROBE
    breaker.answered(Route.PROBE, 60.0, False, 3.3)
    assert breaker.state is BreakerState.OPEN
    breaker.answered(Route.PROBE, 1.0, False, 3.4)  # of the try that is over
    assert breaker.route(5.2) is Route.FALLBACK
    assert breaker.route(5.4) is Route.PROBE
    breaker.refused(Route.PROBE, 5.5)
    assert breaker.state is BreakerState.OPEN


def test_a_full_queue_opens_it_even_if_what_is_answered_is_quick():
    breaker = Breaker(RULES)
    for index in range(40):
        breaker.answered(breaker.route(index / 50), 5.0, False, index / 50)
        if index % 4 == 0:
            breaker.refused(Route.ENGINE, index / 50)
    breaker.tick(1.1)
    assert breaker.state is BreakerState.OPEN
    assert "the queue was full for 10 of 50 requests" in breaker.take_changes()[0].reason


def test_an_engine_that_fails_opens_it():
    breaker = Breaker(RULES)
    for index in range(20):
        breaker.answered(breaker.route(index / 50), 5.0, index % 3 > 0, index / 50)
    breaker.tick(1.1)
    assert "the engine failed 13 of 20 requests" in breaker.take_changes()[0].reason


def test_a_window_with_few_requests_says_nothing():
    breaker = Breaker(RULES)
    feed(breaker, 0.0, 500.0, count=9)
    breaker.tick(1.1)
    assert breaker.state is BreakerState.CLOSED


def test_a_probe_that_its_caller_takes_back_may_be_sent_again():
    breaker = Breaker(RULES)
    feed(breaker, 0.0, 80.0)
    breaker.tick(1.1)
    assert [breaker.route(3.2) for _ in range(3)] == [Route.PROBE] * 3
    assert breaker.route(3.2) is Route.FALLBACK
    breaker.withdrawn(Route.PROBE)
    assert breaker.route(3.2) is Route.PROBE


@pytest.mark.parametrize(
    ("bad", "name"), [({"window_s": 0.0}, "window_s"), ({"probes": 0}, "probes")]
)
def test_impossible_rules_are_refused(bad, name):
    with pytest.raises(ConfigError, match=name):
        BreakerRules(**bad)
