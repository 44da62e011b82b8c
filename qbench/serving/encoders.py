"""Threads that encode requests ahead of the lanes, in the order in which those would serve them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from qbench.errors import MeasurementError
from qbench.serving.clock import Clock
from qbench.serving.decisions import BatchLimits, Terms
from qbench.serving.flights import Pending
from qbench.serving.request import Encode, Encoded, token_count
from qbench.serving.waiting import FairLine, Waiting

_AT_ONCE = 64
_GROUP_S = 0.005  # a group is small enough to be encoded in about this: others come next

#: Gets requests, what they are encoded, their tokens, and when encoding began.
OnReady: TypeAlias = Callable[[Sequence[Pending], Sequence[Encoded], Sequence[int], float], None]
#: Gets a request that cannot be encoded, and why.
OnFailed: TypeAlias = Callable[[Pending, Exception], None]


class Encoders:
    """Encodes what is put in, in groups, on threads of their own.

    Requests that wait together share a call. If a call fails they are encoded one by one, so
    that only bad ones fail. They come in the fair order of the batcher, each for one unit: else
    a tenant's flood of texts would keep the others from the lanes.
    """

    def __init__(
        self,
        encode: Encode,
        lock: threading.Lock,
        limits: BatchLimits,
        told: tuple[OnReady, OnFailed],
        clock: Clock,
    ) -> None:
        """Take what to do; no thread runs yet.

        Args:
            encode: Payloads to encoded requests.
            lock: Guards what waits; its owner holds it for ``put``, ``discard`` and ``close``.
            limits: Weights of tenants, and ageing.
            told: Who is told of what was encoded and what could not be; the lock is not held.
            clock: A monotonic clock, seconds.
        """
        self._encode, self._clock = encode, clock
        self._on_ready, self._on_failed = told
        self._lock, self._arrived = lock, threading.Condition(lock)
        self._line = FairLine(limits.weights, limits.ageing_s)
        self._requests: dict[int, Pending] = {}
        self._closing, self._each_s = False, 0.0  # a request of the last group took so long
        self.threads: list[threading.Thread] = []

    def __len__(self) -> int:
        """Return how many wait to be encoded."""
        return len(self._requests)

    def start(self, count: int) -> None:
        """Start ``count`` threads."""
        for index in range(count):
            thread = threading.Thread(target=self._serve, name=f"encoder-{index}", daemon=True)
            self.threads.append(thread)
            thread.start()

    def put(self, request: Pending, terms: Terms) -> None:
        """Hand a request in."""
        ticket, rank = request.ticket, int(terms.priority)
        self._requests[ticket] = request
        self._line.enter(Waiting(ticket, request.submitted_s, terms, tokens=1, rank=rank))
        self._arrived.notify()

    def discard(self, ticket: int) -> None:
        """Let go of a request that nobody waits for any more, if it is still here."""
        if self._requests.pop(ticket, None) is not None:
            self._line.leave(ticket)

    def close(self) -> None:
        """Let the threads end once all is encoded."""
        self._closing = True
        self._arrived.notify_all()

    def _serve(self) -> None:
        while group := self._take():
            start_s = self._clock()
            self._encode_group(group)
            self._each_s = (self._clock() - start_s) / len(group)

    def _take(self) -> list[Pending]:
        """Wait for requests and return the first ones; none at the end."""
        with self._lock:
            while not self._requests and not self._closing:
                self._arrived.wait()
            self._line.age(self._clock())
            count = min(max(int(_GROUP_S / max(self._each_s, 1e-9)), 1), _AT_ONCE)
            first = [self._line.by_ticket[key[2]] for key in self._line.order[:count]]
            if first:
                self._line.serve(first)
            return [self._requests.pop(item.ticket) for item in first]

    def _encode_group(self, group: list[Pending]) -> None:
        start_s = self._clock()
        try:
            encoded = self._encode([request.payload for request in group])
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
