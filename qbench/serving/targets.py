"""What a load is sent to: the served engine in this process, or any server over HTTP."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

from qbench.errors import MeasurementError
from qbench.serving.decisions import Refuse
from qbench.serving.failures import RefusedError
from qbench.serving.request import Answer, Encoded
from qbench.serving.service import Request, Service

Settled: TypeAlias = Callable[["Reply"], None]


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of one request.

    Attributes:
        status: ``ok``, ``refused`` (the server was full), or ``failed``.
        value: The answer, where there is one.
        error: Why not, in words.
        answer: The answer with its stages, where the server runs in this process.
    """

    status: str
    value: Any = None
    error: str = ""
    answer: Answer | None = None


class Target(Protocol):
    """A server under load."""

    def send(self, payload: Any, settled: Settled) -> None:
        """Send one request without waiting; ``settled`` gets its reply, exactly once."""
        ...


class ServiceTarget:
    """A served engine in this process."""

    def __init__(
        self, service: Service, request_of: Callable[[Any], Request] | None = None
    ) -> None:
        """Take a service, and how a payload becomes a request."""
        self._service, self._request_of = service, request_of or Request

    def send(self, payload: Any, settled: Settled) -> None:
        """Submit one request."""

        def done(future: Future[Answer]) -> None:
            error = future.exception()
            if error is None:
                answer = future.result()
                settled(Reply("ok", answer.value, answer=answer))
            else:
                status = "refused" if isinstance(error, RefusedError) else "failed"
                settled(Reply(status, error=f"{type(error).__name__}: {error}"))

        self._service.submit(self._request_of(payload)).add_done_callback(done)


class HttpTarget:
    """A server over HTTP: a connection a worker, kept open."""

    def __init__(
        self,
        exchange: Callable[[Any], Any],
        connections: int = 64,
    ) -> None:
        """Take what sends one request and returns its answer.

        Args:
            exchange: Sends a payload and returns the answer; ``OipExchange`` for example. It
                raises ``RefusedError`` where the server is full.
            connections: Requests on their way at most; later ones wait in this process, and
                their wait counts against the server as it would for a user.
        """
        self._exchange = exchange
        self._workers = ThreadPoolExecutor(connections, thread_name_prefix="client")

    def send(self, payload: Any, settled: Settled) -> None:
        """Send one request on a worker's connection."""
        self._workers.submit(self._send_now, payload, settled)

    def _send_now(self, payload: Any, settled: Settled) -> None:
        try:
            reply = Reply("ok", self._exchange(payload))
        except RefusedError as error:
            reply = Reply("refused", error=str(error))
        except Exception as error:  # whatever a client library raises ends in the record
            reply = Reply("failed", error=f"{type(error).__name__}: {error}")
        settled(reply)

    def close(self) -> None:
        """End the workers once what is on its way has come back; what waits is not sent."""
        self._workers.shutdown(wait=True, cancel_futures=True)


class OipExchange:
    """Sends encoded requests by the Open Inference Protocol v2, JSON over HTTP.

    Each payload is one request ``[1, length]`` of integer inputs.
    """

    def __init__(
        self,
        url: str,
        model: str,
        encode: Callable[[Sequence[Any]], Sequence[Encoded]] | None = None,
        datatypes: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """Name the server and the model.

        Args:
            url: Base address, for example ``http://localhost:8000``.
            model: Name of the model there.
            encode: Payloads to encoded requests; ``None`` where they are encoded already.
            datatypes: OIP datatype of each input the model reads; all as ``INT64`` by default.
            timeout_s: Longest time for one exchange.
        """
        self._address = f"{url.rstrip('/')}/v2/models/{model}/infer"
        self._encode, self._datatypes, self._timeout_s = encode, datatypes, timeout_s
        self._local = threading.local()
        self._opened: list[http.client.HTTPConnection] = []  # of all threads, to close them

    def __call__(self, payload: Any) -> dict[str, Any]:
        """Send one request and return its outputs: data by name.

        Raises:
            RefusedError: If the server answers 429 or 503.
            MeasurementError: If it answers another error.
        """
        encoded = payload if self._encode is None else self._encode([payload])[0]
        status, body = self._post(self._body(encoded))
        if status in (429, 503):
            raise _refused(body)
        if status != 200:
            raise MeasurementError(f"the server answered {status}: {body[:200]!r}")
        return {one["name"]: one["data"] for one in json.loads(body)["outputs"]}

    def close(self) -> None:
        """Close every connection."""
        for connection in self._opened:
            connection.close()
        self._opened.clear()

    def _body(self, encoded: Encoded) -> bytes:
        kinds = self._datatypes or dict.fromkeys(encoded, "INT64")
        inputs = [
            {
                "name": name,
                "shape": [1, len(encoded[name])],
                "datatype": kind,
                "data": list(map(int, encoded[name])),
            }
            for name, kind in kinds.items()
            if name in encoded
        ]
        return json.dumps({"inputs": inputs}).encode()

    def _post(self, body: bytes) -> tuple[int, bytes]:
        """Post on this thread's own connection; open it again if the server closed it."""
        parts = urlsplit(self._address)
        for fresh in (False, True):
            connection = None if fresh else getattr(self._local, "connection", None)
            if connection is None:
                connection = http.client.HTTPConnection(parts.netloc, timeout=self._timeout_s)
                self._local.connection = connection
                self._opened.append(connection)
                fresh = True
            try:
                connection.request("POST", parts.path, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                return response.status, response.read()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                connection.close()
                self._opened.remove(connection)
                self._local.connection = None
                if fresh:
                    raise
        raise AssertionError("unreachable: a fresh connection answers or raises")


def _refused(body: bytes) -> RefusedError:
    return RefusedError(Refuse(body[:200].decode("utf-8", "replace"), None))
