"""Gates: what holds load back. Pure state machines; measurements and the time come in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from qbench.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Transition:
    """A gate changed its state.

    Attributes:
        at_s: When, on the gate's clock.
        gate: ``memory`` or ``breaker``.
        before: The state that it left.
        after: The state that it took.
        reason: Why, in words.
    """

    at_s: float
    gate: str
    before: str
    after: str
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """When the memory gate closes and opens.

    Attributes:
        high: Share of the limit from which on the batch limit is halved.
        low: Share below which it may be restored.
        settle_s: Shortest time between two halvings: freed memory must have time to show.
        hold_s: Time below ``low`` after which the batch limit is doubled again.
        least: The batch limit is never scaled below this.
    """

    high: float = 0.9
    low: float = 0.75
    settle_s: float = 1.0
    hold_s: float = 5.0
    least: float = 1 / 16

    def __post_init__(self) -> None:
        """Refuse rules without hysteresis.

        Raises:
            ConfigError: If ``low`` is not below ``high``.
        """
        if not 0 < self.low < self.high <= 1:
            raise ConfigError(
                f"memory gate: low is {self.low} and high {self.high}; allowed: 0 < low < high <= 1"
            )


class MemoryGate:
    """Halves the batch limit where memory runs short, and restores it with hysteresis."""

    def __init__(self, rules: MemoryRules | None = None) -> None:
        """Begin open: ``scale`` is 1."""
        self.rules = rules or MemoryRules()
        self.scale = 1.0
        self._halved_s = float("-inf")
        self._low_since_s: float | None = None

    def observe(self, used: int, limit: int, now_s: float) -> Transition | None:
        """Take a measurement of memory, bytes; return what it changed."""
        rules, share = self.rules, used / max(limit, 1)
        if share >= rules.low:
            self._low_since_s = None
        if share >= rules.high:
            if self.scale <= rules.least or now_s - self._halved_s < rules.settle_s:
                return None
            self._halved_s = now_s
            return self._change(max(self.scale / 2, rules.least), share, now_s)
        if share < rules.low and self.scale < 1:
            if self._low_since_s is None:
                self._low_since_s = now_s
            elif now_s - self._low_since_s >= rules.hold_s:
                self._low_since_s = now_s
                return self._change(min(self.scale * 2, 1.0), share, now_s)
        return None

    def _change(self, scale: float, share: float, now_s: float) -> Transition:
        before, self.scale = self.scale, scale
        words = f"memory at {share:.0%} of its limit"
        return Transition(now_s, "memory", f"{before:g}", f"{scale:g}", words)


class BreakerState(StrEnum):
    """Where requests go."""

    CLOSED = "closed"  # to the engine
    OPEN = "open"  # to the fallback
    HALF_OPEN = "half_open"  # a few probes to the engine, the rest to the fallback


class Route(StrEnum):
    """Where one request goes."""

    ENGINE = "engine"
    PROBE = "probe"
    FALLBACK = "fallback"


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """When the breaker opens and closes.

    Attributes:
        p99_ms: Limit of the 99th percentile of latency; ``None`` for none.
        refused_share: Share of a window's requests refused by a full queue that opens it.
        failed_share: Share of a window's requests failed by the engine that opens it.
        window_s: Length of a window; windows follow one another.
        least: Requests that a window must hold to be judged.
        open_s: Time until probes are tried.
        probes: Probes that must all do well to close it.
    """

    p99_ms: float | None = None
    refused_share: float = 0.1
    failed_share: float = 0.5
    window_s: float = 5.0
    least: int = 20
    open_s: float = 5.0
    probes: int = 5

    def __post_init__(self) -> None:
        """Refuse rules under which it never opens or closes.

        Raises:
            ConfigError: If a rule is out of its range; the message names it.
        """
        for name, value in (("window_s", self.window_s), ("open_s", self.open_s)):
            if not value > 0:
                raise ConfigError(f"breaker: {name} is {value}; allowed: more than 0 seconds")
        for name, count in (("least", self.least), ("probes", self.probes)):
            if count < 1:
                raise ConfigError(f"breaker: {name} is {count}; allowed: 1 or more")


class Breaker:
    """Sends requests to the fallback while the engine cannot keep up."""

    def __init__(self, rules: BreakerRules | None = None) -> None:
        """Begin closed."""
        self.rules = rules or BreakerRules()
        self.state = BreakerState.CLOSED
        self._changes: list[Transition] = []
        self._opened_s = 0.0
        self._sent = self._good = 0  # probes
        self._window_s = float("-inf")
        self._latencies: list[float] = []
        self._refused = self._failed = 0

    def route(self, now_s: float) -> Route:
        """Return where the next request goes."""
        self.tick(now_s)
        if self.state is BreakerState.CLOSED:
            return Route.ENGINE
        if self.state is BreakerState.HALF_OPEN and self._sent < self.rules.probes:
            self._sent += 1
            return Route.PROBE
        return Route.FALLBACK

    def answered(self, route: Route, latency_ms: float, failed: bool, now_s: float) -> None:
        """Take what became of a request that the engine was given."""
        if route is Route.PROBE:
            slow = self.rules.p99_ms is not None and latency_ms > self.rules.p99_ms
            words = "a probe failed" if failed else f"a probe took {latency_ms:.1f} ms"
            self._judge_probe(not (failed or slow), words, now_s)
        elif route is Route.ENGINE and self.state is BreakerState.CLOSED:
            self.tick(now_s)
            self._failed += failed
            self._latencies.append(latency_ms)

    def refused(self, route: Route, now_s: float) -> None:
        """Note that the queue was full for a request."""
        if route is Route.PROBE:
            self._judge_probe(False, "a probe found the queue full", now_s)
        elif self.state is BreakerState.CLOSED:
            self.tick(now_s)
            self._refused += 1

    def shed(self, route: Route, waited_ms: float, now_s: float) -> None:
        """Note that a request was given up for its deadline: the engine did not fail it.

        How long it waited counts as its latency; a probe that never ran tells nothing.
        """
        if route is Route.PROBE:
            self.withdrawn(route)
        else:
            self.answered(route, waited_ms, False, now_s)

    def withdrawn(self, route: Route) -> None:
        """Note that a request never came to the engine: a probe's place is free again."""
        if route is Route.PROBE and self.state is BreakerState.HALF_OPEN:
            self._sent = max(self._sent - 1, self._good)

    def tick(self, now_s: float) -> None:
        """Let time pass: judge a window that is over, or begin to probe."""
        if self.state is BreakerState.OPEN and now_s - self._opened_s >= self.rules.open_s:
            self._sent = self._good = 0
            self._change(BreakerState.HALF_OPEN, f"open for {self.rules.open_s:g} s", now_s)
        elif self.state is BreakerState.CLOSED:
            if self._window_s == float("-inf"):
                self._window_s = now_s
            elif now_s - self._window_s >= self.rules.window_s:
                reason = next(self._complaints(), None)
                self._begin_window(now_s)
                if reason is not None:
                    self._open(reason, now_s)

    def take_changes(self) -> tuple[Transition, ...]:
        """Return the transitions since the last time."""
        changes, self._changes = tuple(self._changes), []
        return changes

    def _begin_window(self, now_s: float) -> None:
        self._window_s = now_s
        self._latencies = []
        self._refused = self._failed = 0

    def _complaints(self) -> Iterator[str]:
        """Yield what was wrong with the window."""
        rules, answered = self.rules, len(self._latencies)
        total = answered + self._refused
        if total < rules.least:
            return
        if self._refused > rules.refused_share * total:
            yield f"the queue was full for {self._refused} of {total} requests"
        if self._failed > rules.failed_share * answered:
            yield f"the engine failed {self._failed} of {answered} requests"
        if rules.p99_ms is not None and answered:
            ordered = sorted(self._latencies)
            p99_ms = ordered[min(int(0.99 * answered), answered - 1)]
            if p99_ms > rules.p99_ms:
                yield f"P99 was {p99_ms:.1f} ms, over {rules.p99_ms:g} ms"

    def _judge_probe(self, good: bool, words: str, now_s: float) -> None:
        if self.state is not BreakerState.HALF_OPEN:
            return  # a late probe of an earlier try
        if not good:
            self._open(words, now_s)
            return
        self._good += 1
        if self._good >= self.rules.probes:
            self._change(BreakerState.CLOSED, f"{self._good} probes did well", now_s)
            self._begin_window(now_s)

    def _open(self, reason: str, now_s: float) -> None:
        self._opened_s = now_s
        self._change(BreakerState.OPEN, reason, now_s)

    def _change(self, state: BreakerState, reason: str, now_s: float) -> None:
        self._changes.append(Transition(now_s, "breaker", str(self.state), str(state), reason))
        self.state = state
