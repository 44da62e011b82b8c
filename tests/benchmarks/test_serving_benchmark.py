"""The serving benchmark on a tiny model: its clients, servers, ceiling, checks and rows."""

from __future__ import annotations

import http.server
import importlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from qbench import judging, pipeline
from qbench.config import make_config
from qbench.serving.bench import Engine, Workload
from qbench.testing import triton_backend
from qbench.testing.models import bert_folder, pairs_csv
from qbench.workbench import Workbench

FOLDER = Path(__file__).parents[2] / "benchmarks"
ROW = [
    "name", "kind", "lengths", "engine", "req_s", "p50_ms", "p95_ms", "p99_ms", "cpu_ms", "rss_mb",
]  # fmt: skip

pytest.importorskip("httptools", reason="needs the extra 'serve'")


@pytest.fixture(scope="module")
def serving() -> Iterator[ModuleType]:
    """Return the benchmark; its parts lie beside it."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("serving")
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    place = tmp_path_factory.mktemp("serving")
    bert_folder(place / "model")
    pairs_csv(place / "pairs.csv")
    config = {
        "model": {"source": str(place / "model"), "pooling": "mean", "normalize": True},
        "data": {
            "source": str(place / "pairs.csv"),
            "name": "pairs",
            "columns": {"query": "question", "answer": "reply"},
            "splits": {"calibration": 16, "sweep": 40, "verification": "rest"},
            "prepared": str(place / "calib_data"),
        },
        "task": {"kind": "retrieval"},
        "run": {"results": str(place / "results"), "id": "tiny", "threads": 1},
    }
    return pipeline.start(make_config(config, {}))


@pytest.fixture(scope="module")
def workload(serving: ModuleType, work: Workbench) -> Workload:
    inputs = [one.name for one in work.model.inputs]
    ids = serving.draw_requests(work, 8, 24, seed=0)
    return Workload([serving.encode_ids(one, inputs) for one in ids], judging.padder(work))


@pytest.fixture(scope="module")
def reference(work: Workbench) -> Engine:
    return judging.serve_with(work, judging.REFERENCE)


def test_requests_have_the_lengths_asked_for_and_come_again(
    serving: ModuleType, work: Workbench
) -> None:
    one, other = (serving.draw_requests(work, 8, 24, seed=3) for _ in range(2))
    assert all((a == b).all() for a, b in zip(one, other, strict=True))
    lengths = Counter(map(len, one))
    assert set(lengths) == set(range(8, 25))


def test_direct_runs_tell_how_far_compositions_are_apart(
    serving: ModuleType, work: Workbench, workload: Workload, reference: Engine
) -> None:
    mixed = serving.build_mixed(work)
    assert mixed.is_file()
    encoded = workload.encoded()[:12]
    spreads = {}
    for name in (judging.REFERENCE, "mixed"):
        run = judging.serve_with(work, name).open_lane(1)
        alone, spreads[name] = serving.composition_spread(run, workload.pad, encoded)
        assert alone.shape == (12, 32)
    assert spreads[judging.REFERENCE] < 1e-5 < spreads["mixed"] < 0.1


def test_answers_too_far_from_direct_runs_end_the_run(serving: ModuleType) -> None:
    taken = serving.Slice(answers={0: np.array([1.0, 0.0]), 1: np.array([0.0, 1.5])})
    alone = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert serving.check_answers("one", taken, alone, 0.6) == 0.5
    with pytest.raises(SystemExit, match="answers are 0.5 from direct runs"):
        serving.check_answers("one", taken, alone, 0.4)
    with pytest.raises(SystemExit, match="no answer"):
        serving.check_answers("one", serving.Slice(), alone, 1.0)


def test_the_ceiling_runs_every_request_once_in_sorted_batches(
    serving: ModuleType, workload: Workload, reference: Engine
) -> None:
    batcher = importlib.import_module("serving_batcher")
    batches = batcher.sorted_batches(workload.pad, workload.encoded(), 64)
    assert sum(count for _, count in batches) == len(workload.requests)
    shapes = [feeds["input_ids"].shape for feeds, _ in batches]
    assert all(batch == 1 or batch * length <= 64 for batch, length in shapes)
    assert [length for _, length in shapes] == sorted(length for _, length in shapes)
    offline = batcher.Offline(reference, workload, (2, 1))
    offline.tune(0.05)
    assert offline.budget in batcher.BUDGETS
    assert offline.rate(0.1) > 0


def test_the_batcher_itself_is_measured_without_an_engine(
    serving: ModuleType, work: Workbench, workload: Workload
) -> None:
    batcher = importlib.import_module("serving_batcher")
    engine = Engine("none", lambda threads: dict, inputs=work.model.inputs)
    assert 1 < batcher.overhead_us(engine, workload, clients=8, tries=1) < 5000


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers with the ids as floats; refuses the id 13."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        ids = json.loads(body)["ids"]
        given = np.array(ids, np.float32).tobytes()
        self.send_response(500 if 13 in ids else 200)
        self.send_header("Content-Length", str(len(given)))
        self.end_headers()
        self.wfile.write(given)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class Quiet(http.server.ThreadingHTTPServer):
    """Says nothing where a client goes away."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing."""


@pytest.fixture
def echo() -> Iterator[int]:
    server = Quiet(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def test_clients_count_and_keep_answers_and_say_what_failed(serving: ModuleType, echo: int) -> None:
    client = importlib.import_module("serving_client")
    ids = [np.array([place, 7]) for place in range(10)]
    taken = client.drive_http(echo, client.plain_wire(), ids, client.Load(4, 0.1, 0.3, keep=3))
    assert {at: got.tolist() for at, got in taken.answers.items()} == {
        at: [at, 7] for at in range(3)
    }
    assert taken.rate == pytest.approx(
        sum(taken.from_s <= end < taken.end_s for _, end in taken.spans)
        / (taken.end_s - taken.from_s)
    )
    assert min(taken.latencies_ms) > 0 and len(taken.marks) == 2
    with pytest.raises(RuntimeError, match="the server answered 500"):
        client.drive_http(echo, client.plain_wire(), [np.array([13])], client.Load(2, 0.1, 0.2))


def test_each_server_is_tuned_over_its_own_grid(serving: ModuleType) -> None:
    peers = importlib.import_module("serving_peers")
    by_name = {peer.name: peer for peer in peers.PEERS}
    floor, lit = by_name[serving.FLOOR], by_name["LitServe"]
    triton = by_name["Triton's scheduler, Python backend"]
    assert floor.kind == "floor" and {one.batch for one in floor.settings(False)} == {1}
    assert {one.batch for one in lit.settings(False)} == {1, 2, 4, 8, 16}
    assert any(one.ragged for one in triton.settings(False))
    assert not any(one.ragged for peer in (floor, lit) for one in peer.settings(False))
    assert len(lit.settings(True)) < len(lit.settings(False))
    absent = peers.Peer("absent", "peer", "x", needs=("no_such_package",))
    assert absent.missing() == "no_such_package is not installed"


def test_a_ragged_repository_says_so_for_every_input(
    serving: ModuleType, work: Workbench, tmp_path: Path
) -> None:
    pytest.importorskip("tritonclient", reason="needs the extra 'triton'")
    from google.protobuf import text_format

    from qbench.engine.tritonconfig import model_config_messages

    peers = importlib.import_module("serving_peers")
    for ragged in (False, True):
        folder = tmp_path / str(ragged)
        peers.write_triton(work.model.path, peers.Setting(2, 1, 8, ragged), folder)
        text = (folder / "model" / "config.pbtxt").read_text()
        config = text_format.Parse(text, model_config_messages().ModelConfig())
        assert [one.allow_ragged_batch for one in config.input] == [ragged] * 3
        assert config.max_batch_size == 8 and config.instance_group[0].count == 2


def test_ragged_requests_are_padded_with_zeros() -> None:
    rows = [np.array([[1, 2, 3]]), np.array([[4], [5]])]
    assert triton_backend._joined(rows).tolist() == [[1, 2, 3], [4, 0, 0], [5, 0, 0]]
    even = [np.array([[1, 2]]), np.array([[3, 4]])]
    assert triton_backend._joined(even).tolist() == [[1, 2], [3, 4]]


def test_a_peer_that_fails_is_left_out_and_what_is_ours_is_not(serving: ModuleType) -> None:
    bench = object.__new__(serving.Bench)
    bench.skipped, bench.lengths = {}, "8-24"
    bench.measured = {
        name: serving.Measured([10.0], [1.0], 0.1, 1.0, 50.0) for name in ("peer", "ours")
    }
    peers = [serving.Peer(kind, kind, "x") for kind in ("peer", "ours")]
    with bench._sparing(peers[0]):
        raise RuntimeError("the server closed a connection")
    with pytest.raises(RuntimeError, match="of ours"), bench._sparing(peers[1]):
        raise RuntimeError("of ours")
    assert bench.skipped == {"peer": "the server closed a connection"}
    assert [row["name"] for row in bench.rows(peers)] == ["ours"]


@pytest.mark.slow
def test_servers_take_turns_and_every_row_is_whole(
    serving: ModuleType, work: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("uvicorn", reason="needs the extra 'serve'")
    absent = serving.Peer("absent", "peer", "x", needs=("no_such_package",))
    kept = [peer for peer in serving.PEERS if peer.name in ("qbench serve", "qbench serve, mixed")]
    kept += [peer for peer in serving.PEERS if peer.app == "fastapi-ort" and not peer.missing()]
    broken = serving.Peer("broken", "peer", "no-such-app", batches=True)
    monkeypatch.setattr(serving, "PEERS", (*kept, absent, broken))
    monkeypatch.setattr(serving, "LENGTHS", {"8-24": (8, 24)})
    monkeypatch.setattr(serving, "CLIENTS", 8)
    monkeypatch.setattr(serving, "QUICK", serving.Timing(2, 0.4, 0.2, 0.2, 1.5))
    said = json.loads(json.dumps(serving.measure(work, quick=True)))
    assert [row["name"] for row in said["rows"]] == [peer.name for peer in kept]
    for row in said["rows"]:
        assert list(row)[: len(ROW)] == ROW
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
        assert row["req_s"] > 0 and row["cpu_ms"] > 0 and row["rss_mb"] > 10
    assert {row["engine"] for row in said["rows"]} == {"fp32", "mixed"}
    assert 0 < said["ceiling_ratio"] < 2 and said["overhead_us"] > 0
    assert set(said["skipped"]) == {"absent", "broken"}
    assert said["skipped"]["absent"] == "no_such_package is not installed"
    assert "invalid choice: 'no-such-app'" in said["skipped"]["broken"]
    about = said["by_lengths"]["8-24"]
    assert about["at_70"]["bound_ms"] > 5 and about["int8_spread"] > 0
    assert "skipped: absent" in serving.table(said)


def test_a_configuration_that_is_not_there_is_one_error(
    serving: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        serving.main(["--json", "--config", "nowhere.yaml"])
    out, told = capsys.readouterr()
    assert left.value.code == 2 and out == "" and "no such configuration file" in told
