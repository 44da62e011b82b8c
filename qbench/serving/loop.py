"""The threads around the batcher: one that encodes ahead, and one for each lane.

NOTE: there is no dispatcher thread. A lane that is free asks the batcher itself under the one
lock; a dispatcher would add a hand-over between threads to each batch, which on few cores
costs more than the decision.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from qbench.errors import MeasurementError
from qbench.serving.batcher import Accept, Batcher, BatchLimits, Dispatch, Refuse
from qbench.serving.request import Answer, Done, Encode, Encoded, Run, Times, Work, token_count

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """A request on its way; each field is written once, by the thread that holds it."""

    payload: Any
    done: Done
    ticket: int
    submitted_s: float
    encoded: Encoded = field(default_factory=dict)
    tokens: int = 0
    encode_start_s: float = 0.0
    encode_end_s: float = 0.0


class RefusedError(MeasurementError):
    """The server refused a request; ``retry_after_s`` says when another try may fit."""

    def __init__(self, refusal: Refuse) -> None:
        """Take what the batcher said."""
        retry_s = refusal.retry_after_s
        hint = "" if retry_s is None else f"; try again in {retry_s * 1000:.0f} ms"
        super().__init__(f"request refused: {refusal.reason}{hint}")
        self.retry_after_s = retry_s


class ServingLoop:
    """Serves one engine: a queue, a batcher and a thread for each lane.

    Use it as a context manager; leaving it answers what was accepted and ends the threads.
    An exception of the engine fails the requests of that batch with that exception, and the
    loop goes on. Callbacks run in a lane's thread, so they must be short.
    """

    def __init__(self, lanes: Sequence[Run], work: Work, limits: BatchLimits) -> None:
        """Start serving.

        Args:
            lanes: What runs a batch, one for each lane; a lane is used by one thread.
            work: How to encode, pad and decode.
            limits: Limits of the queue and of a batch; their ``lanes`` is taken from above.
        """
        self._work = work
        self.batcher = Batcher(replace(limits, lanes=len(lanes)))
        self.dispatches: dict[str, int] = {}  # batches by the reason why they went
        self.refused = 0
        self._lock = threading.Lock()
        self._texts = threading.Condition(self._lock)
        self._batches = threading.Condition(self._lock)
        self._inbox: list[_Request] = []
        self._requests: dict[int, _Request] = {}
        self._closing = False
        self._threads = [
            threading.Thread(target=self._serve_lane, args=(run,), name=f"lane-{index}")
            for index, run in enumerate(lanes)
        ]
        if work.encode is not None:
            encoder = threading.Thread(
                target=self._serve_encoder, args=(work.encode,), name="encoder"
            )
            self._threads.append(encoder)
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def __enter__(self) -> ServingLoop:
        """Return the loop, which already serves."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Drain and end the threads."""
        self.close()

    def submit(self, payload: Any, done: Done) -> Accept | Refuse:
        """Hand a request in; ``done`` gets its answer, exactly once, if it is accepted.

        Raises:
            MeasurementError: If there is no encoder and the payload is no encoded request.
        """
        tokens = token_count(payload) if self._work.encode is None else 0
        with self._lock:
            now_s = time.perf_counter()
            decision = self.batcher.admit(now_s)
            if isinstance(decision, Refuse):
                self.refused += 1
                return decision
            request = _Request(payload, done, decision.ticket, now_s)
            self._requests[decision.ticket] = request
            if self._work.encode is None:
                self._make_ready(request, payload, tokens, (now_s, now_s))
                self._batches.notify()
            else:
                self._inbox.append(request)
                self._texts.notify()
        return decision

    def ask(self, payload: Any) -> Future[Answer]:
        """Hand a request in and return a future of its answer.

        The future raises what failed the request, ``RefusedError`` if it was refused.
        """
        future: Future[Answer] = Future()

        def settle(answer: Answer) -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller no longer wants it
            if answer.error is not None:
                future.set_exception(answer.error)
            else:
                future.set_result(answer)

        decision = self.submit(payload, settle)
        if isinstance(decision, Refuse):
            future.set_exception(RefusedError(decision))
        return future

    def close(self) -> None:
        """Refuse new requests, answer the accepted ones and end the threads."""
        with self._lock:
            self._closing = True
            self.batcher.close()
            self._texts.notify_all()
            self._batches.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # --- the encoder's thread -------------------------------------------------------------

    def _serve_encoder(self, encode: Encode) -> None:
        while True:
            with self._lock:
                while not self._inbox and not self._closing:
                    self._texts.wait()
                if not self._inbox:
                    return
                group, self._inbox = self._inbox, []
            self._encode_group(encode, group)

    def _encode_group(self, encode: Encode, group: list[_Request]) -> None:
        """Encode requests in one call; if that fails, one by one, so that only bad ones fail."""
        start_s = time.perf_counter()
        try:
            encoded = encode([request.payload for request in group])
            if len(encoded) != len(group):
                raise MeasurementError(
                    f"encoding gave {len(encoded)} results for {len(group)} requests"
                )
            tokens = [token_count(item) for item in encoded]
        except Exception as error:
            if len(group) > 1:
                for request in group:
                    self._encode_group(encode, [request])
            else:
                self._fail_unready(group[0], error)
            return
        end_s = time.perf_counter()
        with self._lock:
            for request, item, count in zip(group, encoded, tokens, strict=True):
                self._make_ready(request, item, count, (start_s, end_s))
            self._batches.notify(len(group))

    def _make_ready(
        self, request: _Request, encoded: Encoded, tokens: int, span_s: tuple[float, float]
    ) -> None:
        """Put an encoded request before the batcher; the lock is held."""
        request.encoded, request.tokens = encoded, tokens
        request.encode_start_s, request.encode_end_s = span_s
        self.batcher.ready(request.ticket, tokens, span_s[1])

    def _fail_unready(self, request: _Request, error: Exception) -> None:
        with self._lock:
            self.batcher.withdraw(request.ticket)
            del self._requests[request.ticket]
            self._batches.notify_all()  # a closing lane may have waited for this one
        _hand_over(request, Answer(None, error, None, 0, 0, 0))

    # --- the lanes' threads ---------------------------------------------------------------

    def _serve_lane(self, run: Run) -> None:
        finished: int | None = None
        while (taken := self._take_batch(finished)) is not None:
            decision, requests, dispatched_s = taken
            self._run_batch(run, decision, requests, dispatched_s)
            finished = decision.batch

    def _take_batch(self, finished: int | None) -> tuple[Dispatch, list[_Request], float] | None:
        """Give back the lane, wait for a batch and take it; ``None`` when all is served."""
        with self._lock:
            if finished is not None:
                self.batcher.complete(finished, time.perf_counter())
            while True:
                now_s = time.perf_counter()
                decision = self.batcher.decide(now_s)
                if isinstance(decision, Dispatch):
                    requests = [self._requests.pop(ticket) for ticket in decision.tickets]
                    reason = str(decision.reason)
                    self.dispatches[reason] = self.dispatches.get(reason, 0) + 1
                    if self.batcher.ready_count:
                        self._batches.notify()
                    return decision, requests, now_s
                if self._closing and not self.batcher.queued:
                    self._batches.notify_all()
                    return None
                until_s = decision.until_s
                self._batches.wait(None if until_s is None else max(until_s - now_s, 0.0))

    def _run_batch(
        self, run: Run, decision: Dispatch, requests: list[_Request], dispatched_s: float
    ) -> None:
        start_s = end_s = time.perf_counter()
        values: Sequence[Any] = [None] * len(requests)
        failure: Exception | None = None
        try:
            feeds = self._work.pad([request.encoded for request in requests])
            start_s = time.perf_counter()
            outputs = run(feeds)
            end_s = time.perf_counter()
            values = self._work.decode(outputs, len(requests))
            if len(values) != len(requests):
                raise MeasurementError(
                    f"decoding gave {len(values)} answers for {len(requests)} requests"
                )
        except Exception as error:
            failure = error
            values = [None] * len(requests)
            end_s = time.perf_counter()
        for request, value in zip(requests, values, strict=True):
            times = Times(
                request.submitted_s,
                request.encode_start_s,
                request.encode_end_s,
                dispatched_s,
                start_s,
                end_s,
                time.perf_counter(),
            )
            answer = Answer(
                value, failure, times, len(requests), request.tokens, decision.padded_tokens
            )
            _hand_over(request, answer)


def _hand_over(request: _Request, answer: Answer) -> None:
    """Call the request's callback; a callback that raises must not end the lane."""
    try:
        request.done(answer)
    except Exception:
        _LOG.exception("the callback of request %d raised", request.ticket)
