"""The plans' benchmark on a tiny embedder: rows of every kind, the folded probe, its words."""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qbench import judging, pipeline
from qbench.config import make_config
from qbench.runtime.ort import open_session
from qbench.testing.models import WORDS, bert_folder, pairs_csv
from qbench.workbench import Workbench

FOLDER = Path(__file__).parents[2] / "benchmarks"
KEYS = {
    "name", "kind", "task", "bytes", "throughput_ratio", "throughput_interval", "metric", "drop",
    "drop_low", "drop_high", "n", "flip_rate",
}  # fmt: skip
#: The package that each engine needs beside those of every test.
PEERS = {
    "modelopt-int4-int8": "modelopt",
    "nncf-onnx": "nncf",
    "nncf-openvino": "openvino",
    "aimet-w8a8-fp16": "aimet_onnx",
    "autoround-autoscheme": "auto_round",
}


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def benchmark_module() -> ModuleType:
    return load("plan")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source archive of the shape that the package has, with made-up texts."""
    rng = np.random.default_rng(0)
    lines = []
    for number in range(800):
        words = rng.choice(WORDS, size=6)
        rating = 1.5 if words[0] < words[1] else -0.5
        lines.append(f"{number}\t{rating}\t{' '.join(words)}")
    path = tmp_path_factory.mktemp("archive") / "vaderSentiment-0.tar.gz"
    inner = packed({"hutto/tweets_GroundTruth.txt": "\r\n".join(lines).encode()})
    path.write_bytes(packed({"vader/additional_resources/hutto_ICWSM_2014.tar.gz": inner}))
    return path


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    folder = tmp_path_factory.mktemp("base")
    config = make_config(
        {
            "model": {
                "source": str(bert_folder(folder / "model", layers=1)),
                "normalize": True,
                "pooling": "mean",
            },
            "data": {
                "source": str(pairs_csv(folder / "pairs.csv")),
                "columns": {"query": "question", "answer": "reply"},
                "splits": {"calibration": 16, "sweep": 40},
                "prepared": str(folder / "data"),
            },
            "task": {"kind": "retrieval"},
            "sweep": {"remedies": 0, "formats": ["int8", "int8_dynamic", "w8a16", "w4a16"]},
            "plan": {"max_drop": "60 %", "levels": 2, "rounds": 0},
            "run": {"results": str(folder / "results"), "id": "base", "threads": 1},
        }
    )
    work = pipeline.start(config)
    yield work
    work.run.unlock()


def test_every_kind_of_engine_has_a_row(
    benchmark_module: ModuleType,
    base: Workbench,
    archive: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(benchmark_module, "TIMED", {1: 2, 8: 1})
    config, torch_model = benchmark_module.make_sentiment(base, tmp_path, archive, quick=True)
    work = pipeline.start(make_config(config.to_dict(), {"plan.max_drop": "60 %"}))
    table = benchmark_module.measure(work, "sentiment", torch_model, quick=True)
    work.run.unlock()
    rows = {row.name: row.to_json() for row in table.rows}
    assert all(set(row) == KEYS for row in rows.values())
    kinds = {row["kind"] for row in rows.values()}
    assert {"reference", "uniform", "peer"} <= kinds
    assert {"int8", "int8_dynamic", "w8a16", "quantize_dynamic", "quantize_static"} <= set(rows)
    first = rows["reference"]
    assert first["drop"] == 0 and first["flip_rate"] == 0
    assert first["throughput_ratio"] == {"1": 1.0, "8": 1.0}
    assert all(row["n"] == first["n"] and row["bytes"] > 0 for row in rows.values())
    missing = set(table.missing)
    expected = {"plan", "plan-latency", "modelopt-int8", "modelopt-autoquantize", *PEERS}
    assert missing <= expected
    for name in expected:
        assert (name in rows) != (name in missing)
    words = benchmark_module.shown(table)
    assert all(name in words for name in (*rows, *missing))
    check_beaten(benchmark_module, table)


def check_beaten(benchmark_module: ModuleType, table: object) -> None:
    """A row that is twice as fast and right everywhere beats one that is wrong everywhere."""
    first, judge = table.rows[0], table.judge  # type: ignore[attr-defined]
    fast = {size: times / 2 for size, times in first.times_ms.items()}
    right, wrong = np.ones_like(first.payload), np.zeros_like(first.payload)
    plan = replace(first, payload=wrong)
    beats = benchmark_module.beats
    assert beats(replace(first, times_ms=fast, payload=right), plan, judge) == ["1", "8"]
    assert beats(replace(first, payload=right), plan, judge) == []
    assert beats(replace(first, times_ms=fast, payload=wrong), plan, judge) == []


def test_the_probe_is_folded_in(base: Workbench, tmp_path: Path) -> None:
    sentiment = load("plan_sentiment")
    rng = np.random.default_rng(1)
    width = 32
    weight, bias = rng.normal(size=(width, 2)), rng.normal(size=2)
    probe = sentiment.Probe(weight.astype(np.float32), bias.astype(np.float32))
    sentiment.write_classifier(base.model, probe, tmp_path / "probe.onnx")
    feeds = base.batches("calibration")[0].feeds
    with open_session(base.model.path, base.settings) as session:
        vectors = session.run(feeds)[base.model.output]
    with open_session(tmp_path / "probe.onnx", base.settings) as session:
        logits = session.run(feeds)["logits"]
    np.testing.assert_allclose(logits, vectors @ weight + bias, rtol=1e-4, atol=1e-5)


def test_ratings_of_zero_and_broken_lines_are_left_out() -> None:
    rows = load("plan_sentiment").parse_rated("1\t1.5\tgood\n2\t0\tneither\nbroken\n3\t-0.2\tbad\r")
    assert rows == [("good", 1.5), ("bad", -0.2)]


@pytest.fixture(scope="module")
def calibrated(base: Workbench) -> Workbench:
    pipeline.calibrate(base)
    return base


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_s_engine_answers_like_the_reference(
    benchmark_module: ModuleType,
    calibrated: Workbench,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    if importlib.util.find_spec(PEERS[name]) is None:
        pytest.skip(f"{PEERS[name]} is not installed")
    peers, engines = load("plan_peers"), load("plan_engines")
    torch_model = load("plan_torch").TorchModel(calibrated.config.model.source)
    clips = judging.clips_of(calibrated, calibrated.run.read_ranges())
    ways = peers.peer_ways(calibrated, torch_model, clips)
    built, missing = peers.build_each({name: ways[name]})
    assert built == [name], missing
    assert engines.is_openvino(calibrated, name) == (name == "nncf-openvino")
    assert engines.bytes_of(calibrated, name) > 0
    reference = engines.outputs_of(calibrated, "reference", "sweep")
    own = engines.outputs_of(calibrated, name, "sweep")
    assert own.shape == reference.shape
    assert np.median((own * reference).sum(axis=1)) > 0.9
    assert not np.array_equal(own, reference)
    times = benchmark_module.time_size(calibrated, ["reference", name], 8, 2, 3)
    assert {key: value.shape for key, value in times.items()} == {
        "reference": (3, 2),
        name: (3, 2),
    }


def test_an_engine_that_does_not_load_is_no_row(calibrated: Workbench) -> None:
    peers, engines = load("plan_peers"), load("plan_engines")

    def write() -> None:
        engines.engine_file(calibrated, "broken").write_bytes(b"no graph")

    built, missing = peers.build_each({"broken": peers.then_run(calibrated, "broken", write)})
    assert built == [] and "MeasurementError" in missing["broken"]


def test_a_share_is_told_of_the_fastest_engine_and_of_the_fastest_of_onnx_runtime(
    benchmark_module: ModuleType,
) -> None:
    def row(name: str, time_ms: float) -> Any:
        times = {1: np.full((3, 5), time_ms)}
        ratio = {1: benchmark_module.throughput(np.full((3, 5), 4.0), times[1])}
        return SimpleNamespace(name=name, times_ms=times, throughput=ratio)

    plan, dynamic, elsewhere = row("plan", 2.1), row("int8_dynamic", 2.0), row("nncf-openvino", 1.0)
    told = benchmark_module.reached(plan, [dynamic, elsewhere])
    assert len(told) == 2
    assert "0.476" in told[0] and "(nncf-openvino); 0.95 missed" in told[0]
    assert "0.952" in told[1] and "of ONNX Runtime (int8_dynamic); 0.95 reached" in told[1]
    assert len(benchmark_module.reached(plan, [dynamic])) == 1


def test_one_tool_that_fails_does_not_end_the_others() -> None:
    def fail() -> None:
        raise RuntimeError("no such thing\nand more")

    def fail_without_words() -> None:
        raise ValueError

    ways = {"a": fail, "b": lambda: None, "c": fail_without_words}
    built, missing = load("plan_peers").build_each(ways)
    assert built == ["b"]
    assert missing == {"a": "RuntimeError: no such thing", "c": "ValueError: no words"}
