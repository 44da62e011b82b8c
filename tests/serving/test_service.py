from __future__ import annotations

import asyncio
import logging
import time

import numpy as np
import pytest
from serving_fakes import Summing, answer_of, encode, pad, texts

from qbench.errors import MeasurementError
from qbench.serving.batcher import BatchLimits, Priority
from qbench.serving.cost import BatchCost, Point
from qbench.serving.estimator import Demand
from qbench.serving.failures import RefusedError
from qbench.serving.flights import LoopOptions
from qbench.serving.gates import BreakerRules, BreakerState, MemoryRules
from qbench.serving.memory import MemoryUse
from qbench.serving.request import Work, named_rows
from qbench.serving.service import Gates, Request, Service

WORK = Work(pad, encode)


def test_texts_and_encoded_requests_are_served_beside_each_other():
    with Service([Summing()] * 2, WORK, BatchLimits()) as service:
        asked = texts(100)
        futures = [
            service.submit(Request(text if index % 2 else encode([text])[0], tenant=text[0]))
            for index, text in enumerate(asked)
        ]
        assert [future.result(10).value for future in futures] == [answer_of(t) for t in asked]
        answer = futures[0].result()
        assert answer.served_by == "engine"
        assert answer.times.preprocess_s == 0.0


def test_an_event_loop_can_wait_for_it_and_go_away():
    engine = Summing()

    async def ask(service: Service) -> float:
        future = service.submit(Request("abc"))
        value = (await asyncio.wrap_future(future)).value
        engine.gate.clear()
        service.submit(Request("ab"))
        waiting = asyncio.wrap_future(service.submit(Request("ab")))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting, 0.05)
        engine.gate.set()
        return float(value)

    with Service([engine], WORK, BatchLimits(max_batch=1)) as service:
        assert asyncio.run(ask(service)) == answer_of("abc")
    assert service.stats().counts["cancelled"] == 1


def test_stats_add_up():
    with Service([Summing(0.001)] * 2, WORK, BatchLimits(token_budget=60)) as service:
        for future in [service.submit(Request(text)) for text in texts(200, seed=3)]:
            future.result(10)
        stats = service.stats()
    assert stats.counts["accepted"] == stats.counts["answered"] == 200
    assert stats.latency.count == 200
    assert sum(stats.stage_s.values()) == pytest.approx(stats.latency.total_s, rel=1e-6)
    assert sum(size * count for size, count in stats.batch_sizes.items()) == 200
    assert sum(stats.batch_sizes.values()) == sum(stats.dispatches.values())
    without, padded = stats.tokens
    assert without == sum(map(len, texts(200, seed=3))) and without <= padded <= without / 0.8 + 1
    assert (stats.lanes, stats.queued, stats.breaker) == (2, 0, BreakerState.CLOSED)


BREAKER = BreakerRules(p99_ms=20.0, window_s=0.4, least=5, open_s=0.3, probes=3)


def drive(service: Service, seconds: float) -> list[str]:
    """Ask again and again; return who answered."""
    seen, end_s = [], time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        try:
            seen.append(service.submit(Request("abc")).result(10).served_by)
        except RefusedError:
            seen.append("refused")
            time.sleep(0.005)
    return seen


WINDOW = BreakerRules(refused_share=1.0, window_s=0.1, least=5, open_s=0.2, probes=1)


def after_a_window(service: Service) -> BreakerState:
    time.sleep(0.12)
    service.look()
    return service.stats().breaker


def test_a_slow_engine_is_relieved_by_a_cheaper_one_and_comes_back(caplog):
    slow, cheap = Summing(0.03), Summing(0.001)
    gates = Gates(breaker=BREAKER, fallback=[cheap])
    with (
        caplog.at_level(logging.WARNING),
        Service([slow], WORK, BatchLimits(), gates=gates) as service,
    ):
        seen = drive(service, 1.0)
        assert "fallback" in seen and "engine" in seen
        slow.overhead_s = 0.0
        drive(service, 0.8)
        assert drive(service, 0.1)[-1] == "engine"
        stats = service.stats()
        after = [one.after for one in service.transitions]
    assert stats.counts["fallback"] >= seen.count("fallback") > 10
    assert after[0] == "open" and after[-1] == "closed" and "half_open" in after
    assert stats.transitions["breaker:open"] == after.count("open")
    assert "breaker: closed -> open (P99 was" in caplog.text


def test_without_a_cheaper_engine_the_declared_default_is_given_and_said_to_be_one():
    gates = Gates(breaker=BREAKER, default=-1.0)
    with Service([Summing(0.03)], WORK, BatchLimits(), gates=gates) as service:
        drive(service, 0.8)
        answer = service.submit(Request("abc")).result(10)
        assert (answer.value, answer.served_by, answer.times) == (-1.0, "default", None)
        assert service.stats().counts["default"] > 0


def test_where_the_fallback_fails_too_the_default_is_given():
    def broken(feeds):
        raise OSError("device lost")

    gates = Gates(breaker=WINDOW, fallback=[broken], default=-1.0)
    with Service([broken], WORK, BatchLimits(), gates=gates) as service:
        for _ in range(10):
            service.submit(Request("ab")).exception(10)
        assert after_a_window(service) is BreakerState.OPEN
        answer = service.submit(Request("ab")).result(10)
        assert (answer.value, answer.served_by) == (-1.0, "default")
        counts = service.stats().counts
    assert counts["fallback_failed"] == counts["default"] == 1


def test_without_either_it_refuses_with_a_hint():
    with Service([Summing(0.03)], WORK, BatchLimits(), gates=Gates(breaker=BREAKER)) as service:
        assert "refused" in drive(service, 0.8)
        with pytest.raises(RefusedError, match=r"cannot keep up.*try again in 300 ms"):
            service.submit(Request("abc")).result(10)


def test_overload_alone_opens_no_breaker_where_nothing_could_answer_instead():
    assert Gates().rules().refused_share == 1.0
    assert Gates(default=0).rules() == Gates(fallback=[Summing()]).rules() == BreakerRules()
    limits = BatchLimits(queue=2, max_batch=1)
    with Service([Summing(0.01)], WORK, limits) as service:
        ends = [service.submit(Request("ab")).exception(5) for _ in range(3)]
        flood = [service.submit(Request("ab")) for _ in range(200)]
        service.look()
        assert sum(future.exception(5) is not None for future in flood) > 150
        assert service.stats().breaker is BreakerState.CLOSED
    assert ends == [None] * 3


def test_deadlines_that_cannot_be_kept_are_no_failures_of_the_engine():
    """One tenant's hopeless deadlines would else close the engine to all others."""
    limits = BatchLimits(max_batch=1)
    with Service([Summing(0.02)], WORK, limits, gates=Gates(breaker=WINDOW)) as service:
        for _ in range(6):
            service.submit(Request("abc")).result(10)
        assert after_a_window(service) is BreakerState.CLOSED
        ends = [service.submit(Request("abc", timeout_s=0.03)) for _ in range(60)]
        assert sum(one.exception(10) is not None for one in ends) > 40
        assert after_a_window(service) is BreakerState.CLOSED


def test_texts_that_cannot_be_encoded_are_no_failures_of_the_engine():
    def picky(group):
        if any("z" in text for text in group):
            raise UnicodeError("no z please")
        return encode(group)

    with Service(
        [Summing()], Work(pad, picky), gates=Gates(breaker=WINDOW), limits=BatchLimits()
    ) as service:
        ends = [service.submit(Request("abz")) for _ in range(20)]
        assert all(isinstance(one.exception(10), UnicodeError) for one in ends)
        assert after_a_window(service) is BreakerState.CLOSED


def test_a_request_that_waited_long_for_nothing_counts_as_slow():
    rules = BreakerRules(p99_ms=20.0, window_s=0.1, least=5, open_s=9.0)
    limits = BatchLimits(max_batch=1)
    gates = Gates(breaker=rules, default=-1.0)
    with Service([Summing(0.015)], WORK, limits, LoopOptions(hang_s=5.0), gates) as service:
        for _ in range(6):
            service.submit(Request("abc")).result(10)
        assert after_a_window(service) is BreakerState.CLOSED
        for one in [service.submit(Request("abc", timeout_s=0.06)) for _ in range(60)]:
            one.exception(10)
        assert after_a_window(service) is BreakerState.OPEN


def test_a_change_just_before_the_end_is_counted_too():
    def broken(feeds):
        raise OSError("device lost")

    service = Service([broken], WORK, gates=Gates(breaker=WINDOW), limits=BatchLimits())
    for _ in range(10):
        service.submit(Request("ab")).exception(10)
    time.sleep(0.12)
    service.submit(Request("ab")).exception(10)
    service.drain()
    stats = service.stats()
    assert stats.breaker is BreakerState.OPEN and stats.transitions == {"breaker:open": 1}
    assert [one.after for one in service.transitions] == ["open"]


def test_refusals_of_the_fallback_are_counted_beside_those_of_the_engine():
    slow, jammed = Summing(0.03), Summing()
    jammed.gate.clear()
    gates = Gates(breaker=BREAKER, fallback=[jammed])
    limits = BatchLimits(queue=2, max_batch=1)
    with Service([slow], WORK, limits, gates=gates) as service:
        for _ in range(30):
            service.submit(Request("abc"))
        before = service.stats().counts["refused"]
        assert before > 10
        until_s = time.perf_counter() + 5
        while service.stats().counts.get("fallback", 0) < 3 and time.perf_counter() < until_s:
            service.submit(Request("abc"))
            time.sleep(0.01)
        for _ in range(5):
            service.submit(Request("abc"))
        assert service.stats().counts["refused"] > before
        jammed.gate.set()


def test_short_memory_halves_the_batch_limit_and_more_restores_it(caplog):
    use = [MemoryUse(95, 100, "given")]
    gates = Gates(memory=MemoryRules(settle_s=0.0, hold_s=0.0), read_memory=lambda: use[0])
    limits = BatchLimits(token_budget=256, max_batch=8)
    with (
        caplog.at_level(logging.WARNING),
        Service([Summing()], WORK, limits, gates=gates) as service,
    ):
        service.look()
        scale = service.stats().batch_scale
        assert scale < 1
        assert service.loop.batcher.limits.max_batch == max(int(8 * scale), 1)
        use[0] = MemoryUse(10, 100, "given")
        for _ in range(12):
            service.look()
        stats = service.stats()
        assert stats.batch_scale == 1.0 and service.loop.batcher.limits.token_budget == 256
        assert stats.transitions["memory:1"] == 1
        assert stats.memory == use[0]
    assert "memory: 1 -> 0.5 (memory at 95% of its limit)" in caplog.text


def test_the_budget_follows_what_batches_turn_out_to_cost():
    wrong = BatchCost(Point(b, n, 1e-5 + 1e-4 * b * n) for b in (1, 2, 4) for n in (4, 8, 16))
    demand = Demand(tuple(range(4, 17)), lanes=1, most_tokens=512)
    options = LoopOptions(model=wrong)
    limits = BatchLimits(token_budget=16)
    with Service([Summing(0.004)], WORK, limits, options) as service:
        service.size(demand)
        assert service.loop.batcher.limits.token_budget == 16, "as the model says so far"
        for text in texts(300, 4, 16):
            service.submit(Request(text)).result(10)
        for _ in range(6):
            service.size(demand)
        assert service.loop.batcher.limits.token_budget > 16
        assert service.transitions[-1].gate == "budget"


def test_ready_until_it_drains_and_live_until_it_ended():
    service = Service([Summing()], WORK, BatchLimits())
    assert service.live and service.ready
    assert service.drain() is True
    assert not service.live and not service.ready
    assert service.drain() is True


def test_a_payload_that_is_no_request_is_an_error_and_holds_no_place():
    with Service([Summing()], Work(pad), BatchLimits()) as service:
        with pytest.raises(MeasurementError, match="mapping from input names"):
            service.submit(Request("abc"))
        assert service.stats().queued == 0


def test_classes_reach_the_batcher():
    engine = Summing()
    engine.gate.clear()
    order = []
    with Service([engine], WORK, BatchLimits(max_batch=1)) as service:
        service.submit(Request("ab"))
        while service.loop.batcher.free_lanes:
            time.sleep(0.001)
        for name, priority in (("low", Priority.BATCH), ("high", Priority.INTERACTIVE)):
            future = service.submit(Request("ab", priority=priority))
            future.add_done_callback(lambda _, name=name: order.append(name))
        while service.loop.batcher.ready_count < 2:
            time.sleep(0.001)
        engine.gate.set()
    assert order == ["high", "low"]


def test_named_rows_share_no_memory():
    outputs = {"a": np.arange(6.0).reshape(2, 3), "b": np.arange(2)}
    rows = named_rows(outputs, 2)
    outputs["a"][:] = -1
    assert rows[1]["a"].tolist() == [3, 4, 5] and rows[1]["b"] == 1
    assert rows[0]["a"].base is None
    with pytest.raises(MeasurementError, match="must be the batch"):
        named_rows({"a": np.zeros((3, 1))}, 2)
