"""The servers of the serving benchmark: how each is started, and over what it is tuned."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from serving_client import Wire, plain_wire, protocol_wire

from qbench.engine.tritonconfig import TritonOptions, preferred_sizes
from qbench.errors import MissingDependencyError
from qbench.exporting import ExportRequest, export_triton
from qbench.servable import find_servable
from qbench.serving.bench import cores
from qbench.testing.tritonserver import find_server, running_triton

APPS = Path(__file__).with_name("serving_apps.py")
WAIT_MS = 5.0
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Setting:
    """How a server is set up: copies of the model, threads of each, requests of a batch."""

    instances: int = 1
    threads: int = 1
    batch: int = 1
    ragged: bool = False

    def __str__(self) -> str:
        words = f"{self.instances}x{self.threads}, batch {self.batch}"
        return f"{words}, ragged" if self.ragged else words


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready."""

    port: int
    pid: int
    wire: Wire


@dataclass(frozen=True, slots=True)
class Models:
    """What is served: files of both engines, the folder of the PyTorch model, input names."""

    fp32: Path
    mixed: Path
    torch: Path
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Peer:
    """A kind of server.

    Attributes:
        name: Its name in the table.
        kind: ``ours``, ``peer`` or ``floor``.
        app: What starts it.
        engine: ``fp32`` or ``mixed``.
        needs: Packages.
        arrangement: Instances and threads, where the row is about one; else they are tuned.
        batches: Whether it batches: the size is tuned then.
    """

    name: str
    kind: str
    app: str
    engine: str = "fp32"
    needs: tuple[str, ...] = ()
    arrangement: tuple[int, int] | None = None
    batches: bool = False

    def missing(self) -> str:
        """Return why it cannot run here; nothing where it can."""
        for package in self.needs:
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed"
        if self.app == "triton":
            try:
                find_server()
            except MissingDependencyError as error:
                return str(error)
        return ""

    def settings(self, quick: bool) -> list[Setting]:
        """Return what is tried."""
        if self.kind == "ours":
            return [Setting()]  # it calibrates itself
        many = cores()
        pairs = [self.arrangement] if self.arrangement else [(1, many), (many, 1)]
        pairs = pairs[-1:] if quick else list(dict.fromkeys(pairs))
        sizes: Sequence[int] = (1,)
        if self.batches:
            sizes = (1, 8) if quick else (1, 2, 4, 8, 16)
        found = [Setting(i, t, batch) for (i, t), batch in itertools.product(pairs, sizes)]
        if self.app == "triton":
            found += [Setting(s.instances, s.threads, s.batch, True) for s in found if s.batch > 1]
        return found


PEERS = (
    Peer("FastAPI + PyTorch", "floor", "fastapi-torch", needs=("fastapi", "uvicorn")),
    Peer(
        "FastAPI + ORT, one session",
        "peer",
        "fastapi-ort",
        needs=("fastapi", "uvicorn"),
        arrangement=(1, cores()),
    ),
    Peer(
        "FastAPI + ORT, one-thread workers",
        "peer",
        "fastapi-ort",
        needs=("fastapi", "uvicorn"),
        arrangement=(cores(), 1),
    ),
    Peer("LitServe", "peer", "litserve", needs=("litserve",), batches=True),
    Peer("Ray Serve", "peer", "ray", needs=("ray", "fastapi", "grpc"), batches=True),
    Peer(
        "Triton's scheduler, Python backend",
        "peer",
        "triton",
        needs=("tritonclient",),
        batches=True,
    ),
    Peer("qbench serve", "ours", "qbench", needs=("uvicorn", "starlette")),
    Peer("qbench serve, mixed", "ours", "qbench", "mixed", needs=("uvicorn", "starlette")),
)


@contextlib.contextmanager
def running(
    peer: Peer, setting: Setting, models: Models, longest: Sequence[int]
) -> Iterator[Running]:
    """Run a server until the block is left.

    Args:
        peer: What to run.
        setting: How.
        models: What it serves.
        longest: Lengths of requests like those to come, for servers that calibrate themselves.

    Raises:
        RuntimeError: If it is not ready within a minute; the end of what it said is told.
    """
    with tempfile.TemporaryDirectory(prefix="qbench-serving-") as made:
        folder = Path(made)
        if peer.app == "triton":
            write_triton(models.fp32, setting, folder / "models")
            with running_triton(folder / "models", folder) as server:
                yield Running(server.port, server.pid, protocol_wire("model", models.inputs))
        elif peer.app == "qbench":
            with _running_qbench(getattr(models, peer.engine), models, longest, folder) as found:
                yield found
        else:
            with _running_app(peer, setting, models, folder) as found:
                yield found


def write_triton(model: Path, setting: Setting, folder: Path) -> None:
    """Write a model repository; a ragged one lets requests of different lengths share a batch."""
    options = TritonOptions(
        "model",
        max_batch=setting.batch,
        preferred=preferred_sizes(setting.batch) if setting.batch > 1 else (),
        max_wait_ms=WAIT_MS if setting.batch > 1 else 0.0,
        instances=setting.instances,
        threads=setting.threads,
    )
    export_triton(find_servable(str(model)), ExportRequest(options, warmup=False), folder)
    if setting.ragged:
        file = folder / "model" / "config.pbtxt"
        text = re.sub(r"(?m)^input \{$", "input {\n  allow_ragged_batch: true", file.read_text())
        file.write_text(text)


@contextlib.contextmanager
def _running_app(peer: Peer, setting: Setting, models: Models, folder: Path) -> Iterator[Running]:
    port = free_port()
    model = models.torch if peer.app == "fastapi-torch" else models.fp32
    wire = plain_wire("/embed" if peer.app == "litserve" else "/")
    command = [sys.executable, str(APPS), peer.app, "--port", str(port), "--model", str(model)]
    command += ["--instances", str(setting.instances), "--threads", str(setting.threads)]
    command += ["--batch", str(setting.batch), "--wait-ms", str(WAIT_MS)]
    with _process(command, folder / "log") as process:
        found = Running(port, process.pid, wire)
        _wait_ready(process, found, folder / "log")
        yield found


@contextlib.contextmanager
def _running_qbench(
    engine: Path, models: Models, lengths: Sequence[int], folder: Path
) -> Iterator[Running]:
    texts = folder / "texts.txt"
    texts.write_text("\n".join(" ".join(["a"] * (length - 2)) for length in lengths))
    command = [sys.executable, "-m", "qbench.cli.main", "serve", str(engine)]
    command += ["--port", "0", "--json", "--texts", str(texts)]
    command += ["--tokenizer", str(models.torch), "--name", "model", "--max-wait-ms", str(WAIT_MS)]
    with _process(command, folder / "log", piped=True) as process:
        assert process.stdout is not None
        events = []
        for line in process.stdout:
            events.append(json.loads(line))
            if events[-1]["event"] == "ready":
                break
        if not events or events[-1]["event"] != "ready":
            raise RuntimeError(f"qbench serve ended: {_tail(folder / 'log')}")
        yield Running(int(events[0]["port"]), process.pid, protocol_wire("model", models.inputs))


@contextlib.contextmanager
def _process(
    command: Sequence[str], log: Path, piped: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the block is left, then end it and whatever it started."""
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("wb") as sink:
        out = subprocess.PIPE if piped else sink
        process = subprocess.Popen(command, stdout=out, stderr=sink, env=env)
    try:
        yield process
    finally:
        started = []
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        for child in psutil.wait_procs(started, timeout=3)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _wait_ready(process: subprocess.Popen[bytes], running: Running, log: Path) -> None:
    """Wait until a server answers a request."""
    until_s = time.monotonic() + _START_S
    headers, body = running.wire.body(np.array([1, 2]))
    address = f"http://127.0.0.1:{running.port}{running.wire.path}"
    last: OSError | None = None
    while time.monotonic() < until_s and process.poll() is None:
        try:
            asked = urllib.request.Request(address, body, headers)
            with urllib.request.urlopen(asked, timeout=10):
                return
        except OSError as error:  # it does not listen yet, or its model is not there yet
            last = error
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready: {last}: {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:]


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
