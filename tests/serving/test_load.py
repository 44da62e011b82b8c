from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from serving_fakes import Summing, encode, pad, texts

from qbench.errors import ConfigError, MeasurementError
from qbench.serving.batcher import BatchLimits
from qbench.serving.load import ClosedLoop, draw_order, drive, latencies
from qbench.serving.loop import ServingLoop
from qbench.serving.request import STAGES, Work

WORK = Work(pad, encode)


def test_a_closed_loop_keeps_its_clients_busy_and_every_latency_raw():
    with ServingLoop([Summing(overhead_s=0.002)] * 2, WORK, BatchLimits()) as loop:
        result = drive(loop, texts(50), ClosedLoop(clients=4, measure_s=0.3, warmup_s=0.1))
    raw = latencies(result, "engine", 3, result.measured_from_s - 1.0)
    assert {one.engine for one in raw} == {"engine"}
    assert {one.round for one in raw} == {3}
    warm = [one for one in raw if one.warmup]
    measured = [one for one in raw if not one.warmup]
    assert warm and measured
    assert all(one.start_s < 1.0 for one in warm)
    assert all(one.start_s >= 1.0 for one in measured)
    assert 0.25 < result.end_s - result.measured_from_s < 2.0
    assert result.cpu_s > 0
    assert result.rejected == 0
    for one in raw:
        stages = sum(getattr(one, f"{stage}_ms") for stage in STAGES)
        assert stages == pytest.approx(one.total_ms, abs=1e-6)
    assert max(one.batch_size for one in raw) <= 4


def test_the_number_of_requests_on_their_way_never_exceeds_the_clients():
    inside, most, lock = 0, 0, threading.Lock()

    class Counting(ServingLoop):
        def submit(self, payload, done):
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)

            def count_out(answer):
                nonlocal inside
                with lock:
                    inside -= 1
                done(answer)

            return super().submit(payload, count_out)

    with Counting([Summing()] * 2, WORK, BatchLimits()) as loop:
        drive(loop, texts(20), ClosedLoop(clients=5, measure_s=0.1, warmup_s=0.0))
    assert most == 5
    assert inside == 0


def test_payloads_are_sent_in_the_given_order():
    seen = []

    def remember(group):
        seen.extend(group)
        return encode(group)

    asked = texts(30)
    with ServingLoop([Summing()], Work(pad, remember), BatchLimits()) as loop:
        drive(loop, asked, ClosedLoop(clients=1, measure_s=0.05, warmup_s=0.0))
    assert len(seen) >= 5
    assert seen == [asked[index % 30] for index in range(len(seen))]


def test_more_clients_than_the_queue_holds_are_refused_counted_and_try_again():
    limits = BatchLimits(queue=2, max_batch=1)
    with ServingLoop([Summing(overhead_s=0.003)], WORK, limits) as loop:
        result = drive(loop, texts(20), ClosedLoop(clients=8, measure_s=0.3, warmup_s=0.1))
    assert 0 < result.rejected <= loop.refused
    assert len(result.served) > 8


def test_a_failing_request_ends_the_load_with_its_reason():
    def engine(feeds):
        raise OSError("device lost")

    with (
        ServingLoop([engine], WORK, BatchLimits()) as loop,
        pytest.raises(MeasurementError, match="OSError: device lost"),
    ):
        started_s = time.perf_counter()
        drive(loop, texts(5), ClosedLoop(clients=3, measure_s=30.0))
    assert time.perf_counter() - started_s < 10


def test_a_closed_server_ends_the_load():
    loop = ServingLoop([Summing()], WORK, BatchLimits())
    loop.close()
    with pytest.raises(MeasurementError, match="closing"):
        drive(loop, texts(5), ClosedLoop(clients=3, measure_s=30.0))


def test_answers_that_stay_out_are_an_error_and_not_a_hang():
    engine = Summing()
    engine.gate.clear()
    with ServingLoop([engine], WORK, BatchLimits()) as loop:
        load = ClosedLoop(clients=2, measure_s=0.05, warmup_s=0.0, drain_s=0.1)
        with pytest.raises(MeasurementError, match="2 requests had no answer"):
            drive(loop, texts(5), load)
        engine.gate.set()


def test_the_order_is_a_seeded_permutation():
    first, again, other = (draw_order(50, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert sorted(first) == list(range(50))
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.parametrize(
    ("bad", "name"),
    [({"clients": 0}, "clients"), ({"measure_s": 0.0}, "seconds"), ({"warmup_s": -1.0}, "warmup")],
)
def test_a_load_that_measures_nothing_is_refused(bad, name):
    with pytest.raises(ConfigError, match=name):
        ClosedLoop(**bad)
