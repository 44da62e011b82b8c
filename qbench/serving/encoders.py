"""Threads that encode requests ahead of the lanes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from qbench.errors import MeasurementError
from qbench.serving.clock import Clock
from qbench.serving.request import Encode, Encoded, token_count

_AT_ONCE = 64

R = TypeVar("R")


class Encoders(Generic[R]):
    """Encodes what is put in, in groups, on threads of their own.

    Requests that wait together share a call. If a call fails they are encoded one by one, so
    that only bad ones fail.
    """

    def __init__(
        self,
        encode: Encode,
        payload_of: Callable[[R], Any],
        on_ready: Callable[[Sequence[R], Sequence[Encoded], Sequence[int], float], None],
        on_failed: Callable[[R, Exception], None],
        clock: Clock,
    ) -> None:
        """Take what to do; no thread runs yet.

        Args:
            encode: Payloads to encoded requests.
            payload_of: The payload of a request.
            on_ready: Gets requests, what they are encoded, their tokens, and when encoding began.
            on_failed: Gets a request that cannot be encoded, and why.
            clock: A monotonic clock, seconds.
        """
        self._encode, self._payload_of, self._clock = encode, payload_of, clock
        self._on_ready, self._on_failed = on_ready, on_failed
        self._arrived = threading.Condition()
        self._inbox: list[R] = []
        self._closing = False
        self.threads: list[threading.Thread] = []

    def start(self, count: int) -> None:
        """Start ``count`` threads."""
        for index in range(count):
            thread = threading.Thread(target=self._serve, name=f"encoder-{index}", daemon=True)
            self.threads.append(thread)
            thread.start()

    def put(self, request: R) -> None:
        """Hand a request in."""
        with self._arrived:
            self._inbox.append(request)
            self._arrived.notify()

    def close(self) -> None:
        """Let the threads end once all is encoded."""
        with self._arrived:
            self._closing = True
            self._arrived.notify_all()

    def _serve(self) -> None:
        while True:
            with self._arrived:
                while not self._inbox and not self._closing:
                    self._arrived.wait()
                if not self._inbox:
                    return
                group = self._inbox[:_AT_ONCE]
                del self._inbox[:_AT_ONCE]
            self._encode_group(group)

    def _encode_group(self, group: list[R]) -> None:
        start_s = self._clock()
        try:
            encoded = self._encode([self._payload_of(request) for request in group])
            if len(encoded) != len(group):
                raise MeasurementError(
                    f"encoding gave {len(encoded)} results for {len(group)} requests"
                )
            tokens = [token_count(item) for item in encoded]
        except Exception as error:  # the encoder is the user's: it may raise anything
            if len(group) > 1:
                for request in group:
                    self._encode_group([request])
            else:
                self._on_failed(group[0], error)
            return
        self._on_ready(group, encoded, tokens, start_s)
