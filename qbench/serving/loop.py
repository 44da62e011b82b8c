"""The threads around the batcher: some that encode ahead, and one for each lane.

NOTE: there is no dispatcher thread. A lane that is free asks the batcher itself under the one
lock; a dispatcher would add a hand-over between threads to each batch, which on few cores
costs more than the decision.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeAlias

from qbench.serving.batcher import Batcher
from qbench.serving.clock import steady
from qbench.serving.cost import BatchCost
from qbench.serving.decisions import (
    ANY_TIME,
    Accept,
    BatchLimits,
    Dispatch,
    Refuse,
    Shed,
    Terms,
)
from qbench.serving.encoders import Encoders
from qbench.serving.failures import CancelledError, ClosedError, HungError, RefusedError, ShedError
from qbench.serving.flights import Flight, Lane, LoopOptions, Pending, answer_all, hand_over, settle
from qbench.serving.request import Answer, Done, Encoded, Run, Work, token_count
from qbench.serving.running import run_batch

__all__ = ["LoopOptions", "RefusedError", "ServingLoop"]

_LOG = logging.getLogger(__name__)
_LONGEST_LOOK_S = 0.1  # deadlines are looked at so often while all lanes are busy
#: A batch that is done, whether it failed, and its seconds of work where they are known.
_Finished: TypeAlias = tuple[int, bool, float | None]
_WATCHES = 8  # looks at a lane within the time that it may hang


class ServingLoop:
    """Serves one engine: a queue, a batcher and a thread for each lane.

    Use it as a context manager; leaving it answers what was accepted and ends the threads.
    A request whose batch makes the engine raise is run again in halves of that batch, until
    only the bad ones fail; a batch that hangs fails as a whole. The loop goes on in each case.
    Callbacks run in a lane's thread, so they must be short.
    """

    def __init__(
        self,
        lanes: Sequence[Run],
        work: Work,
        limits: BatchLimits,
        options: LoopOptions | None = None,
    ) -> None:
        """Start serving.

        Args:
            lanes: What runs a batch, one for each lane; a lane is used by one thread.
            work: How to encode, pad and decode.
            limits: Limits of the queue and of a batch; their ``lanes`` is taken from above.
            options: What else it may do.
        """
        self._work, self._options = work, options or LoopOptions()
        self._clock = steady(self._options.clock)
        self.batcher = Batcher(replace(limits, lanes=len(lanes)), self._options.model)
        self.dispatches: dict[str, int] = {}  # batches by the reason why they went
        self.counts: Counter[str] = Counter()  # requests by what became of them
        self._lock = threading.Lock()
        self._batches = threading.Condition(self._lock)
        self._requests: dict[int, Pending] = {}
        self._closing = False
        self._ended = threading.Event()
        self._lanes = [Lane(index, run) for index, run in enumerate(lanes)]
        self._encoders: Encoders | None = None
        for lane in self._lanes:
            self._start_lane(lane)
        if work.encode is not None:
            self._encoders = Encoders(
                work.encode,
                self._lock,
                limits,
                (self._take_encoded, self._fail_unready),
                self._clock,
            )
            self._encoders.start(self._options.encoders)
        if self._options.hang_s is not None:
            watch = threading.Thread(
                target=self._watch, args=(self._options.hang_s,), name="watchdog", daemon=True
            )
            watch.start()

    def __enter__(self) -> ServingLoop:
        """Return the loop, which already serves."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Drain and end the threads."""
        self.close()

    @property
    def refused(self) -> int:
        """Requests that were refused."""
        return self.counts["refused"]

    def submit(self, payload: Any, done: Done, terms: Terms = ANY_TIME) -> Accept | Refuse:
        """Hand a request in; ``done`` gets its answer, exactly once, if it is accepted.

        Args:
            payload: What the encoder takes, or an encoded request (a mapping).
            done: Called with the answer.
            terms: Tenant, class and deadline; the deadline is a time of the loop's clock.

        Raises:
            MeasurementError: If there is no encoder and the payload is no encoded request.
        """
        encoded = self._work.encode is None or isinstance(payload, Mapping)
        tokens = token_count(payload) if encoded else 0
        lost: list[Pending] = []
        with self._lock:
            now_s = self._clock()
            decision = self.batcher.admit(now_s, terms)
            if isinstance(decision, Refuse):
                self.counts["refused"] += 1
                return decision
            self.counts["accepted"] += 1
            for ticket in decision.displaced:
                lost.append(self._forget(ticket))
            request = Pending(payload, done, decision.ticket, now_s)
            self._requests[decision.ticket] = request
            if encoded:
                self._make_ready(request, payload, tokens, (now_s, now_s))
                self._batches.notify()
            elif self._encoders is not None:
                self._encoders.put(request, terms)
        for loser in lost:
            self._fail(loser, ShedError.for_place(self.batcher.retry_s()), "displaced")
        return decision

    def cancel(self, ticket: int) -> bool:
        """Take a request back; return whether it had not begun to run.

        Its callback gets a ``CancelledError`` then; else it gets its answer as ever.
        """
        with self._lock:
            request = self._requests.get(ticket)
            if request is None or not self.batcher.withdraw(ticket):
                return False
            self._forget(ticket)
            self._batches.notify_all()  # a closing lane may have waited for this one
        self._fail(request, CancelledError(), "cancelled")
        return True

    def _forget(self, ticket: int) -> Pending:
        """Return a request that is withdrawn, and hold it no longer; the lock is held."""
        if self._encoders is not None:
            self._encoders.discard(ticket)
        return self._requests.pop(ticket)

    def model(self) -> BatchCost:
        """Return what batches cost by now; a copy."""
        with self._lock:
            return copy.deepcopy(self.batcher.model)

    def hold(self, scale: float, token_budget: int | None = None) -> None:
        """Hold batches to a share of their limits, or to another budget."""
        with self._lock:
            self.batcher.hold(scale, token_budget)

    def ask(self, payload: Any, terms: Terms = ANY_TIME) -> Future[Answer]:
        """Hand a request in and return a future of its answer.

        The future raises what failed the request, ``RefusedError`` if it was refused. A future
        that is cancelled takes its request out of the queue.
        """
        future: Future[Answer] = Future()
        decision = self.submit(payload, lambda answer: settle(future, answer), terms)
        if isinstance(decision, Refuse):
            future.set_exception(RefusedError(decision))
            return future
        ticket = decision.ticket
        future.add_done_callback(lambda one: one.cancelled() and self.cancel(ticket))
        return future

    def close(self) -> None:
        """Refuse new requests, answer the accepted ones and end the threads."""
        self.drain(None)

    def drain(self, limit_s: float | None) -> bool:
        """Refuse new requests and answer the accepted ones; return whether all were served.

        Args:
            limit_s: Longest time to wait, seconds; what is left then fails with
                ``ClosedError``. ``None`` waits for the last one.
        """
        with self._lock:
            self._closing = True
            self.batcher.close()
            self._batches.notify_all()
            if self._encoders is not None:
                self._encoders.close()
        until_s = None if limit_s is None else time.perf_counter() + limit_s
        while (thread := self._next_thread()) is not None:
            left_s = None if until_s is None else until_s - time.perf_counter()
            if left_s is not None and left_s <= 0:
                break
            thread.join(left_s)
        served = not self._abandon()
        self._ended.set()
        return served

    def _next_thread(self) -> threading.Thread | None:
        """Return a thread that still serves; one that replaced another is among them."""
        with self._lock:
            threads = [lane.thread for lane in self._lanes]
        mine = threading.current_thread()
        threads += self._encoders.threads if self._encoders is not None else []
        return next((t for t in threads if t is not None and t.is_alive() and t is not mine), None)

    def _abandon(self) -> int:
        """Fail whatever was not served in time; return how many that were."""
        with self._lock:
            left = list(self._requests.values())
            for request in left:
                self.batcher.withdraw(request.ticket)
                self._forget(request.ticket)
            for lane in self._lanes:
                if lane.flight is not None:
                    left += lane.flight[1]
                    lane.gone, lane.flight = True, None
            self._batches.notify_all()
        for request in left:
            self._fail(request, ClosedError(), "closed")
        return len(left)

    def _start_lane(self, lane: Lane, reopen: Callable[[int], Run] | None = None) -> None:
        lane.thread = threading.Thread(
            target=self._serve_lane, args=(lane, reopen), name=f"lane-{lane.index}", daemon=True
        )
        lane.thread.start()

    def _fail(self, request: Pending, error: Exception, what: str) -> None:
        """Answer a request that never ran; the lock is not held."""
        with self._lock:
            self.counts[what] += 1
        hand_over(request, Answer(None, error, None, 0, request.tokens, 0))

    # --- what the encoders call -------------------------------------------------------------

    def _take_encoded(
        self,
        group: Sequence[Pending],
        encoded: Sequence[Encoded],
        tokens: Sequence[int],
        start_s: float,
    ) -> None:
        end_s = self._clock()
        with self._lock:
            for request, item, count in zip(group, encoded, tokens, strict=True):
                if request.ticket in self._requests:  # it may have been taken back meanwhile
                    self._make_ready(request, item, count, (start_s, end_s))
            self._batches.notify(len(group))

    def _make_ready(
        self, request: Pending, encoded: Encoded, tokens: int, span_s: tuple[float, float]
    ) -> None:
        """Put an encoded request before the batcher; the lock is held."""
        request.encoded, request.tokens = encoded, tokens
        request.encode_start_s, request.encode_end_s = span_s
        self.batcher.ready(request.ticket, tokens, span_s[1])

    def _fail_unready(self, request: Pending, error: Exception) -> None:
        with self._lock:
            if self._requests.pop(request.ticket, None) is None:
                return
            self.batcher.withdraw(request.ticket)
            self._batches.notify_all()  # a closing lane may have waited for this one
        self._fail(request, error, "failed")

    # --- the lanes' threads ---------------------------------------------------------------

    def _serve_lane(self, lane: Lane, reopen: Callable[[int], Run] | None) -> None:
        if reopen is not None:
            try:
                lane.run = reopen(lane.index)
            except Exception:  # whatever the runtime raises: the lane's old engine may still do
                _LOG.exception("lane %d cannot be opened again; its engine stays", lane.index)
        pads, finished, clock = self._options.pads, None, self._options.work_clock
        work = self._work if pads is None else replace(self._work, pad=pads())
        while (taken := self._take_batch(lane, finished)) is not None:
            decision, requests, _ = taken
            began_s = clock() if clock is not None else 0.0
            outcome = run_batch(
                lane.run, work, [request.encoded for request in requests], self._clock
            )
            with self._lock:
                if lane.gone:
                    return
                lane.flight = None
                self.counts["failed"] += len(outcome.errors)
                self.counts["answered"] += len(requests) - len(outcome.errors)
                self.counts["reruns"] += outcome.reruns
            answer_all(taken, outcome, self._clock)
            work_s = clock() - began_s if clock is not None else None
            finished = decision.batch, bool(outcome.errors or outcome.reruns), work_s

    def _take_batch(self, lane: Lane, finished: _Finished | None) -> Flight | None:
        """Give back the lane, wait for a batch and take it; ``None`` when all is served."""
        while True:
            lost: list[tuple[Pending, Shed]] = []
            with self._lock:
                if finished is not None:
                    batch, failed, work_s = finished
                    self.batcher.complete(batch, self._clock(), failed, work_s)
                    finished = None
                decision = self._next_batch(lane, lost)
            for request, shed in lost:
                self._fail(request, ShedError.for_deadline(shed), "shed")
            if not isinstance(decision, bool):
                return decision
            if decision:
                return None

    def _next_batch(self, lane: Lane, lost: list[tuple[Pending, Shed]]) -> Flight | bool:
        """Return a batch, or whether the lane may end; the lock is held, and given up to wait.

        ``False`` means that requests were shed: they must be told without the lock.
        """
        while True:
            now_s = self._clock()
            decision = self.batcher.decide(now_s)
            for shed in self.batcher.take_shed():
                lost.append((self._forget(shed.ticket), shed))
            if isinstance(decision, Dispatch):
                requests = [self._requests.pop(ticket) for ticket in decision.tickets]
                reason = str(decision.reason)
                self.dispatches[reason] = self.dispatches.get(reason, 0) + 1
                if self.batcher.ready_count:
                    self._batches.notify()
                lane.flight, lane.held_s = (decision, requests, now_s), 0.0
                return lane.flight
            if lane.gone or (self._closing and not self.batcher.queued):
                self._batches.notify_all()
                return True
            if lost:
                return False
            until_s = decision.until_s
            self._batches.wait(None if until_s is None else max(until_s - now_s, 0.0))

    # --- the watchdog's thread --------------------------------------------------------------

    def _watch(self, hang_s: float) -> None:
        """Look at the lanes again and again; replace those that hang, shed what is too late.

        NOTE: time on a lane is counted in looks, not read from a clock that may step.
        """
        step_s = min(hang_s / _WATCHES, _LONGEST_LOOK_S)
        while not self._ended.wait(step_s):
            lost: list[tuple[Pending, Exception, str]] = []
            with self._lock:
                self.batcher.expire(self._clock())
                for shed in self.batcher.take_shed():
                    request = self._forget(shed.ticket)
                    lost.append((request, ShedError.for_deadline(shed), "shed"))
                for index, lane in enumerate(self._lanes):
                    if lane.flight is None:
                        continue
                    lane.held_s += step_s
                    if lane.held_s > hang_s:
                        decision, requests, _ = lane.flight
                        lost += [(request, HungError(hang_s), "hung") for request in requests]
                        self._lanes[index] = self._replace(lane, decision.batch)
            for request, error, what in lost:
                self._fail(request, error, what)

    def _replace(self, lane: Lane, batch: int) -> Lane:
        """Give up a lane and start another in its place; the lock is held."""
        lane.gone, lane.flight = True, None
        self.batcher.complete(batch, self._clock(), failed=True)
        self.counts["replaced_lanes"] += 1
        _LOG.error("lane %d hangs and is replaced", lane.index)
        fresh = Lane(lane.index, lane.run)
        self._start_lane(fresh, reopen=self._options.reopen)
        return fresh
