from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from serving_fakes import Summing, encode, pad, texts

from qbench.errors import ConfigError, MeasurementError
from qbench.records import BenchRun, from_dict, to_dict
from qbench.serving.bench import BenchSettings, Engine, Workload, bench, cores

SHORT = BenchSettings(
    clients=8, rounds=3, seconds=0.25, warmup_s=0.05, token_budget=80, lanes=2, max_wait_ms=2.0
)


def engine(name: str, overhead_s: float) -> Engine:
    return Engine(name, lambda threads: Summing(overhead_s))


@pytest.fixture(scope="module")
def run() -> BenchRun:
    engines = [engine("reference", 0.012), engine("quick", 0.004)]
    return bench(engines, Workload(texts(60), pad, encode), SHORT, conditions={"model": "sum"})


def test_the_faster_engine_is_seen_to_be_faster(run):
    reference, quick = run.summaries
    assert (reference.engine, quick.engine) == ("reference", "quick")
    assert quick.speedup.value > 1.2
    assert quick.speedup.n == quick.throughput_rps.n == SHORT.rounds
    assert quick.p50_ms < reference.p50_ms
    assert reference.p50_ms <= reference.p95_ms <= reference.p99_ms
    assert quick.requests == sum(one.engine == "quick" and not one.warmup for one in run.latencies)
    assert quick.batch_sizes and sum(quick.batch_sizes.values()) == quick.requests
    assert quick.cpu_ms_per_request > 0


def test_slices_are_interleaved_and_do_not_overlap(run):
    slices = run.conditions["slices"]
    assert len(slices) == 6
    for round_index in range(3):
        pair = slices[2 * round_index : 2 * round_index + 2]
        assert {one["engine"] for one in pair} == {"reference", "quick"}
        assert {one["round"] for one in pair} == {round_index}
    ends = [one["end_s"] for one in slices]
    starts = [one["measured_from_s"] for one in slices]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_the_conditions_tell_how_it_was_measured(run):
    conditions = run.conditions
    expected = {
        "model": "sum", "clients": 8, "rounds": 3, "seconds": 0.25, "warmup_s": 0.05,
        "token_budget": 80, "token_budget_from": "settings", "max_wait_ms": 2.0, "queue": 256,
        "lanes": 2, "threads_per_lane": 1, "seed": 0, "load": "closed loop", "cores": cores(),
        "engines": ["reference", "quick"],
    }  # fmt: skip
    assert {key: conditions[key] for key in expected} == expected
    assert conditions["lengths"]["max"] <= 20
    assert sum(conditions["dispatches"]["quick"].values()) > 0


def test_a_run_survives_json(run):
    text = json.dumps(to_dict(run), allow_nan=False)
    assert from_dict(BenchRun, json.loads(text)).summaries == run.summaries


def test_engines_of_one_round_are_sent_the_same_texts():
    seen: dict[str, list[list[int]]] = {"a": [], "b": []}

    def remembering(name: str) -> Engine:
        def open_lane(threads: int):
            def run(feeds):
                seen[name] += [[code for code in row if code] for row in feeds["ids"].tolist()]
                return {"n": np.zeros(len(feeds["ids"]))}

            return run

        return Engine(name, open_lane)

    few = BenchSettings(
        clients=1, rounds=2, seconds=0.2, warmup_s=0.0, lanes=1, max_batch=1, seed=7
    )
    bench([remembering("a"), remembering("b")], Workload(texts(500), pad, encode), few)
    primed = 9  # three shapes, three times
    first, second = seen["a"][primed : primed + 10], seen["b"][primed : primed + 10]
    assert first == second


def test_lanes_are_opened_with_the_threads_that_the_settings_say():
    opened = []

    def open_lane(threads: int):
        opened.append(threads)
        return Summing()

    settings = BenchSettings(
        clients=2, rounds=2, seconds=0.15, warmup_s=0.0, lanes=3, threads_per_lane=2
    )
    bench([Engine("a", open_lane)], Workload(texts(10), pad, encode), settings)
    assert opened == [2, 2, 2]
    assert BenchSettings(threads_per_lane=cores()).lane_count == 1
    assert BenchSettings(threads_per_lane=1).lane_count == cores()


def test_a_budget_can_be_calibrated():
    settings = BenchSettings(
        clients=2, rounds=2, seconds=0.15, warmup_s=0.0, token_budget=None, lanes=1
    )
    result = bench([engine("a", 0.0002)], Workload(texts(10), pad, encode), settings)
    assert result.conditions["token_budget_from"] == "calibration"
    grid = result.conditions["token_budget_grid"]
    assert result.conditions["token_budget"] == grid["token_budget"] >= 64
    assert grid["grid"]


def test_a_failing_engine_stops_the_benchmark_with_the_reason():
    calls = 0

    def run(feeds):
        nonlocal calls
        calls += 1
        if calls > 30:
            raise OSError("device lost")
        return {"n": np.zeros(len(feeds["ids"]))}

    with pytest.raises(MeasurementError, match="'b'.*device lost"):
        bench(
            [engine("a", 0.001), Engine("b", lambda threads: run)],
            Workload(texts(10), pad, encode),
            SHORT,
        )


def test_whole_rounds_are_kept_where_it_is_stopped():
    engines, work = [engine("a", 0.0), engine("b", 0.0)], Workload(texts(20), pad, encode)
    short = replace(SHORT, rounds=4, seconds=0.05, warmup_s=0.0)
    for slices, kept in ((3, []), (5, [2])):
        stopped: list[BenchRun] = []

        def stop(done: int, total: int, at: int = slices) -> None:
            if done == at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            bench(engines, work, short, on_slice=stop, on_stopped=stopped.append)
        assert [one.summaries[0].throughput_rps.n for one in stopped] == kept
        assert all({late.round for late in one.latencies} == {0, 1} for one in stopped)


def test_progress_is_told():
    told = []
    settings = BenchSettings(clients=1, rounds=2, seconds=0.15, warmup_s=0.0, lanes=1)
    workload = Workload(encode(texts(10)), pad)
    bench(
        [engine("a", 0), engine("b", 0)], workload, settings, on_slice=lambda *at: told.append(at)
    )
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("engines", [[], [engine("a", 0), engine("a", 0)]])
def test_engines_need_different_names(engines):
    with pytest.raises(ConfigError, match="engines of different names"):
        bench(engines, Workload(texts(3), pad, encode), SHORT)


def test_requests_are_needed():
    with pytest.raises(ConfigError, match="0 requests"):
        bench([engine("a", 0)], Workload([], pad, encode), SHORT)


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"rounds": 1}, "rounds"), ({"clients": 0}, "clients"), ({"seconds": 0.0}, "seconds"),
        ({"token_budget": 0}, "token_budget"), ({"queue": 0}, "queue"), ({"lanes": 0}, "lanes"),
        ({"threads_per_lane": 0}, "threads_per_lane"), ({"max_wait_ms": -1.0}, "max_wait"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(bad, name):
    with pytest.raises(ConfigError, match=name):
        BenchSettings(**bad)
