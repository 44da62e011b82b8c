"""What the addresses of the server share: the model, the limits, the service once it is warm."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qbench.errors import did_you_mean
from qbench.serving.server import documents
from qbench.serving.server.failing import Failure
from qbench.serving.server.terms import BadRequestError
from qbench.serving.service import Service

if TYPE_CHECKING:
    from qbench.serving.server.contract import Contract
    from qbench.serving.server.metrics import Metrics
    from qbench.serving.server.wire import RequestLimits

STARTING = Failure(503, "starting", "the engine is warming up; try again", 1.0)
CLOSING = Failure(503, "closing", "the server is going down; ask another one", 1.0)


@dataclass(slots=True)
class Face:
    """What the addresses share.

    Attributes:
        model: Name of the model.
        contract: What the engine takes and gives.
        limits: What a request may be.
        metrics: Counts.
        body_timeout_s: Longest time until a body is here.
        max_wait_ms: Longest wait of the batcher, for the configuration that is told.
        service: The served engine, once it is warm.
        draining: Whether nothing new is taken.
        inside: Requests that were taken and have no answer yet.
        idle: Set while there is none.
    """

    model: str
    contract: Contract
    limits: RequestLimits
    metrics: Metrics
    body_timeout_s: float = 30.0
    max_wait_ms: float = 5.0
    service: Service | None = None
    draining: bool = False
    inside: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.service is not None and self.service.ready and not self.draining

    def check_ready(self) -> Service:
        """Return the service.

        Raises:
            UnreadyError: If it is not warm yet, or going down.
        """
        if self.draining:
            raise UnreadyError(CLOSING)
        if self.service is None:
            raise UnreadyError(STARTING)
        return self.service

    def check_model(self, given: str | None, version: str | None) -> None:
        """Check the model and version of an address; ``None`` where it names none.

        Raises:
            BadRequestError: If another one is served here.
        """
        if given not in (None, self.model):
            near = did_you_mean(given[:256], [self.model])
            raise BadRequestError(
                f"unknown model {given[:256]!r}{near}; served here: {self.model!r}", 404
            )
        if version not in (None, documents.VERSION):
            raise BadRequestError(
                f"model {given!r} has no version {version[:40]!r}; served here: "
                f"{documents.VERSION!r}",
                404,
            )

    def enter(self) -> None:
        """Note that a request was taken."""
        self.inside += 1
        self.idle.clear()

    def leave(self) -> None:
        """Note that a request that was taken has its answer, written."""
        self.inside -= 1
        if not self.inside:
            self.idle.set()


class UnreadyError(Exception):
    """Nothing is taken now."""

    def __init__(self, failure: Failure) -> None:
        """Take how it is told."""
        super().__init__(failure.reason)
        self.failure = failure
