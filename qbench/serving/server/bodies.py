"""Bodies of requests: read within limits of size and time, and unpacked within the same size."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from qbench.serving.server.asking import ClientGoneError
from qbench.serving.server.terms import BadRequestError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_PACKED = {"gzip": 31, "deflate": 15}  # window bits by content encoding


async def read_body(
    receive: Receive, headers: Mapping[str, str], limit: int, timeout_s: float
) -> bytes:
    """Return the body of a request, unpacked.

    Args:
        receive: The ASGI channel.
        headers: Its headers.
        limit: Largest body, bytes; packed and unpacked.
        timeout_s: Longest time until it is here, seconds.

    Raises:
        BadRequestError: 413 if it is too large, 408 if it takes too long, 415 if it is packed
            in a way that is not offered, 400 if it cannot be unpacked.
        ClientGoneError: If the client closes its connection before the end.
    """
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in (*_PACKED, "identity"):
        raise BadRequestError(
            f"Content-Encoding is {coding[:40]!r}; allowed: gzip, deflate or none", 415
        )
    stated = headers.get("content-length", "0")
    if stated.isdigit() and int(stated) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise _too_large(limit)
                more = message.get("more_body", False)
    except TimeoutError:
        raise BadRequestError(f"the body was not here within {timeout_s:g} s", 408) from None
    body = b"".join(parts)
    return body if coding == "identity" else _unpacked(body, coding, limit)


def _unpacked(body: bytes, coding: str, limit: int) -> bytes:
    engine = zlib.decompressobj(_PACKED[coding])
    try:
        found = engine.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadRequestError(f"the body is no {coding}: {error}") from None
    if len(found) > limit:
        raise _too_large(limit)
    if not engine.eof or engine.unused_data:
        raise BadRequestError(f"the body is no whole {coding}")
    return found


def _too_large(limit: int) -> BadRequestError:
    return BadRequestError(f"the body is larger than {limit} bytes, the most that is taken", 413)


async def discard(receive: Receive, limit: int, timeout_s: float) -> None:
    """Take in what a client still sends, within limits, so that it can read its answer."""
    size, more = 0, True
    try:
        async with asyncio.timeout(timeout_s):
            while more and size < limit:
                message = await receive()
                size += len(message.get("body", b""))
                more = message["type"] == "http.request" and message.get("more_body", False)
    except TimeoutError:
        return
