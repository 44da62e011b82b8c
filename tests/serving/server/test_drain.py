"""``qbench serve`` as a process: what it prints, and SIGTERM under load."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import JSON, request

from qbench.graph.model import save_graph
from qbench.testing.graphs import tiny_encoder

LIGHT = ["--lanes", "1", "--token-budget", "256"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("process")
    save_graph(tiny_encoder(), found / "engine.onnx")
    (found / "tokenizer.py").write_text(
        "def tokenize(texts):\n    return [[len(w) for w in t.split()] for t in texts]\n"
    )
    return found


class Process:
    """A running ``qbench serve``."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "qbench.cli.main", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.popen.stdout is not None
        self.first = self.popen.stdout.readline()
        self.port = int(re.findall(r"(?:\"port\": |:)(\d+)", self.first)[-1])

    def get(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", path)
        status = connection.getresponse().status
        connection.close()
        return status

    def wait_ready(self) -> None:
        until_s = time.monotonic() + 60
        while self.get("/v2/health/ready") != 200:
            assert time.monotonic() < until_s
            time.sleep(0.05)

    def end(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> tuple[int, str, str]:
        """Return exit code, standard output and standard error after a signal."""
        self.popen.send_signal(number)
        out, err = self.popen.communicate(timeout=seconds)
        return self.popen.returncode, out, err


@pytest.fixture
def process(folder: Path) -> Iterator[Process]:
    one = Process(folder, "engine.onnx", "--port", "0", "--json", *LIGHT)
    yield one
    one.popen.kill()
    one.popen.wait()
    for stream in (one.popen.stdout, one.popen.stderr):
        assert stream is not None
        stream.close()


def test_under_load_nothing_that_was_taken_is_lost(process: Process) -> None:
    process.wait_ready()
    told: Counter[str] = Counter()
    lock, stop = threading.Lock(), threading.Event()
    body = json.dumps(request([[5, 6, 7, 8] * 8] * 4)).encode()
    path = f"/v2/models/{json.loads(process.first)['model']}/infer"

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", process.port, timeout=20)
        while not stop.is_set():
            sent = False
            try:
                connection.request("POST", path, body, JSON)
                sent = True
                answer = connection.getresponse()
                content = json.loads(answer.read())
                whole = answer.status != 200 or len(content["outputs"][0]["data"]) == 4 * 32
                what = str(answer.status) if whole else "torn"
            except (ConnectionRefusedError, http.client.RemoteDisconnected, BrokenPipeError):
                what = "closed"  # an idle connection, or none: nothing was taken
            except (http.client.HTTPException, OSError) as error:
                what = f"lost: {type(error).__name__}" if sent else "closed"
            with lock:
                told[what] += 1
            if what in ("503", "closed"):
                return

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.7)
    began_s = time.monotonic()
    code, out, err = process.end()
    took_s = time.monotonic() - began_s
    stop.set()
    for thread in threads:
        thread.join()
    assert code == 0, err
    assert took_s < 10
    assert set(told) <= {"200", "503", "closed"}, told
    assert told["200"] > 8 and told["503"]
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["ready", "ended"]
    assert events[-1] == {"event": "ended", "served": True, "exit_code": 0}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_further_signals_change_nothing(process: Process, number: int) -> None:
    process.wait_ready()
    until_s = time.monotonic() + 20
    while process.popen.poll() is None and time.monotonic() < until_s:
        process.popen.send_signal(number)
        time.sleep(0.002)
    assert process.popen.returncode == 0


def test_who_started_it_may_stop_listening(process: Process) -> None:
    assert process.popen.stdout is not None
    process.popen.stdout.close()
    process.wait_ready()
    time.sleep(0.2)
    assert process.get("/v2/health/ready") == 200
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(20) == 0


def test_a_signal_during_warm_up_ends_it_too(folder: Path) -> None:
    one = Process(folder, "engine.onnx", "--port", "0")
    assert one.get("/v2/health/live") == 200
    began_s = time.monotonic()
    code, out, err = one.end()
    assert code == 0, err
    assert not err and out == "ended: every request was answered\n"
    assert time.monotonic() - began_s < 4


def test_ctrl_c_ends_it_and_people_can_read_what_it_says(folder: Path) -> None:
    one = Process(
        folder, str(folder), "--port", "0", "--tokenizer", "tokenizer.py:tokenize", *LIGHT
    )
    assert re.fullmatch(r"listening on http://127\.0\.0\.1:\d+, model \S+\n", one.first)
    one.wait_ready()
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=10)
    connection.request("POST", "/text", b'{"text": "some words"}', JSON)
    assert json.loads(connection.getresponse().read())["answers"][0]["tokens"] == 2
    connection.close()
    code, out, err = one.end(signal.SIGINT)
    assert code == 0, err
    assert out.splitlines()[0].startswith("ready: 1 lanes of 1 threads")
    assert out.splitlines()[-1] == "ended: every request was answered"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.onnx"], "does not exist"),
        (["tokenizer.py"], "ONNX"),
        (["engine.onnx", "--engine", "int8"], "is no run"),
        (["engine.onnx", "--max-length", "65"], "at most 64"),
        (["engine.onnx", "--port", "70000"], "--port"),
        (["engine.onnx", "--host", "203.0.113.7"], "cannot listen"),
        (["engine.onnx", "--too-long", "shrink"], "--too-long"),
        (["engine.onnx", "--sla-ms", "0"], "--sla-ms"),
        (["engine.onnx", "--tenant", "a"], "NAME=WEIGHT"),
        (["engine.onnx", "--name", "a/b"], "--name"),
        (["engine.onnx", "--name", ".."], "no '.' in front"),
        (["engine.onnx", "--max-length", "9999999999"], "--max-length"),
        (["engine.onnx", "--max-wait-ms", "nan"], "--max-wait-ms"),
        (["engine.onnx", "--drain-seconds", "nan"], "--drain-seconds"),
        (["engine.onnx", "--drain-seconds", "inf"], "--drain-seconds"),
        (["engine.onnx", "--header-timeout", "1e300"], "--header-timeout"),
        (["engine.onnx", "--body-timeout", "nan"], "--body-timeout"),
        (["engine.onnx", "--texts", "missing.txt"], "--texts"),
        (["engine.onnx", "--breaker-p99-ms", "5"], "--fallback"),
        (["engine.onnx", "--default-answer", "missing.json"], "--default-answer"),
        (["plan.yaml"], "does not exist"),
    ],
)
def test_bad_input_is_one_clear_error(
    folder: Path, arguments: list[str], words: str, monkeypatch, capsys
) -> None:
    from qbench.cli.main import run_command_line

    monkeypatch.chdir(folder)
    assert run_command_line(["serve", "--port", "0", *arguments]) == 2
    told = capsys.readouterr()
    assert words in told.err and told.err.startswith("error: ") and not told.out


def test_a_port_that_is_taken_is_told(folder: Path, monkeypatch, capsys) -> None:
    from qbench.cli.main import run_command_line
    from qbench.serving.server.host import listen

    monkeypatch.chdir(folder)
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert run_command_line(["serve", "engine.onnx", "--port", port]) == 2
    assert "cannot listen" in capsys.readouterr().err
