"""One request of a client as requests of the service: handed in together, answered together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from qbench.serving.request import Answer
from qbench.serving.service import Request, Service


class ClientGoneError(Exception):
    """The client closed its connection; nobody waits for the answer."""


async def ask(
    service: Service, requests: Sequence[Request], gone: Callable[[], Awaitable[Any]]
) -> list[Answer]:
    """Hand requests in and return their answers in order; the first failure fails all.

    Args:
        service: The served engine.
        requests: One a row.
        gone: Returns when the client has closed its connection; the requests are then taken
            back.

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
            await _settled(futures, gone)
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


async def _settled(futures: Sequence[Future[Answer]], gone: Callable[[], Awaitable[Any]]) -> None:
    """Wait until all futures are done, or one has failed; or until the client is gone."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    lock, left = threading.Lock(), len(futures)

    def finish() -> None:
        if not done.done():
            done.set_result(None)

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
    watch = loop.create_task(_watch(gone, done))
    try:
        await done
    finally:
        watch.cancel()
    failed = next((f for f in futures if f.done() and not f.cancelled() and f.exception()), None)
    if failed is not None:
        failed.result()


async def _watch(gone: Callable[[], Awaitable[Any]], done: asyncio.Future[None]) -> None:
    """End the wait when the client is gone."""
    try:
        await gone()
    finally:
        if not done.done():
            done.set_exception(ClientGoneError())
