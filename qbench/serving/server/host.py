"""The server's process: it listens, becomes ready, and on a signal drains and ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import uvicorn

from qbench.errors import InputError
from qbench.serving.server.app import make_app
from qbench.serving.server.face import Face
from qbench.serving.server.transport import TransportLimits, bounded_protocol
from qbench.serving.service import Service

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOK_S = 0.005
#: Time in which clients that keep a connection are told to go, before it is closed.
_LINGER_S = 0.25
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a server ended.

    Attributes:
        served: Whether everything that was taken got its answer.
        left: Requests over HTTP that got none in time.
        error: Why the engine could not be opened, or ``None``.
        opening: Whether its thread still warms the engine: the process must not wait for it.
    """

    served: bool
    left: int = 0
    error: BaseException | None = None
    opening: bool = False


@dataclass(slots=True)
class _Opening:
    """The opening of the service, on a thread of its own."""

    thread: threading.Thread | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    error: BaseException | None = None


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: they would end the process by the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the host."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket; port 0 takes a free one.

    Raises:
        InputError: If the address cannot be taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(2048)
    except (OSError, OverflowError) as error:
        bound.close()
        raise InputError(
            f"cannot listen on {host}:{port}: {error}; give another --port (0 takes a free one) "
            "or --host"
        ) from error
    bound.set_inheritable(True)
    return bound


class Host:
    """Serves one engine over HTTP until it is told to stop."""

    def __init__(
        self,
        face: Face,
        bound: socket.socket,
        open_service: Callable[[], Service],
        limits: TransportLimits | None = None,
        drain_s: float = 30.0,
    ) -> None:
        """Take what to serve; nothing runs yet.

        Args:
            face: What the addresses share.
            bound: A listening socket.
            open_service: Opens and warms the engine; it runs while the server is live and not
                ready.
            limits: Limits of connections.
            drain_s: Longest time in which what was taken is still answered, seconds.
        """
        self.face, self._bound, self._open, self._drain_s = face, bound, open_service, drain_s
        limits = limits or TransportLimits()
        self._config = uvicorn.Config(
            make_app(face),
            http=bounded_protocol(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=_CLOSE_S,  # type: ignore[arg-type]
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._last = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        name = self._bound.getsockname()
        return str(name[0]), int(name[1])

    def close(self) -> None:
        """Stop listening; for a server that never ran."""
        self._bound.close()

    def stop(self) -> None:
        """Begin to drain; safe to call from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)

    def run(
        self,
        on_listening: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
        last: bool = False,
    ) -> Ended:
        """Serve until a signal or ``stop``; return how it ended.

        Args:
            on_listening: Called once the address takes connections.
            on_ready: Called once the engine is warm.
            last: Whether the process ends with the server: further signals are then ignored, so
                that its exit code is its own.
        """
        self._last = last
        factory = self._config.get_loop_factory()
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(self._serve(on_listening, on_ready))

    async def _serve(self, on_listening: Callable[[], None], on_ready: Callable[[], None]) -> Ended:
        loop = self._loop = asyncio.get_running_loop()
        server = _Server(self._config)
        serving = loop.create_task(server.serve([self._bound]))
        while not server.started and not serving.done():
            await asyncio.sleep(_LOOK_S)
        with _stopping_on_signals(loop, self._stop, self._last):
            on_listening()
            opening = self._begin_to_open(loop)
            await self._first(opening.over, serving)
            if opening.error is None and self.face.service is not None:
                on_ready()
                await self._first(self._stop, serving)
            ended = await self._drain(opening)
            server.should_exit = True
            await serving
        return ended

    async def _first(self, event: asyncio.Event, serving: asyncio.Task[None]) -> None:
        """Wait for an event, or to be stopped, or for the server's own end."""
        waits = {asyncio.ensure_future(event.wait()), asyncio.ensure_future(self._stop.wait())}
        await asyncio.wait({*waits, serving}, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _begin_to_open(self, loop: asyncio.AbstractEventLoop) -> _Opening:
        opening = _Opening()

        def work() -> None:
            try:
                service = self._open()
            except BaseException as error:  # the server must end, and say why, whatever it was
                opening.error = error
            else:
                self.face.metrics.attach(service)
                self.face.service = service
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(opening.over.set)

        opening.thread = threading.Thread(target=work, name="opening", daemon=True)
        opening.thread.start()
        return opening

    async def _drain(self, opening: _Opening) -> Ended:
        """Take nothing new, wait for what is inside, and close the service."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._drain_s
        self.face.draining = True
        if not opening.over.is_set():  # nothing was taken yet
            return Ended(True, opening=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await self.face.idle.wait()
                if opening.error is None:
                    await asyncio.sleep(_LINGER_S)
        left = self.face.inside
        service, served = self.face.service, True
        if service is not None:
            left_s = max(until_s - loop.time(), 0.1)
            served = await loop.run_in_executor(None, functools.partial(service.drain, left_s))
        return Ended(served and not left, left, opening.error)


@contextlib.contextmanager
def _stopping_on_signals(
    loop: asyncio.AbstractEventLoop, stop: asyncio.Event, last: bool
) -> Iterator[None]:
    """Set ``stop`` on SIGTERM and SIGINT, where signals can be heard: on the main thread.

    Args:
        loop: The running loop.
        stop: What they set.
        last: Whether they are ignored from the end of the block on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int, frame: object) -> None:
        loop.call_soon_threadsafe(stop.set)

    # NOTE: not the loop's own handlers: when these go, a second signal ends the process at once.
    before = {number: signal.signal(number, hear) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if last else handler)
