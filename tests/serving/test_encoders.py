"""Encoding ahead: bounded by the queue, fair between tenants, and done before the end."""

from __future__ import annotations

import threading
import time

import numpy as np
from serving_fakes import Summing, answer_of, encode, pad

from qbench.serving.batcher import BatchLimits, Priority, Terms
from qbench.serving.failures import ShedError
from qbench.serving.flights import LoopOptions
from qbench.serving.loop import ServingLoop
from qbench.serving.request import Work
from qbench.serving.service import Request, Service


class Slow:
    """An encoder that takes a set time for each text, and notes them."""

    def __init__(self, text_s: float) -> None:
        self.text_s, self.seen = text_s, []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, group):
        self.gate.wait(10)
        self.seen += group
        time.sleep(self.text_s * len(group))
        return encode(group)


def wait_for(what) -> None:
    until_s = time.perf_counter() + 10
    while not what():
        assert time.perf_counter() < until_s
        time.sleep(0.001)


def test_a_request_that_comes_in_as_the_end_begins_is_answered():
    """The end must not fall between a request's acceptance and its way to the encoder."""
    with ServingLoop([Summing()], Work(pad, encode), BatchLimits()) as loop:
        put, got = loop._encoders.put, []

        def late(*given):
            closer.start()
            time.sleep(0.1)
            put(*given)

        closer = threading.Thread(target=loop.close)
        loop._encoders.put = late
        loop.submit("abc", got.append)
        closer.join(10)
        assert not closer.is_alive()
    assert [answer.value for answer in got] == [answer_of("abc")]


def test_what_is_taken_back_is_neither_held_nor_encoded():
    slow = Slow(0.0)
    slow.gate.clear()
    with ServingLoop([Summing()], Work(pad, slow), BatchLimits(queue=8)) as loop:
        first = loop.ask("ab")
        wait_for(lambda: not len(loop._encoders))
        for _ in range(500):
            assert loop.ask("cd").cancel()
        assert len(loop._encoders) == 0
        last = loop.ask("ef")
        slow.gate.set()
        assert [first.result(10).value, last.result(10).value] == [answer_of("ab"), answer_of("ef")]
    assert slow.seen == ["ab", "ef"]
    assert loop.counts["cancelled"] == 500


def test_a_text_whose_deadline_passes_before_its_turn_is_told_so_and_not_encoded():
    slow = Slow(0.0)
    slow.gate.clear()
    options = LoopOptions(hang_s=8.0)  # deadlines are looked at by the watchdog too
    with Service([Summing()], Work(pad, slow), BatchLimits(), options) as service:
        first = service.submit(Request("ab"))
        wait_for(lambda: not len(service.loop._encoders))
        late = service.submit(Request("cd", timeout_s=0.02))
        assert isinstance(late.exception(5), ShedError), "while the encoder is still busy"
        assert len(service.loop._encoders) == 0
        slow.gate.set()
        assert first.result(10).value == answer_of("ab")
    assert slow.seen == ["ab"]


def test_a_flood_of_texts_does_not_keep_another_tenant_from_the_lanes():
    slow = Slow(0.001)
    limits = BatchLimits(queue=256, token_budget=256)
    with Service([Summing()], Work(pad, slow), limits) as service:
        for _ in range(20):
            service.submit(Request("ab")).result(10)  # how long a text takes is known by now
        stop = threading.Event()

        def flood() -> None:
            while not stop.is_set():
                service.submit(Request("abcdefgh", tenant="flood"))
                time.sleep(0.0002)

        thread = threading.Thread(target=flood)
        thread.start()
        wait_for(lambda: len(service.loop._encoders) > 200)
        waits = []
        for _ in range(30):
            answer = service.submit(Request("abcdefgh", tenant="quiet")).result(10)
            waits.append(answer.times.total_s)
        stop.set()
        thread.join()
    flooded_s = 200 * 0.001  # behind all texts of the flood
    assert np.percentile(waits, 90) < 0.3 * flooded_s


def test_classes_and_ageing_hold_for_texts_too():
    slow, low, high = Slow(0.0), Terms(priority=Priority.BATCH), Terms()
    slow.gate.clear()
    limits = BatchLimits(ageing_s=0.2)
    with ServingLoop([Summing()], Work(pad, slow), limits) as loop:
        loop.ask("first")
        wait_for(lambda: not len(loop._encoders))
        loop.ask("old", low)
        time.sleep(0.25)
        futures = [loop.ask("low", low), loop.ask("high", high)]
        slow.gate.set()
        assert [future.result(10).value for future in futures] == list(
            map(answer_of, ("low", "high"))
        )
    assert slow.seen == ["first", "high", "old", "low"]
