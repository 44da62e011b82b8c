"""Which failure has which status, and when to try again."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from qbench.errors import InputError, MeasurementError
from qbench.serving.failures import (
    CancelledError,
    ClosedError,
    HungError,
    NotANumberError,
    RefusedError,
    ShedError,
)
from qbench.serving.server.terms import BadRequestError

#: What the runtime says where a request, and not the engine, is at fault: sizes that the graph's
#: dimensions allow and its nodes do not, as an odd image where halves are joined again.
_CLIENTS_FAULT = re.compile(
    r"InvalidArgument\b|(Fail|RuntimeException)\b(?!.*allocat).*\b(reshaped?|shapes?|dimensions?)\b",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """How a failure is told.

    Attributes:
        status: HTTP status.
        kind: One word for counts.
        reason: What the client reads.
        retry_after_s: When another try may fit, seconds; ``None`` where it will not.
    """

    status: int
    kind: str
    reason: str
    retry_after_s: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers that go with it."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(math.ceil(self.retry_after_s), 1))}


def failure_of(error: Exception) -> Failure:
    """Return how a failure is told; what nobody foresaw is a 500 without its inner words."""
    told = str(error)
    if isinstance(error, InputError):
        status = error.status if isinstance(error, BadRequestError) else 400
        return Failure(status, "bad_request", told)
    if isinstance(error, RefusedError | ShedError):
        return _turned_away(error)
    if isinstance(error, ClosedError | CancelledError):
        return Failure(503, "closing", told, 1.0)
    if isinstance(error, HungError):
        return Failure(500, "hung", told)
    if isinstance(error, NotANumberError):
        return Failure(500, "not_a_number", told)
    if isinstance(error, MeasurementError) and _CLIENTS_FAULT.match(told):
        return Failure(400, "bad_request", f"the engine refuses these inputs: {told[:300]}")
    return Failure(500, "engine", f"the engine failed on this request ({type(error).__name__})")


def _turned_away(error: RefusedError | ShedError) -> Failure:
    """Tell a request that was not computed, for load or for its deadline."""
    told, retry_s = str(error), error.retry_after_s
    if isinstance(error, RefusedError) and not error.late:
        if retry_s is None:  # it takes nothing any more
            return Failure(503, "closing", told, 1.0)
        return Failure(429, "refused", told, retry_s)
    if retry_s is None:
        return Failure(504, "deadline", told)
    return Failure(429, "displaced", told, retry_s)
