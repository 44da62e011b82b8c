from __future__ import annotations

import json
from dataclasses import replace

import pytest
from serving_fakes import Summing, encode, pad, texts

from qbench.errors import InputError
from qbench.serving.baseline import (
    KEYS,
    UnlikeError,
    baseline_of,
    check_writable,
    compare,
    read_baseline,
    write_baseline,
)
from qbench.serving.bench import BenchSettings, Engine, Workload, bench

FACTS = {"versions": {"onnxruntime": "1.31.1"}, "machine": {"cpu": "x", "cores": 2}}


@pytest.fixture(scope="module")
def record():
    engine = Engine("reference", lambda threads: Summing(0.001))
    how = BenchSettings(clients=2, rounds=2, seconds=0.15, warmup_s=0.05, lanes=1)
    run = bench([engine], Workload(texts(20), pad, encode), how, conditions={"model_sha256": "abc"})
    return baseline_of(run, FACTS)


def test_a_record_survives_its_file_and_is_equal_to_itself(record, tmp_path):
    path = tmp_path / "new" / "baseline.json"
    write_baseline(path, record)
    differences = compare(read_baseline(path), record)
    assert {one.number for one in differences} >= {"throughput_rps", "p99_ms"}
    assert all(one.ratio == 1.0 for one in differences)


def with_condition(record, key, value):
    return replace(record, conditions={**record.conditions, key: value})


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("model_sha256", "other", "model_sha256 was 'abc' and is 'other'"),
        (
            "versions",
            {"onnxruntime": "1.32.0"},
            "versions.onnxruntime was '1.31.1' and is '1.32.0'",
        ),
        ("machine", {"cpu": "y", "cores": 2}, "machine.cpu was 'x' and is 'y'"),
        ("threads_per_lane", 4, "threads_per_lane was 1 and is 4"),
        ("lengths", {"max": 512.0}, "lengths."),
        ("clients", 50, "clients was 2 and is 50"),
        ("warmup_s", 9.0, "warmup_s was 0.05 and is 9.0"),
    ],
)
def test_unlike_records_are_refused_by_the_key(record, key, value, named):
    with pytest.raises(UnlikeError, match="not compared") as caught:
        compare(record, with_condition(record, key, value))
    assert named in str(caught.value)


@pytest.mark.parametrize("key", KEYS)
def test_each_condition_counts_changed_or_gone(record, key):
    with pytest.raises(UnlikeError, match=f"{key} was 'other'"):
        compare(with_condition(record, key, "other"), record)
    conditions = {name: value for name, value in record.conditions.items() if name != key}
    with pytest.raises(UnlikeError, match=f"does not tell its {key}"):
        compare(replace(record, conditions=conditions), record)


@pytest.mark.parametrize(
    "damage",
    [
        {"conditions": None}, {"conditions": [1]}, {"engines": None}, {"engines": [1]},
        {"engines": {"reference": {"p50_ms": 1.0}}},
        {"engines": {"reference": dict.fromkeys(
            ("throughput_rps", "p50_ms", "p95_ms", "p99_ms", "cpu_ms_per_request"), "x")}},
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_error(record, tmp_path, damage):
    path = tmp_path / "baseline.json"
    write_baseline(path, record)
    content = json.loads(path.read_text()) | damage
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="is damaged"):
        read_baseline(path)


def test_a_place_that_cannot_be_written_is_told_before(tmp_path):
    check_writable(tmp_path / "new" / "baseline.json")
    with pytest.raises(InputError, match="cannot be written"):
        check_writable(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        check_writable(tmp_path / "file" / "baseline.json")


def test_records_without_an_engine_in_common_are_refused(record):
    other = replace(record, engines={"plan": record.engines["reference"]})
    with pytest.raises(UnlikeError, match="no engine is in both"):
        compare(record, other)


def test_a_missing_file_and_another_file_are_told(tmp_path):
    with pytest.raises(InputError, match="--save-baseline"):
        read_baseline(tmp_path / "none.json")
    path = tmp_path / "other.json"
    path.write_text('{"qbench": 1, "kind": "plan"}')
    with pytest.raises(InputError, match="holds no baseline"):
        read_baseline(path)


def test_a_file_that_cannot_be_written_is_an_error(record, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_baseline(tmp_path / "file" / "baseline.json", record)
