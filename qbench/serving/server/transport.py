"""Connections: their number, the size and time of headers, and readers that never read.

The body's size and time are the application's; see ``bodies``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from qbench.serving.server.asking import GONE
from qbench.serving.server.replies import error_body


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """What a connection may do.

    Attributes:
        connections: Most connections at once.
        header_bytes: Largest head of a request: its line and headers.
        header_timeout_s: Longest time until it is here.
        idle_timeout_s: Longest time between two requests of a connection.
        write_timeout_s: Longest time in which a client takes nothing of a large answer.
    """

    connections: int = 512
    header_bytes: int = 32 << 10
    header_timeout_s: float = 10.0
    idle_timeout_s: float = 60.0
    write_timeout_s: float = 30.0


def bounded_protocol(limits: TransportLimits) -> type[HttpToolsProtocol]:
    """Return a protocol for uvicorn that keeps these limits."""
    return type("BoundedProtocol", (_BoundedProtocol,), {"limits": limits})


class _BoundedProtocol(HttpToolsProtocol):
    limits: ClassVar[TransportLimits] = TransportLimits()

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._in_head = True
        self._head_bytes = 0
        self._ended = False  # an error was told, and the rest is not looked at
        self._upgrading = False  # the head that is being read offers another protocol
        self._cycles: list[RequestResponseCycle] = []  # requests without a whole answer
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._end(503, "the server has as many connections as it takes", retry=True)
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)
        for cycle in self._cycles:  # of requests in a row the base class tells the last alone
            cycle.disconnected = True
            cycle.message_event.set()
            leave: Any = cycle.scope.get(GONE)
            if leave is not None:
                leave()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self.send_400_response("")
            return
        if self._ended or self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.header_bytes:
                self._refuse_head()
            elif self._head_timer is None and self.timeout_keep_alive_task is None:
                self._await_head()

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Take a request that offers another protocol as if it had not: that is its client's wish.

        NOTE: the parser ends at such a head and would leave its body away; a new one gets the
        head again, without the offer.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._end(405, "CONNECT is not allowed here")
            return
        head = [method + b" " + self.url + b" HTTP/1.1"]
        for name, value in self.headers:
            if name == b"connection":
                words = [word.strip() for word in value.split(b",")]
                value = b", ".join(w for w in words if w.lower() in (b"close", b"keep-alive"))
            if value and name not in (b"upgrade", b"http2-settings"):
                head.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self._upgrading = False
        self.data_received(b"\r\n".join(head) + b"\r\n\r\n" + rest)

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes <= self.limits.header_bytes:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if self._ended:
            return
        if self._head_bytes + len(self.url) > self.limits.header_bytes:
            self._refuse_head()
            return
        self._head_bytes = 0
        self._upgrading = self.parser.should_upgrade()
        if not self._upgrading:
            super().on_headers_complete()
            self._cycles = [one for one in self._cycles if not one.response_complete]
            self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        if not self._ended:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not (self._ended or self._upgrading):
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._end(400, "this is no valid HTTP request")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._late_head)

    def _late_head(self) -> None:
        self._head_timer = None
        if self._in_head and not self.transport.is_closing():
            words = f"the headers were not here within {self.limits.header_timeout_s:g} s"
            self._end(408, words)

    def _refuse_head(self) -> None:
        self._end(431, f"line and headers are larger than {self.limits.header_bytes} bytes")

    def _end(self, status: int, reason: str, retry: bool = False) -> None:
        """Tell an error without the application and close.

        While an answer is being written nothing is told: it would land in its middle.
        """
        self._ended = True
        if not self._owes_an_answer():
            body = error_body(reason)
            head = b"content-type: application/json\r\nconnection: close\r\n"
            if retry:
                head += b"retry-after: 1\r\n"
            length = f"content-length: {len(body)}\r\n\r\n".encode()
            self.transport.write(STATUS_LINE[status] + head + length + body)
            self.transport.close()
        else:
            self.cycle.keep_alive = False
        self._stop_timers()

    def _owes_an_answer(self) -> bool:
        """Whether a request that is here as a whole has no answer yet."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return bool(cycle.response_started or not cycle.more_body or self.pipeline)

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = None
