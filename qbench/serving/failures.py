"""Why a request got no value: one exception for each case, so that a face can map them.

    MeasurementError
    ├── RefusedError     not taken: the queue is full, or closing (retry_after_s: when again)
    ├── ShedError        taken, and given up: for its deadline, or for another's place
    ├── CancelledError   the caller went away before it ran
    ├── HungError        the engine did not come back in time; its lane was replaced
    ├── NotANumberError  the engine answered NaN for this request
    └── ClosedError      the server ended before it could run

Any other exception is the engine's own, or the encoder's.
"""

from __future__ import annotations

from qbench.errors import MeasurementError
from qbench.serving.decisions import Refuse, Shed


class RefusedError(MeasurementError):
    """The server refused a request; ``retry_after_s`` says when another try may fit.

    ``late`` says that its deadline had passed.
    """

    def __init__(self, refusal: Refuse) -> None:
        """Take what the batcher said."""
        retry_s = refusal.retry_after_s
        hint = "" if retry_s is None else f"; try again in {retry_s * 1000:.0f} ms"
        super().__init__(f"request refused: {refusal.reason}{hint}")
        self.retry_after_s, self.late = retry_s, refusal.late


class ShedError(MeasurementError):
    """A request that waited was given up; ``retry_after_s`` as for ``RefusedError``."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        """Say why."""
        super().__init__(f"request shed: {reason}")
        self.retry_after_s = retry_after_s

    @classmethod
    def for_deadline(cls, shed: Shed) -> ShedError:
        """Return the error of a request that would miss its deadline."""
        return cls(f"it would miss its deadline by {shed.late_s * 1e3:.1f} ms at least")

    @classmethod
    def for_place(cls, retry_after_s: float) -> ShedError:
        """Return the error of a request whose place in a full queue another one took."""
        words = "the queue is full and its tenant holds more than its share, or its class is lower"
        return cls(words, retry_after_s)


class CancelledError(MeasurementError):
    """The caller took the request back before it ran."""

    def __init__(self) -> None:
        """Say so."""
        super().__init__("request cancelled before it ran")


class HungError(MeasurementError):
    """The engine did not come back in time."""

    def __init__(self, after_s: float) -> None:
        """Say after how many seconds it was given up."""
        super().__init__(f"the engine did not answer within {after_s:.3g} s; its lane was replaced")


class NotANumberError(MeasurementError):
    """An output of the request's row holds NaN."""

    def __init__(self, output: str) -> None:
        """Name the output."""
        super().__init__(f"output {output!r} holds NaN for this request")


class ClosedError(MeasurementError):
    """The server ended before the request could run."""

    def __init__(self) -> None:
        """Say so."""
        super().__init__("the server ended before the request could run")
