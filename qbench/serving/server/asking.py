"""One request of a client as requests of the service: handed in together, answered together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import MutableMapping, Sequence
from concurrent.futures import Future
from typing import Any

from qbench.serving.request import Answer
from qbench.serving.service import Request, Service

#: Where a request's scope holds what the connection calls when it is lost.
#: NOTE: ASGI's own way, to wait for a message beside the answer, takes a task of its own a request.
GONE = "qbench.gone"


class ClientGoneError(Exception):
    """The client closed its connection; nobody waits for the answer."""


async def ask(
    service: Service, requests: Sequence[Request], scope: MutableMapping[str, Any]
) -> list[Answer]:
    """Hand requests in and return their answers in order; the first failure fails all.

    Args:
        service: The served engine.
        requests: One a row.
        scope: The client's request: its connection calls what lies under ``GONE`` when it is
            lost, and the requests are then taken back.

    Raises:
        ClientGoneError: If the client is gone.
        Exception: Whatever failed the first request that failed.
    """
    futures: list[Future[Answer]] = []
    try:
        for request in requests:
            futures.append(service.submit(request))
            if futures[-1].done() and futures[-1].exception() is not None:
                break  # refused: the others would be answered for nobody
        else:
            await _settled(futures, scope)
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


async def _settled(futures: Sequence[Future[Answer]], scope: MutableMapping[str, Any]) -> None:
    """Wait until all futures are done, or one has failed; or until the client is gone."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    lock, left = threading.Lock(), len(futures)

    def finish() -> None:
        if not done.done():
            done.set_result(None)

    def leave() -> None:
        if not done.done():
            done.set_exception(ClientGoneError())

    def note(future: Future[Answer]) -> None:
        nonlocal left
        with lock:
            left -= 1
            over = left == 0
        if over or (not future.cancelled() and future.exception() is not None):
            try:
                loop.call_soon_threadsafe(finish)
            except RuntimeError:
                return  # the loop has ended, and with it whoever waited

    for future in futures:
        future.add_done_callback(note)
    scope[GONE] = leave
    try:
        await done
    finally:
        del scope[GONE]
    failed = next((f for f in futures if f.done() and not f.cancelled() and f.exception()), None)
    if failed is not None:
        failed.result()
