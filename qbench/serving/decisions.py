"""The batcher's words: what goes into a decision, and the decisions themselves; frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from qbench.errors import ConfigError


class Priority(IntEnum):
    """The SLA class of a request; the lower number goes first."""

    INTERACTIVE = 0
    BATCH = 1


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a request is served.

    Attributes:
        tenant: Who asks; tenants share lanes and queue by their weights.
        priority: The SLA class.
        deadline_s: When its answer is worth nothing any more, on the batcher's clock; ``None``
            for never.
    """

    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE
    deadline_s: float | None = None


ANY_TIME = Terms()


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What bounds the queue and a batch.

    Attributes:
        token_budget: Most padded tokens of a batch of more than one request.
        max_wait_s: Longest time that a free lane lets the oldest request wait, seconds.
        queue: Most requests that were accepted and are in no batch yet.
        max_padding: Largest share of a batch's padded tokens that is padding.
        max_batch: Most requests of a batch, or ``None`` for no limit but the budget.
        lanes: Batches that can run at once.
        fixed_size: Batches of so many requests in the order of their arrival, whatever their
            lengths, as servers without a token budget form them; ``None`` for the budget.
        odd_lane: Whether requests of odd size may hold one lane only while others wait.
        ageing_s: Seconds after which a waiting ``batch`` request counts as ``interactive``.
        weights: Share of each tenant; a tenant that is not named has weight 1.
    """

    token_budget: int = 256
    max_wait_s: float = 0.005
    queue: int = 256
    max_padding: float = 0.2
    max_batch: int | None = None
    lanes: int = 1
    fixed_size: int | None = None
    odd_lane: bool = False
    ageing_s: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse limits under which nothing could be served.

        Raises:
            ConfigError: If a limit is out of its range; the message names it.
        """
        for name, value in (
            ("token_budget", self.token_budget),
            ("queue", self.queue),
            ("lanes", self.lanes),
            ("max_batch", 1 if self.max_batch is None else self.max_batch),
            ("fixed_size", 1 if self.fixed_size is None else self.fixed_size),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}; allowed: 1 or more")
        for name, seconds in (("max_wait_s", self.max_wait_s), ("ageing_s", self.ageing_s)):
            if not seconds >= 0:
                raise ConfigError(f"{name} is {seconds}; allowed: 0 or more seconds")
        if not 0 <= self.max_padding < 1:
            raise ConfigError(f"max_padding is {self.max_padding}; allowed: a share from 0 to 1")
        for tenant, weight in self.weights.items():
            if not 0 < weight < float("inf"):
                raise ConfigError(
                    f"weights: tenant {tenant!r} has weight {weight}; allowed: more than 0"
                )


class Reason(StrEnum):
    """Why a batch went when it did."""

    FULL = "full"  # no further request of its length fits
    OVERDUE = "overdue"  # its oldest request waited max_wait_s
    CONTENDED = "contended"  # other requests wait for the lane
    NO_GAIN = "no_gain"  # waiting for another request would not pay
    DRAIN = "drain"  # the batcher is closed


@dataclass(frozen=True, slots=True)
class Accept:
    """The request is in the queue.

    Attributes:
        ticket: Its name from now on.
        displaced: Tickets that lost their place in a full queue to it, for good: they were the
            youngest of a tenant that held more than its share, or of a lower class.
    """

    ticket: int
    displaced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request is not in the queue.

    Attributes:
        reason: Why, in words.
        retry_after_s: When another try is likely to find room, seconds; ``None`` for never.
        late: Whether its deadline had passed.
    """

    reason: str
    retry_after_s: float | None
    late: bool = False


@dataclass(frozen=True, slots=True)
class Shed:
    """A queued request that would miss its deadline: it is given up and never computed.

    Attributes:
        ticket: The request.
        late_s: By how much its answer would have come too late at best, seconds.
    """

    ticket: int
    late_s: float


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A batch that must run now on a free lane.

    Attributes:
        batch: Serial number, to be given back to ``complete``.
        tickets: Its requests, the oldest first.
        longest: Tokens of its longest request.
        tokens: Tokens without padding.
        reason: Why it goes now.
    """

    batch: int
    tickets: tuple[int, ...]
    longest: int
    tokens: int
    reason: Reason

    @property
    def padded_tokens(self) -> int:
        """Tokens with padding."""
        return self.longest * len(self.tickets)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to run: ask again at ``until_s``, or on the next event where it is ``None``."""

    until_s: float | None
