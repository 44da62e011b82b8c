"""What a load is sent to, and the served engine in this process; ``remote`` has other servers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from qbench.serving.failures import RefusedError
from qbench.serving.request import Answer
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
        waited_s: How long the request waited in this process for a connection, seconds.
    """

    status: str
    value: Any = None
    error: str = ""
    answer: Answer | None = None
    waited_s: float = 0.0


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
