"""A served engine: what a network face drives. Batching, gates, fallback, counts and health.

    service = open_service(engine, workload, settings)        # qbench.serving.opening
    future = service.submit(Request("a text", tenant="a", timeout_s=0.2))
    answer = future.result()                                  # or asyncio.wrap_future(future)
    future.cancel()                                           # the client went away
    service.drain(30.0)                                       # on SIGTERM

A future raises the exceptions of ``qbench.serving.failures``, or the engine's own.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from qbench.serving.clock import steady
from qbench.serving.decisions import BatchLimits, Priority, Refuse, Terms
from qbench.serving.estimator import Demand
from qbench.serving.failures import HungError, RefusedError, ShedError
from qbench.serving.flights import LoopOptions, settle
from qbench.serving.gates import (
    Breaker,
    BreakerRules,
    MemoryGate,
    MemoryRules,
    Route,
    Transition,
)
from qbench.serving.loop import ServingLoop
from qbench.serving.memory import MemoryUse
from qbench.serving.request import STAGES, Answer, Run, Work
from qbench.serving.resizing import Resizer
from qbench.serving.tally import ServiceStats, Tally, sum_counts

_LOG = logging.getLogger(__name__)
_TICK_S = 0.25
_SIZE_TICKS = 20  # the token budget is looked at every 5 s
_KEPT_TRANSITIONS = 256


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asks for.

    Attributes:
        payload: What the encoder takes (a text, or a text and its pair), or an encoded request:
            a mapping from input names to token lists.
        tenant: Who asks.
        priority: The SLA class.
        timeout_s: Seconds after which the answer is worth nothing; ``None`` for no deadline.
    """

    payload: Any
    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Gates:
    """What holds load back, and what answers in the engine's place.

    Attributes:
        breaker: Rules of the circuit breaker. ``None`` takes the usual ones where something can
            answer in the engine's place; where nothing can, only an engine that fails opens it:
            load is refused by the queue already, and an open breaker would refuse all of it.
        memory: Rules of the memory gate.
        read_memory: Measures memory; ``None`` for no memory gate.
        demand: What the token budget is chosen for, again and again as costs become known
            better; ``None`` keeps the budget.
        fallback: Lanes of a cheaper engine that takes the same requests; none by default.
        default: The answer that is given where no fallback engine takes the request, or where it
            fails too; ``None`` refuses.
    """

    breaker: BreakerRules | None = None
    memory: MemoryRules = MemoryRules()
    read_memory: Callable[[], MemoryUse] | None = None
    demand: Demand | None = None
    fallback: Sequence[Run] = ()
    default: Any = None

    def rules(self) -> BreakerRules:
        """Return the rules of the breaker."""
        if self.breaker is not None:
            return self.breaker
        instead = bool(self.fallback) or self.default is not None
        return BreakerRules() if instead else BreakerRules(refused_share=1.0)


class Service:
    """Serves one engine to many callers; safe to call from any thread."""

    def __init__(
        self,
        lanes: Sequence[Run],
        work: Work,
        limits: BatchLimits,
        options: LoopOptions | None = None,
        gates: Gates | None = None,
    ) -> None:
        """Start serving; the lanes should be warm.

        Args:
            lanes: What runs a batch, one for each lane.
            work: How to encode, pad and decode.
            limits: Limits of queue and batch.
            options: Threads, hang limit, clock.
            gates: Circuit breaker, memory gate and fallback.
        """
        self._gates, options = gates or Gates(), options or LoopOptions()
        self._clock = steady(options.clock)
        options = replace(options, clock=self._clock)
        self._lock = threading.Lock()
        self._breaker = Breaker(self._gates.rules())
        self._memory_gate = MemoryGate(self._gates.memory)
        self._memory: MemoryUse | None = None
        self._tally, self._extra = Tally(), Counter[str]()
        self._moves: Counter[str] = Counter()
        self._resizer = Resizer()
        self.transitions: deque[Transition] = deque(maxlen=_KEPT_TRANSITIONS)
        self._draining, self._ended = False, threading.Event()
        self.loop = ServingLoop(lanes, work, limits, options)
        # NOTE: the engine's lanes are opened again by the engine's own opener and padder only.
        plain = replace(options, reopen=None, pads=None, model=None)
        self._fallback = (
            ServingLoop(self._gates.fallback, work, limits, plain) if self._gates.fallback else None
        )
        self._keeper = threading.Thread(target=self._keep, name="gates", daemon=True)
        self._keeper.start()

    def __enter__(self) -> Service:
        """Return the service, which already serves."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Answer what was accepted and end."""
        self.drain(None)

    # --- what callers use -------------------------------------------------------------------

    def submit(self, request: Request) -> Future[Answer]:
        """Take a request and return a future of its answer; cancelling it takes it back.

        Raises:
            MeasurementError: If there is no encoder and the payload is no encoded request.
        """
        future: Future[Answer] = Future()
        now_s = self._clock()
        with self._lock:
            route = self._breaker.route(now_s)
        if route is Route.FALLBACK:
            self._answer_instead(request, future)
            return future

        def done(answer: Answer) -> None:
            self._take(route, answer, now_s)
            settle(future, answer)

        terms = _terms(request, now_s)
        try:
            decision = self.loop.submit(request.payload, done, terms)
        except Exception:
            with self._lock:
                self._breaker.withdrawn(route)
            raise
        if isinstance(decision, Refuse):
            self._refuse(route, decision, future)
        else:
            ticket = decision.ticket
            future.add_done_callback(lambda one: one.cancelled() and self.loop.cancel(ticket))
        return future

    def drain(self, limit_s: float | None = None) -> bool:
        """Take nothing new, answer what was accepted, and end; return whether all was served.

        Args:
            limit_s: Longest time for it; what is left fails with ``ClosedError``.
        """
        self._draining = True
        served = self.loop.drain(limit_s)
        if self._fallback is not None:
            served = self._fallback.drain(limit_s) and served
        self._ended.set()
        self._note([])
        return served

    @property
    def live(self) -> bool:
        """Whether it has not ended."""
        return not self._ended.is_set()

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self.live and not self._draining

    def stats(self) -> ServiceStats:
        """Return what it did so far."""
        batcher = self.loop.batcher
        with self._lock:
            tally = self._tally
            return ServiceStats(
                counts=sum_counts(self.loop.counts, self._extra),
                queued=batcher.queued,
                lanes=batcher.limits.lanes,
                busy_lanes=batcher.limits.lanes - batcher.free_lanes,
                dispatches=dict(self.loop.dispatches),
                batch_sizes={size: round(n) for size, n in sorted(tally.batch_sizes.items())},
                tokens=(tally.tokens, round(tally.padded_tokens)),
                stage_s=dict(zip(STAGES, tally.stage_s, strict=True)),
                latency=tally.latency.copy(),
                breaker=self._breaker.state,
                batch_scale=self._memory_gate.scale,
                transitions=dict(self._moves),
                memory=self._memory,
            )

    # --- what becomes of a request ------------------------------------------------------------

    def _take(self, route: Route, answer: Answer, submitted_s: float) -> None:
        """Count an answer and tell the breaker."""
        now_s = self._clock()
        with self._lock:
            self._tell_breaker(route, answer, (submitted_s, now_s))
            if answer.times is not None and answer.error is None:
                self._tally.add(answer, answer.times)

    def _tell_breaker(self, route: Route, answer: Answer, span_s: tuple[float, float]) -> None:
        """Tell the breaker of an answer."""
        error, (submitted_s, now_s), breaker = answer.error, span_s, self._breaker
        waited_ms = (now_s - submitted_s) * 1e3
        if error is None or _engine_failed(answer):
            breaker.answered(route, waited_ms, error is not None, now_s)
        elif isinstance(error, ShedError) and error.retry_after_s is not None:
            breaker.refused(route, now_s)  # its place in a full queue went to another
        elif isinstance(error, ShedError):
            breaker.shed(route, waited_ms, now_s)
        else:  # taken back, not encodable, or the end
            breaker.withdrawn(route)

    def _refuse(self, route: Route, refusal: Refuse, future: Future[Answer]) -> None:
        now_s = self._clock()
        with self._lock:
            if refusal.retry_after_s is not None:
                self._breaker.refused(route, now_s)
            else:
                self._breaker.withdrawn(route)
        future.set_exception(RefusedError(refusal))

    def _answer_instead(self, request: Request, future: Future[Answer]) -> None:
        """Let the fallback answer, or the default; refuse where there is neither."""
        gates, fallback = self._gates, self._fallback
        if fallback is not None:
            terms = _terms(request, self._clock())
            decision = fallback.submit(
                request.payload, lambda answer: self._pass_on(future, answer), terms
            )
            if not isinstance(decision, Refuse):
                ticket = decision.ticket
                future.add_done_callback(lambda one: one.cancelled() and fallback.cancel(ticket))
                self._count("fallback")
                return
            if gates.default is None:
                future.set_exception(RefusedError(decision))
                self._count("refused")
                return
        if gates.default is not None:
            self._give_default(future)
        else:
            retry_s = gates.rules().open_s
            words = "the engine cannot keep up, and there is no fallback"
            future.set_exception(RefusedError(Refuse(words, retry_s)))
            self._count("refused_by_breaker")

    def _pass_on(self, future: Future[Answer], answer: Answer) -> None:
        """Hand over what the fallback came to; where it failed too the default is given."""
        failed = _engine_failed(answer)
        if failed:
            self._count("fallback_failed")
        if failed and self._gates.default is not None:
            self._give_default(future)
        else:
            settle(future, answer, "fallback")

    def _give_default(self, future: Future[Answer]) -> None:
        settle(future, Answer(self._gates.default, None, None, 0, 0, 0, "default"))
        self._count("default")

    def _count(self, what: str) -> None:
        with self._lock:
            self._extra[what] += 1

    # --- the gates' thread --------------------------------------------------------------------

    def _keep(self) -> None:
        """Look at memory and let the gates' time pass, until the end."""
        ticks = 0
        while not self._ended.wait(_TICK_S):
            self.look()
            ticks += 1
            if ticks % _SIZE_TICKS == 0 and self._gates.demand is not None:
                self.size(self._gates.demand)

    def size(self, demand: Demand) -> None:
        """Look at the token budget anew, with what batches cost by now."""
        model, now = self.loop.model(), self.loop.batcher.limits.token_budget
        if not model.known or self._memory_gate.scale < 1:
            return
        move = self._resizer.look(model, demand, now)
        if move is None:
            return
        self.loop.hold(1.0, move.budget)
        gain = (move.expected.requests_per_s, move.before.requests_per_s)
        words = f"{gain[0]:.1f}/s expected against {gain[1]:.1f}/s"
        change = Transition(self._clock(), "budget", str(now), str(move.budget), words)
        with self._lock:
            self._moves["budget"] += 1
            self.transitions.append(change)
        _LOG.info("token budget: %s -> %s (%s)", change.before, change.after, words)

    def look(self) -> None:
        """Measure memory and let the gates' time pass; log what changed."""
        read = self._gates.read_memory
        memory, now_s = (read() if read is not None else None), self._clock()
        changes: list[Transition] = []
        with self._lock:
            self._memory = memory
            if memory is not None:
                change = self._memory_gate.observe(memory.used, memory.limit, now_s)
                if change is not None:
                    changes.append(change)
            self._breaker.tick(now_s)
        if changes:
            for loop in (self.loop, *([self._fallback] if self._fallback is not None else [])):
                loop.hold(self._memory_gate.scale)
        self._note(changes)

    def _note(self, changes: list[Transition]) -> None:
        """Count and log changes, the breaker's since the last time among them."""
        with self._lock:
            changes += self._breaker.take_changes()
            for change in changes:
                self._moves[f"{change.gate}:{change.after}"] += 1
                self.transitions.append(change)
        for change in changes:
            _LOG.warning(
                "%s: %s -> %s (%s)", change.gate, change.before, change.after, change.reason
            )


def _engine_failed(answer: Answer) -> bool:
    """Whether an engine failed a request: it ran or hung; all else is no engine's fault."""
    ran = answer.times is not None or isinstance(answer.error, HungError)
    return ran and answer.error is not None


def _terms(request: Request, now_s: float) -> Terms:
    deadline_s = None if request.timeout_s is None else now_s + request.timeout_s
    return Terms(request.tenant, request.priority, deadline_s)
