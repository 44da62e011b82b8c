"""A request and a lane as the loop holds them, and how an answer is handed over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from qbench.serving.clock import Clock
from qbench.serving.cost import BatchCost
from qbench.serving.decisions import Dispatch
from qbench.serving.request import Answer, Done, Encoded, Pad, Run, Times
from qbench.serving.running import Outcome

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """What a loop may do beside batching.

    Attributes:
        encoders: Threads that encode ahead.
        hang_s: Seconds after which a batch that has not come back is given up; ``None`` for
            never.
        reopen: Opens a lane in place of one that hangs, by its index; the lane's own engine is
            used again by default.
        pads: Makes the padder of each lane, with buffers of its own; ``Work.pad`` by default.
        model: What batches cost, as far as it is known.
        work_clock: CPU seconds of the thread that asks (``time.thread_time``), where lanes compute
            on their own threads; ``None`` where something else does, a device say.
        clock: A clock, seconds; where it steps back, time goes on at its pace.
    """

    encoders: int = 1
    hang_s: float | None = None
    reopen: Callable[[int], Run] | None = None
    pads: Callable[[], Pad] | None = None
    model: BatchCost | None = None
    clock: Clock = time.perf_counter
    work_clock: Clock | None = None


@dataclass(slots=True)
class Pending:
    """A request on its way; each field is written once, by the thread that holds it."""

    payload: Any
    done: Done
    ticket: int
    submitted_s: float
    encoded: Encoded = field(default_factory=dict)
    tokens: int = 0
    encode_start_s: float = 0.0
    encode_end_s: float = 0.0


#: A batch on a lane: the decision, its requests, and when it was dispatched.
Flight: TypeAlias = tuple[Dispatch, list[Pending], float]


@dataclass(slots=True, eq=False)
class Lane:
    """A lane's thread and what runs on it; the loop's lock guards it."""

    index: int
    run: Run
    flight: Flight | None = None
    held_s: float = 0.0  # as the watchdog saw it
    gone: bool = False  # given up: whatever it still brings is dropped
    thread: threading.Thread | None = None


def settle(future: Future[Answer], answer: Answer, served_by: str | None = None) -> None:
    """Give a future its answer, or the error in it; a cancelled one is left alone."""
    if not future.set_running_or_notify_cancel():
        return  # the caller no longer wants it
    if answer.error is not None:
        future.set_exception(answer.error)
    else:
        future.set_result(answer if served_by is None else replace(answer, served_by=served_by))


def hand_over(request: Pending, answer: Answer) -> None:
    """Call the request's callback; a callback that raises must not end the lane."""
    try:
        request.done(answer)
    except Exception:
        _LOG.exception("the callback of request %d raised", request.ticket)


def answer_all(flight: Flight, outcome: Outcome, clock: Clock) -> None:
    """Hand each request of a batch its answer."""
    decision, requests, dispatched_s = flight
    for place, request in enumerate(requests):
        times = Times(
            request.submitted_s,
            request.encode_start_s,
            request.encode_end_s,
            dispatched_s,
            outcome.start_s,
            outcome.end_s,
            clock(),
        )
        answer = Answer(
            outcome.values[place],
            outcome.errors.get(place),
            times,
            len(requests),
            request.tokens,
            decision.padded_tokens,
        )
        hand_over(request, answer)
