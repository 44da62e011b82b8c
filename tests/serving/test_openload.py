from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from serving_fakes import Summing, answer_of, encode, pad, texts

from qbench.errors import ConfigError, MeasurementError
from qbench.serving.arrivals import Arrivals, Process
from qbench.serving.batcher import BatchLimits
from qbench.serving.load import ClosedLoop, drive, latencies
from qbench.serving.openload import OpenLoop, drive_open
from qbench.serving.remote import HttpTarget
from qbench.serving.request import Work
from qbench.serving.service import Service
from qbench.serving.targets import Reply, ServiceTarget

WORK = Work(pad, encode)


class Stalling(Summing):
    """An engine that answers at once but for a stall in the middle of each second."""

    def __init__(self, stall_s: float) -> None:
        super().__init__()
        self.stall_s, self.start_s, self.stalls = stall_s, time.perf_counter(), 0

    def __call__(self, feeds):
        if time.perf_counter() - self.start_s > self.stalls + 0.5:
            self.stalls += 1
            time.sleep(self.stall_s)
        return super().__call__(feeds)


def test_a_stall_is_charged_to_the_server():
    """Half a second of each second is a stall: half of all users wait, P50 and up show it.

    One client that waits for its answer before it sends the next request is held up once in
    each second and sees a stall in one latency of hundreds: coordinated omission.
    """
    with Service([Stalling(0.5)], WORK, BatchLimits(queue=10_000)) as service:
        load = OpenLoop(Arrivals(200.0, Process.CONSTANT), measure_s=2.0, warmup_s=0.2)
        opened = drive_open(ServiceTarget(service), texts(50), load)
    with Service([Stalling(0.5)], WORK, BatchLimits()) as service:
        closed = drive(service.loop, texts(50), ClosedLoop(1, measure_s=2.0, warmup_s=0.2))
    blind = [one.total_ms for one in latencies(closed, "e", 0, 0.0) if not one.warmup]
    assert opened.percentile(90).value > 250
    assert opened.percentile(99).value > 400
    assert np.percentile(blind, 90) < 50
    assert opened.statuses == {"ok": len(opened.measured)}
    assert opened.within(100.0) < 0.75


def test_latency_counts_from_the_intended_time_even_where_sending_is_late():
    class Blocking:
        """A target whose send itself blocks, as a client that waits for a connection does."""

        def send(self, payload, settled):
            time.sleep(0.02)
            settled(Reply("ok"))

    load = OpenLoop(Arrivals(100.0, Process.CONSTANT), measure_s=0.5, warmup_s=0.0)
    result = drive_open(Blocking(), ["a"], load)
    assert result.sent[-1].lag_s > 0.3
    assert result.sent[-1].latency_s > 0.3
    assert result.lag_p99_s > 0.3


def test_every_request_is_kept_and_warm_up_is_marked():
    replies: list[tuple[int, float]] = []
    asked = texts(40)
    with Service([Summing(0.001)] * 2, WORK, BatchLimits()) as service:
        load = OpenLoop(Arrivals(300.0), measure_s=0.6, warmup_s=0.3, seed=5)
        result = drive_open(
            ServiceTarget(service), asked, load,
            lambda index, reply: replies.append((index, reply.value)),
        )  # fmt: skip
    assert all(value == answer_of(asked[index]) for index, value in replies)
    assert len(replies) == len(result.sent)
    warm = [one for one in result.sent if one.warmup]
    assert all(one.intended_s < 0.3 for one in warm) and len(warm) > 40
    assert result.offered_rps == pytest.approx(300, rel=0.25)
    assert result.goodput_rps == pytest.approx(result.offered_rps)
    assert result.stopped == "time" and result.measured_s == pytest.approx(0.6)
    found = result.percentile(95)
    assert found.low <= found.value <= found.high
    intended = [one.intended_s for one in result.sent]
    assert intended == sorted(intended)


def test_it_stops_when_the_interval_is_narrow():
    with Service([Summing(0.004)] * 2, WORK, BatchLimits()) as service:
        load = OpenLoop(Arrivals(100.0), measure_s=60.0, warmup_s=0.2, width=0.9, percent=50)
        started_s = time.perf_counter()
        result = drive_open(ServiceTarget(service), texts(20), load)
    assert result.stopped == "width"
    assert time.perf_counter() - started_s < 30
    found = result.percentile(50)
    assert found.high - found.low <= 1.2 * found.value


def test_refusals_failures_and_lost_requests_count_against_the_promise():
    def exchange(payload):
        if payload == "fail":
            raise OSError("connection reset")
        if payload == "lose":
            time.sleep(2)
        return payload

    target = HttpTarget(exchange, connections=32)
    load = OpenLoop(Arrivals(100.0, Process.CONSTANT), 0.3, 0.0, drain_s=0.2)
    result = drive_open(target, ["fail", "lose", "ok", "ok"], load)
    target.close()  # the late answers have come by now, and change nothing
    assert set(result.statuses) == {"ok", "failed", "lost"}
    assert result.within(1e6) == pytest.approx(0.5, abs=0.1)
    failed = next(one for one in result.sent if one.status == "failed")
    assert failed.error == "OSError: connection reset"
    assert [one for one in result.sent if one.status == "lost"][0].latency_s == float("inf")


def test_http_and_service_are_driven_alike():
    """The same load on a target that answers from threads; its requests overlap."""
    inside, most, lock = 0, 0, threading.Lock()

    def exchange(payload):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.02)
        with lock:
            inside -= 1
        return payload

    target = HttpTarget(exchange, connections=8)
    result = drive_open(target, [1, 2, 3], OpenLoop(Arrivals(150.0), 0.5, 0.1))
    target.close()
    assert result.statuses == {"ok": len(result.measured)}
    assert 2 <= most <= 8


@pytest.mark.parametrize(
    ("bad", "name"),
    [({"measure_s": 0}, "measure_s"), ({"warmup_s": -1}, "warmup_s"), ({"width": 1.0}, "width")],
)
def test_loads_that_measure_nothing_are_refused(bad, name):
    with pytest.raises(ConfigError, match=name):
        OpenLoop(Arrivals(1.0), **bad)


def test_nothing_to_send_and_nothing_due_are_errors():
    with pytest.raises(ConfigError, match="no payloads"):
        drive_open(HttpTarget(str), [], OpenLoop(Arrivals(1.0)))
    with pytest.raises(MeasurementError, match="no request was due"):
        drive_open(
            HttpTarget(str), ["a"],
            OpenLoop(Arrivals(0.001, Process.CONSTANT), measure_s=0.05, warmup_s=0.01),
        )  # fmt: skip
