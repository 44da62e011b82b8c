"""The load of the serving benchmark: clients over HTTP that cost the machine little.

Requests are made ready before; a client sends its next one when it has an answer. The same clients
drive every server, so that what they cost is the same for all.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Wire:
    """How one kind of server is spoken to.

    Attributes:
        path: Path of the address.
        body: Token ids [length] to headers and body of a request.
        read: Headers (lower case) and body of an answer to its vector.
    """

    path: str
    body: Callable[[np.ndarray], tuple[dict[str, str], bytes]]
    read: Callable[[dict[str, str], bytes], np.ndarray]


def plain_wire(path: str = "/") -> Wire:
    """Return the plainest way: JSON with the ids in, the numbers' bytes out."""

    def body(ids: np.ndarray) -> tuple[dict[str, str], bytes]:
        return {"Content-Type": "application/json"}, json.dumps({"ids": ids.tolist()}).encode()

    return Wire(path, body, lambda headers, given: np.frombuffer(given, np.float32))


def protocol_wire(model: str, inputs: Sequence[str]) -> Wire:
    """Return the Open Inference Protocol v2, all tensors as bytes."""

    def body(ids: np.ndarray) -> tuple[dict[str, str], bytes]:
        ones = np.ones_like(ids)
        values = {name: ones if "mask" in name else 0 * ids for name in inputs}
        values["input_ids"] = ids
        told = [
            {
                "name": name,
                "shape": [1, len(ids)],
                "datatype": "INT64",
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, array in values.items()
        ]
        head = json.dumps({"inputs": told, "parameters": {"binary_data_output": True}}).encode()
        data = b"".join(array.tobytes() for array in values.values())
        headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(len(head)),
        }
        return headers, head + data

    def read(headers: dict[str, str], given: bytes) -> np.ndarray:
        return np.frombuffer(given[int(headers["inference-header-content-length"]) :], np.float32)

    return Wire(f"/v2/models/{model}/infer", body, read)


def make_requests(wire: Wire, port: int, ids: Sequence[np.ndarray]) -> list[bytes]:
    """Return each request as it goes over the wire."""
    made = []
    for one in ids:
        headers, body = wire.body(one)
        lines = [f"POST {wire.path} HTTP/1.1", f"Host: 127.0.0.1:{port}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"Content-Length: {len(body)}", "", ""]
        made.append("\r\n".join(lines).encode() + body)
    return made


@dataclass(slots=True)
class Slice:
    """What a stretch of load gave; ``time.perf_counter``, seconds.

    Attributes:
        from_s: When measuring began.
        end_s: When it ended, and no client sent a new request.
        spans: When each answered request was sent and answered, warm-up and drain too.
        answers: The first answer to each request that was asked to be kept.
        marks: What ``mark`` gave at the beginning and at the end.
    """

    from_s: float = 0.0
    end_s: float = float("inf")
    spans: list[tuple[float, float]] = field(default_factory=list)
    answers: dict[int, np.ndarray] = field(default_factory=dict)
    marks: list[Any] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Answers a second while measuring."""
        done = sum(self.from_s <= end < self.end_s for _, end in self.spans)
        return done / (self.end_s - self.from_s)

    @property
    def latencies_ms(self) -> list[float]:
        """Latencies of the requests sent while measuring; their answers may come later."""
        return [1e3 * (end - at) for at, end in self.spans if self.from_s <= at < self.end_s]


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop.

    Attributes:
        clients: Requests on their way at any time.
        warmup_s: Seconds before measuring.
        measure_s: Seconds measured.
        keep: Answers of so many requests are kept, by their place.
        mark: Called when measuring begins and when it ends.
    """

    clients: int
    warmup_s: float
    measure_s: float
    keep: int = 0
    mark: Callable[[], Any] = float


def drive_http(port: int, wire: Wire, ids: Sequence[np.ndarray], load: Load) -> Slice:
    """Load a server on this machine.

    Raises:
        RuntimeError: If a request fails, or the last answers stay out for a minute.
    """
    return asyncio.run(_drive(port, wire, make_requests(wire, port, ids), load))


async def _drive(port: int, wire: Wire, requests: Sequence[bytes], load: Load) -> Slice:
    loop = asyncio.get_running_loop()
    shared = _Shared(wire, requests, itertools.count(), load.keep, Slice(), loop.create_future())
    clients = [_Client(shared) for _ in range(load.clients)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
    for client in clients:
        client.send()
    taken = shared.slice
    await asyncio.wait([shared.failed], timeout=load.warmup_s)
    taken.marks.append(load.mark())
    taken.from_s = time.perf_counter()
    await asyncio.wait([shared.failed], timeout=load.measure_s)
    taken.end_s = time.perf_counter()
    taken.marks.append(load.mark())
    until_s = time.perf_counter() + _LIMIT_S
    while any(client.busy for client in clients) and not shared.failed.done():
        if time.perf_counter() > until_s:
            shared.fail(f"no answer {_LIMIT_S:g} s after the load ended")
        await asyncio.sleep(0.005)
    for client in clients:
        client.close()
    if shared.failed.done():
        raise RuntimeError(shared.failed.result())
    return taken


@dataclass(slots=True)
class _Shared:
    """What all clients share."""

    wire: Wire
    requests: Sequence[bytes]
    turn: itertools.count[int]
    keep: int
    slice: Slice
    failed: asyncio.Future[str]

    def fail(self, why: str) -> None:
        if not self.failed.done():
            self.failed.set_result(why)


class _Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self.busy = False
        self._sent_s = 0.0
        self._place = 0
        self._transport: Any = None
        self._fresh()

    def _fresh(self) -> None:
        import httptools

        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def send(self) -> None:
        """Send the next request of all."""
        shared = self._shared
        self._place = next(shared.turn) % len(shared.requests)
        self.busy, self._sent_s = True, time.perf_counter()
        self._transport.write(shared.requests[self._place])

    def close(self) -> None:
        """Go away."""
        self.busy = False
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.busy:
            self._shared.fail(f"the server closed a connection on which it owed an answer: {exc}")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        now_s, shared, status = time.perf_counter(), self._shared, self._parser.get_status_code()
        if status != 200:
            shared.fail(f"the server answered {status}: {b''.join(self._body)[:300]!r}")
            self.busy = False
            return
        shared.slice.spans.append((self._sent_s, now_s))
        if self._place < shared.keep and self._place not in shared.slice.answers:
            shared.slice.answers[self._place] = shared.wire.read(
                self._headers, b"".join(self._body)
            )
        if not self._parser.should_keep_alive():
            shared.fail("the server does not keep connections open")
        self._fresh()
        self.busy = False
        if now_s < shared.slice.end_s and not shared.failed.done():
            self.send()
