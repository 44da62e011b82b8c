"""Serves graphs on real sockets within the test's process."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qbench.graph.model import save_graph
from qbench.hosting import Hosting, HostOptions, prepare_host
from qbench.runtime.ort import Session
from qbench.servable import find_servable
from qbench.serving.opening import ServeSettings
from qbench.serving.server.host import Ended
from qbench.serving.server.transport import TransportLimits
from qbench.serving.server.wire import RequestLimits
from qbench.tasks.tokens import CallableTokenizer

FAST = ServeSettings(lanes=1, threads_per_lane=1, token_budget=256)
JSON = {"Content-Type": "application/json"}


def tokenize(texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[list[int]]:
    """Turn words into ids from 1 to 98."""
    if any("unspeakable" in text for text in texts):
        raise RuntimeError("no word for this")
    return [[1 + zlib.crc32(word.encode()) % 98 for word in text.split()] for text in texts]


OPTIONS = HostOptions(
    FAST,
    RequestLimits(body_bytes=1 << 20, items=16),
    TransportLimits(header_timeout_s=1.0, idle_timeout_s=2.0, connections=64),
    port=0,
    name="tiny",
    tokenizer=CallableTokenizer(tokenize, "tokenize", {}, 0, 512),
    body_timeout_s=1.0,
    drain_s=10.0,
)


@dataclass
class Served:
    """A running server.

    Attributes:
        hosting: What was prepared.
        port: Where it listens.
        session: The engine, to compare with.
    """

    hosting: Hosting
    port: int
    session: Session
    ended: list[Ended] = field(default_factory=list)

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, dict[str, str], Any]:
        """Return status, headers by lower-case name, and body of one exchange."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            content = answer.read()
            told = {name.lower(): value for name, value in answer.getheaders()}
            if told.get("content-type") == "application/json":
                return answer.status, told, json.loads(content)
            return answer.status, told, content

    def infer(self, content: Any, headers: Mapping[str, str] | None = None):  # noqa: ANN201
        """Return what the server answers to an inference request in JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.call("POST", "/v2/models/tiny/infer", body, {**JSON, **(headers or {})})

    def socket(self) -> socket.socket:
        """Return a connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)


def tensor(name: str, rows: Any, datatype: str = "INT64", **more: Any) -> dict[str, Any]:
    """Return an input of equal rows."""
    return {
        "name": name,
        "shape": [len(rows), len(rows[0])],
        "datatype": datatype,
        "data": rows,
        **more,
    }


def request(rows: Sequence[Sequence[int]], **more: Any) -> dict[str, Any]:
    """Return an inference request for rows of equal length."""
    mask = [[1] * len(row) for row in rows]
    return {"inputs": [tensor("input_ids", rows), tensor("attention_mask", mask)], **more}


@contextlib.contextmanager
def serve_graph(graph: ir.Model, folder: Path, **changes: Any) -> Iterator[Served]:
    """Serve a graph until the block is left."""
    path = folder / "tiny.onnx"
    save_graph(graph, path)
    servable = find_servable(str(path))
    hosting = prepare_host(servable, replace(OPTIONS, **changes))
    engine = servable.engine()
    assert engine.open_session is not None
    one = Served(hosting, hosting.host.address[1], engine.open_session(1))
    ready = threading.Event()
    thread = threading.Thread(
        target=lambda: one.ended.append(hosting.host.run(on_ready=ready.set)), daemon=True
    )
    thread.start()
    wait_until(lambda: ready.is_set() or not thread.is_alive(), 60)
    assert ready.is_set(), one.ended
    try:
        yield one
    finally:
        hosting.host.stop()
        thread.join(30)
        assert not thread.is_alive()


def wait_until(condition, seconds: float = 10.0) -> None:  # noqa: ANN001
    """Wait until a condition holds."""
    until_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until_s, "it did not come true in time"
        time.sleep(0.01)
