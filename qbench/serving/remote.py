"""Any server over HTTP as the target of a load, by the Open Inference Protocol v2."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any
from urllib.parse import SplitResult, urlsplit

from qbench.errors import InputError, MeasurementError
from qbench.serving.decisions import Refuse
from qbench.serving.failures import RefusedError
from qbench.serving.request import Encoded
from qbench.serving.targets import Reply, Settled

_ASK_S = 10.0


class HttpTarget:
    """A server over HTTP: a connection a worker, kept open."""

    def __init__(
        self,
        exchange: Callable[[Any], Any],
        connections: int = 256,
    ) -> None:
        """Take what sends one request and returns its answer.

        Args:
            exchange: Sends a payload and returns the answer; ``OipExchange`` for example. It
                raises ``RefusedError`` where the server is full.
            connections: Requests on their way at most; later ones wait in this process. Their
                latency counts from when they were due, and the wait as the generator's lateness.
        """
        self._exchange = exchange
        self._workers = ThreadPoolExecutor(connections, thread_name_prefix="client")

    def send(self, payload: Any, settled: Settled) -> None:
        """Send one request on a worker's connection."""
        self._workers.submit(self._send_now, payload, settled, time.perf_counter())

    def _send_now(self, payload: Any, settled: Settled, asked_s: float) -> None:
        waited_s = time.perf_counter() - asked_s
        try:
            reply = Reply("ok", self._exchange(payload))
        except RefusedError as error:
            reply = Reply("refused", error=str(error))
        except Exception as error:  # whatever a client library raises ends in the record
            reply = Reply("failed", error=f"{type(error).__name__}: {error}")
        settled(replace(reply, waited_s=waited_s))

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
        encode: Callable[[Sequence[Any]], Sequence[Encoded]] | None = None,
        datatypes: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """Name the model on its server.

        Args:
            url: Address of the model, for example ``http://localhost:8000/v2/models/NAME``.
            encode: Payloads to encoded requests; ``None`` where they are encoded already.
            datatypes: OIP datatype of each input the model reads; all as ``INT64`` by default.
            timeout_s: Longest time for one exchange.
        """
        self._address = f"{url.rstrip('/')}/infer"
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
                connection = _connect(parts, self._timeout_s)
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


def _connect(parts: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.netloc, timeout=timeout_s)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and "/v2/models/" in parts.path:
            return parts
    except ValueError:
        pass  # no address at all
    raise InputError(
        f"the address is {url!r}; allowed: http://HOST:PORT/v2/models/NAME, the model's address by "
        "the Open Inference Protocol v2"
    )


def read_inputs(url: str, names: Sequence[str]) -> dict[str, str]:
    """Return the datatypes of a model's inputs, by name, as its server tells them.

    Args:
        url: Address of the model: ``http://HOST:PORT/v2/models/NAME``.
        names: Inputs that requests bring.

    Raises:
        InputError: If it is no such address, no model answers there, or it reads other inputs.
    """
    parts = _split(url)
    try:
        with closing(_connect(parts, _ASK_S)) as connection:
            connection.request("GET", parts.path.rstrip("/"))
            response = connection.getresponse()
            status, body = response.status, response.read()
        told = json.loads(body) if status == 200 else {}
        found = {one["name"]: one["datatype"] for one in told.get("inputs", ())}
    except (
        OSError,
        http.client.HTTPException,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise InputError(f"no model answers at {url}: {error}; is its server running?") from error
    if status != 200:
        raise InputError(f"no model at {url}: the server answered {status}: {body[:200]!r}")
    if missing := sorted(set(found) - set(names)) or sorted(set(names) - set(found)):
        raise InputError(
            f"the model at {url} reads {', '.join(found) or 'nothing'}, and requests of this run "
            f"bring {', '.join(names)}: {missing[0]} is not in both"
        )
    return found
