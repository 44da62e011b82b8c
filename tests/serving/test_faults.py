"""Injected faults: each request is answered once, with its own answer, or told why not."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from serving_fakes import Summing, answer_of, encode, pad, texts
from serving_sim import Asked, Faults, play, poisson, summing

from qbench.serving.batcher import Batcher, BatchLimits, Priority
from qbench.serving.cost import BatchCost
from qbench.serving.failures import (
    CancelledError,
    ClosedError,
    HungError,
    NotANumberError,
    RefusedError,
    ShedError,
)
from qbench.serving.flights import LoopOptions
from qbench.serving.loop import ServingLoop
from qbench.serving.request import Work
from qbench.serving.service import Request, Service

WORK = Work(pad, encode)
POISON, NOT_A_NUMBER = 97, 98  # token ids of the simulation


class Broken:
    """An engine of the simulation that raises on poison, now and then, and answers NaN."""

    def __init__(self) -> None:
        self.runs = itertools.count(1)

    def __call__(self, feeds):
        if (feeds["ids"] == POISON).any():
            raise ValueError("poison")
        if next(self.runs) % 41 == 0:
            raise OSError("device lost")
        outputs = summing(feeds)
        outputs["sum"][(feeds["ids"] == NOT_A_NUMBER).any(axis=1)] = np.nan
        return outputs


def hundred_thousand(rng: np.random.Generator):
    """Three tenants, two classes, a burst of ten times the rate, deadlines and cancellations."""
    asked = poisson(1200, 25.0, rng, tenant="a")
    asked += poisson(1200, 25.0, rng, tenant="b", priority=Priority.BATCH)
    burst = poisson(24_000, 1.8, rng, tenant="c")
    for one in burst:
        one.at_s += 9.0
    asked += burst
    for one in asked:
        one.ids = [min(token, 96) for token in one.ids]
        draw = rng.random()
        if draw < 0.002:
            one.ids[0] = POISON
        elif draw < 0.004:
            one.ids[-1] = NOT_A_NUMBER
        elif draw < 0.05:
            one.cancel_s = one.at_s + float(rng.exponential(0.01))
        elif draw < 0.30:
            one.deadline_s = one.at_s + float(rng.exponential(0.05))
    return sorted(asked, key=lambda one: one.at_s)


def test_a_hundred_thousand_requests_with_faults_each_have_one_end_and_it_is_the_right_one():
    rng = np.random.default_rng(0)
    asked = hundred_thousand(rng)
    assert len(asked) > 100_000
    hangs = set(rng.choice(20_000, 40, replace=False).tolist())
    limits = BatchLimits(token_budget=256, lanes=2, queue=256, max_wait_s=0.003, odd_lane=True)
    batcher = Batcher(limits, BatchCost())
    faults = Faults(Broken(), lambda batch: batch in hangs, 0.3)
    play(batcher, asked, lambda size, length: 0.0005 + 5e-6 * size * length, faults)
    assert all(len(one.ends) == 1 for one in asked), "each has exactly one end"
    assert batcher.queued == 0 and batcher.free_lanes == 2
    counts: dict[str, int] = {}
    for one in asked:
        what, _, value = one.ends[0]
        counts[what] = counts.get(what, 0) + 1
        if what == "ok":
            assert value == one.right
            assert POISON not in one.ids and NOT_A_NUMBER not in one.ids
        elif what == "failed":
            bad = {ValueError: POISON, NotANumberError: NOT_A_NUMBER}.get(type(value))
            assert (bad in one.ids) if bad else isinstance(value, OSError)
    assert set(counts) == {"ok", "failed", "refused", "shed", "cancelled", "hung", "displaced"}
    assert counts["ok"] > 0.5 * len(asked)
    assert counts["failed"] < 0.01 * len(asked)


# --- for real ----------------------------------------------------------------------------------

HERE = Path(__file__).parent
HERE_TOO = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}


def test_a_hundred_thousand_real_requests_with_all_faults_and_sigterm_are_each_answered_once():
    """The engine raises, hangs, gives NaN and meets poison; clients go away; the clock steps.

    The queue is full, in a burst above all, and SIGTERM comes under load.
    """
    process = subprocess.Popen(
        [sys.executable, HERE / "serving_storm.py"], stdout=subprocess.PIPE, text=True, env=HERE_TOO
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "sent"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    found = json.loads(out)
    kinds, counts = found["kinds"], found["counts"]
    assert sum(kinds.values()) >= 100_000
    assert "wrong" not in kinds and "lost" not in kinds
    assert not found["complaints"], "a second answer makes the callback raise"
    for kind in ("ValueError", "OSError", "NotANumberError", "HungError", "ShedError"):
        assert kinds[kind] >= 1
    assert kinds["RefusedError"] >= 100 and kinds["cancelled"] >= 100
    assert kinds["right"] > 30_000
    assert counts["replaced_lanes"] >= 1
    assert counts["answered"] >= kinds["right"]
    ends = ("answered", "failed", "hung", "shed", "displaced", "cancelled", "closed")
    assert counts["accepted"] == sum(counts.get(end, 0) for end in ends)
    assert (found["drained"], found["late"], found["queued"]) == (True, "RefusedError", 0)


def test_only_the_poison_of_a_batch_fails():
    engine = Summing()
    runs = []

    def picky(feeds):
        engine.gate.wait(10)
        runs.append(len(feeds["ids"]))
        if (feeds["ids"] == ord("z")).any():
            raise ValueError("poison")
        return {"sum": feeds["ids"].sum(axis=1)}

    engine.gate.clear()
    with ServingLoop([picky], WORK, BatchLimits(token_budget=1000)) as loop:
        first = loop.ask("ab")
        while loop.batcher.free_lanes:
            time.sleep(0.001)
        asked = ["abcd"] * 7 + ["abcz"] + ["abcd"] * 8
        futures = [loop.ask(text) for text in asked]
        while loop.batcher.ready_count < 16:
            time.sleep(0.001)
        engine.gate.set()
        first.result(10)
        for text, future in zip(asked, futures, strict=True):
            if "z" in text:
                with pytest.raises(ValueError, match="poison"):
                    future.result(10)
            else:
                assert future.result(10).value == answer_of(text)
    assert runs[:2] == [1, 16]
    assert len(runs) <= 2 + 2 * 4, "one bad request of 16 costs at most 2 log2(16) runs more"


def test_a_hanging_engine_loses_its_lane_and_the_others_go_on():
    hang, opened = threading.Event(), []

    def stuck(feeds):
        if (feeds["ids"] == ord("h")).any():
            hang.wait(20)
        return {"sum": feeds["ids"].sum(axis=1)}

    def reopen(index):
        opened.append(index)
        return lambda feeds: {"sum": feeds["ids"].sum(axis=1)}

    options = LoopOptions(hang_s=0.2, reopen=reopen)
    with ServingLoop([stuck], WORK, BatchLimits(max_batch=1), options) as loop:
        bad = loop.ask("hh")
        good = [loop.ask("abc") for _ in range(5)]
        with pytest.raises(HungError, match="lane was replaced"):
            bad.result(10)
        assert [future.result(10).value for future in good] == [answer_of("abc")] * 5
        assert opened == [0]
        hang.set()
        time.sleep(0.05)
        assert loop.ask("abc").result(10).value == answer_of("abc")
    assert loop.counts["hung"] == 1


def test_a_client_that_goes_away_frees_its_place_and_is_never_computed():
    engine = Summing()
    engine.gate.clear()
    with ServingLoop([engine], WORK, BatchLimits(queue=2, max_batch=1)) as loop:
        loop.ask("ab")
        while loop.batcher.free_lanes:
            time.sleep(0.001)
        gone, other = loop.ask("cd"), loop.ask("ef")
        assert gone.cancel()
        assert loop.batcher.queued == 1
        third = loop.ask("gh")
        engine.gate.set()
        assert other.result(10).value == answer_of("ef")
        assert third.result(10).value == answer_of("gh")
    assert len(engine.shapes) == 3
    assert loop.counts["cancelled"] == 1


def test_cancel_tells_the_callback_once():
    engine, answers = Summing(), []
    engine.gate.clear()
    with ServingLoop([engine], WORK, BatchLimits(max_batch=1)) as loop:
        running = loop.submit("ab", answers.append)
        while loop.batcher.free_lanes:
            time.sleep(0.001)
        queued = loop.submit("cd", answers.append)
        assert loop.cancel(queued.ticket) and not loop.cancel(queued.ticket)
        assert not loop.cancel(running.ticket)
        engine.gate.set()
    assert sorted(type(one.error).__name__ for one in answers) == ["CancelledError", "NoneType"]
    assert issubclass(CancelledError, Exception)


def test_deadlines_are_kept_for_real():
    with Service([Summing(overhead_s=0.02)], WORK, BatchLimits(max_batch=1)) as service:
        for _ in range(6):
            service.submit(Request("abcd")).result(10)  # the cost is known by now
        futures = [service.submit(Request("abcd", timeout_s=0.05)) for _ in range(8)]
        ends = [future.exception(10) for future in futures]
    shed = [error for error in ends if error is not None]
    assert 4 <= len(shed) < 8
    assert all(isinstance(error, ShedError) for error in shed)
    assert service.stats().counts["shed"] == len(shed)


class SteppingClock:
    """A clock that jumps an hour ahead and back again."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.offset_s


def test_a_clock_that_steps_loses_no_request_and_replaces_no_lane():
    clock = SteppingClock()
    options = LoopOptions(hang_s=0.3, clock=clock)
    asked = texts(600, seed=4)
    limits = BatchLimits(queue=1000)
    with ServingLoop([Summing(0.001)] * 2, WORK, limits, options) as loop:
        futures = []
        for index, text in enumerate(asked):
            clock.offset_s = (0.0, 3600.0, -3600.0)[index // 50 % 3]
            futures.append(loop.ask(text))
            time.sleep(0.0005)
        answers = [future.result(20) for future in futures]
    assert [answer.value for answer in answers] == [answer_of(text) for text in asked]
    assert loop.counts["replaced_lanes"] == 0


def test_a_burst_of_ten_times_is_answered_or_refused_at_once():
    with Service([Summing(0.002)] * 2, WORK, BatchLimits(token_budget=40, queue=64)) as service:
        futures = []
        for index in range(900):
            started_s = time.perf_counter()
            futures.append(service.submit(Request("abcdefgh")))
            if isinstance(futures[-1].exception(0) if futures[-1].done() else None, RefusedError):
                assert time.perf_counter() - started_s < 0.1
            if index < 100 or index > 800:
                time.sleep(0.003)
        ends = [future.exception(20) for future in futures]
    refused = [error for error in ends if error is not None]
    assert all(isinstance(error, RefusedError) and error.retry_after_s > 0 for error in refused)
    assert 0 < len(refused) < 800
    assert all(error is None for error in ends[-20:]), "after the burst it serves as before"


BATCH_S = 0.012


def p99_of_a_quiet_tenant(lanes: int, flood_as: str | None = None, count: int = 100) -> float:
    """Return the P99 of a tenant that asks now and then, seconds."""
    limits = BatchLimits(token_budget=64, queue=256)
    stop = threading.Event()
    with Service([Summing(BATCH_S)] * lanes, WORK, limits) as service:

        def flood() -> None:
            while not stop.wait(0.0003):
                service.submit(Request("abcdefgh", tenant=flood_as or ""))

        thread = threading.Thread(target=flood)
        if flood_as is not None:
            thread.start()
            while service.stats().counts.get("refused", 0) < 50:
                time.sleep(0.01)
        waits = []
        for _ in range(count):
            future = service.submit(Request("abcdefgh", tenant="quiet"))
            waits.append(10.0 if future.exception(10) else future.result().times.total_s)
            time.sleep(0.002)
        stop.set()
        if flood_as is not None:
            thread.join()
    return float(np.percentile(waits, 99))


def test_a_flood_does_not_move_another_tenant_s_p99_beyond_its_share_for_real():
    """As in the simulation: alone on half of the lanes, and two batches that nobody interrupts.

    The least of a few tries: whatever else runs on a machine only adds to it.
    """
    tries = []
    for _ in range(4):
        allowed_s = p99_of_a_quiet_tenant(1) + 2 * BATCH_S
        tries.append(p99_of_a_quiet_tenant(2, "flood") / allowed_s)
        if tries[-1] <= 1:
            break
    assert min(tries) <= 1
    assert p99_of_a_quiet_tenant(2, "quiet", 10) > 3 * allowed_s, "one name, one line"


def test_what_cannot_be_drained_in_time_is_told_so():
    engine = Summing()
    engine.gate.clear()
    service = Service([engine], WORK, BatchLimits(max_batch=1))
    futures = [service.submit(Request("ab")) for _ in range(4)]
    assert service.drain(0.1) is False
    assert all(isinstance(future.exception(1), ClosedError) for future in futures)
    assert not service.live and not service.ready
    engine.gate.set()
    with pytest.raises(RefusedError, match="closing"):
        service.submit(Request("ab")).result(0)


SERVER = """
import signal, threading, time
from serving_fakes import Summing, answer_of, encode, pad
from qbench.serving.batcher import BatchLimits
from qbench.serving.request import Work
from qbench.serving.service import Request, Service

service = Service([Summing(0.003)] * 2, Work(pad, encode), BatchLimits(queue=4000, token_budget=30))
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
futures = []
print("ready", flush=True)
while not stop.is_set():
    futures.append(service.submit(Request("abc")))
    time.sleep(0.0005)
served = service.drain(20)
late = service.submit(Request("abc")).exception()
right = sum(future.result(0).value == answer_of("abc") for future in futures)
print(len(futures), right, served, type(late).__name__, flush=True)
"""


def test_sigterm_under_load_answers_what_was_accepted():
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE,
        text=True,
        env=HERE_TOO,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    asked, right, served, late = out.split()
    assert int(asked) == int(right) > 50
    assert (served, late) == ("True", "RefusedError")
    assert process.returncode == 0


def test_a_nan_row_fails_alone():
    def engine(feeds):
        rows = np.ones((len(feeds["ids"]), 3), np.float32)
        rows[(feeds["ids"] == ord("y")).any(axis=1), 1] = np.nan
        rows[(feeds["ids"] == ord("i")).any(axis=1), 2] = -np.inf
        return {"scores": rows}

    with ServingLoop([engine], WORK, BatchLimits()) as loop:
        futures = [loop.ask(text) for text in ("ab", "ay", "ai", "cd")]
        with pytest.raises(NotANumberError, match="'scores' holds NaN"):
            futures[1].result(10)
        assert futures[0].result(10).value.tolist() == [1, 1, 1]
        assert futures[2].result(10).value.tolist() == [1, 1, -np.inf]


def test_a_nan_that_spoils_its_whole_batch_fails_only_its_own_request():
    """As where a layer quantizes its activations by one scale for the whole batch."""
    gate = threading.Event()

    def engine(feeds):
        gate.wait(10)
        sums = feeds["ids"].sum(axis=1).astype(np.float64)
        return {"sum": sums * np.nan if (feeds["ids"] == ord("y")).any() else sums}

    with ServingLoop([engine], WORK, BatchLimits(token_budget=1000)) as loop:
        first = loop.ask("ab")
        while loop.batcher.free_lanes:
            time.sleep(0.001)
        futures = {text: loop.ask(text) for text in ("abc", "abd", "aby", "abe", "abf", "abg")}
        while loop.batcher.ready_count < 6:
            time.sleep(0.001)
        gate.set()
        first.result(10)
        for text, future in futures.items():
            if "y" in text:
                assert isinstance(future.exception(10), NotANumberError)
            else:
                assert future.result(10).value == answer_of(text)
                assert future.result().batch_size == 6


def test_a_long_max_wait_costs_nothing_at_low_load():
    limits = BatchLimits(max_wait_s=0.05)
    with ServingLoop([Summing(0.001)] * 2, WORK, limits) as loop:
        waits = []
        for text in texts(40, seed=6):
            waits.append(loop.ask(text).result(10).times.queue_s)
            time.sleep(0.004)
    assert np.median(waits) < 0.01


@given(
    st.lists(
        st.tuples(
            st.floats(0, 0.05), st.integers(1, 60), st.sampled_from("abc"), st.booleans(),
            st.none() | st.floats(0, 0.05), st.none() | st.floats(0, 0.03),
        ),
        max_size=60,
    ),
    st.builds(
        BatchLimits,
        token_budget=st.integers(1, 200),
        queue=st.integers(1, 20),
        lanes=st.integers(1, 3),
        max_wait_s=st.sampled_from([0.0, 0.004]),
        fixed_size=st.none() | st.integers(1, 5),
        odd_lane=st.booleans(),
        ageing_s=st.sampled_from([0.0, 0.01]),
    ),
)  # fmt: skip
@hypothesis_settings(max_examples=150, deadline=None)
def test_whatever_is_asked_each_request_has_one_end_and_every_lane_is_free_after(drawn, limits):
    asked = [
        Asked(
            at_s, [1] * tokens, tenant, Priority(int(low)),
            None if deadline is None else at_s + deadline,
            None if cancel is None else at_s + cancel,
        )
        for at_s, tokens, tenant, low, deadline, cancel in drawn
    ]  # fmt: skip
    batcher = Batcher(limits)
    play(batcher, asked)
    assert all(len(one.ends) == 1 for one in asked)
    assert all(one.ends[0][2] == one.right for one in asked if one.what == "ok")
    assert (batcher.queued, batcher.free_lanes) == (0, limits.lanes)
    assert not batcher._holdings._counts
