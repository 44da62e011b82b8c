"""A request's words: what it is made of, its answer, and when each step happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from qbench.errors import MeasurementError

Feeds: TypeAlias = Mapping[str, np.ndarray]
Encoded: TypeAlias = Mapping[str, Sequence[int]]
Run: TypeAlias = Callable[[Feeds], Mapping[str, np.ndarray]]
Encode: TypeAlias = Callable[[Sequence[Any]], Sequence[Encoded]]
Pad: TypeAlias = Callable[[Sequence[Encoded]], Feeds]
Decode: TypeAlias = Callable[[Mapping[str, np.ndarray], int], Sequence[Any]]

#: Names of ``Times.stages_s``, in order.
STAGES = ("queue", "preprocess", "formation", "inference", "postprocess")


@dataclass(frozen=True, slots=True)
class Times:
    """When each step of one request happened: ``time.perf_counter``, seconds.

    Attributes:
        submitted_s: The caller handed the request in.
        encode_start_s: Its encoding began (it equals ``encode_end_s`` for encoded requests).
        encode_end_s: It could be batched.
        dispatched_s: The batcher put it into a batch.
        run_start_s: The batch was padded and went into the runtime.
        run_end_s: The runtime gave the outputs.
        answered_s: The answer was handed over.
    """

    submitted_s: float
    encode_start_s: float
    encode_end_s: float
    dispatched_s: float
    run_start_s: float
    run_end_s: float
    answered_s: float

    @property
    def queue_s(self) -> float:
        """Waiting: for the encoder, and in the queue."""
        return (self.encode_start_s - self.submitted_s) + (self.dispatched_s - self.encode_end_s)

    @property
    def preprocess_s(self) -> float:
        """Encoding, as this request saw it (requests that wait together share a call)."""
        return self.encode_end_s - self.encode_start_s

    @property
    def formation_s(self) -> float:
        """Forming the batch: from the decision until its padded feeds were there."""
        return self.run_start_s - self.dispatched_s

    @property
    def inference_s(self) -> float:
        """Its batch in the runtime."""
        return self.run_end_s - self.run_start_s

    @property
    def postprocess_s(self) -> float:
        """From the end of inference until the answer was handed over."""
        return self.answered_s - self.run_end_s

    @property
    def stages_s(self) -> tuple[float, float, float, float, float]:
        """The times of ``STAGES``, seconds."""
        return (
            self.queue_s,
            self.preprocess_s,
            self.formation_s,
            self.inference_s,
            self.postprocess_s,
        )

    @property
    def total_s(self) -> float:
        """From submission to answer: the sum of the five stages."""
        return self.answered_s - self.submitted_s


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one accepted request.

    Attributes:
        value: Its row of the outputs, or ``None`` where it failed.
        error: Why it failed, or ``None``.
        times: When each step happened; ``None`` where it failed before it was dispatched.
        batch_size: Requests in its batch.
        tokens: Its own tokens.
        padded_tokens: Tokens of its batch with padding.
        served_by: ``engine``, or what answered in its place: ``fallback`` or ``default``.
    """

    value: Any
    error: Exception | None
    times: Times | None
    batch_size: int
    tokens: int
    padded_tokens: int
    served_by: str = "engine"


Done: TypeAlias = Callable[[Answer], None]


def first_rows(outputs: Mapping[str, np.ndarray], count: int) -> Sequence[Any]:
    """Return the rows of the first output, one a request.

    Raises:
        MeasurementError: If the output does not have ``count`` rows.
    """
    name, rows = next(iter(outputs.items()))
    if rows.ndim < 1 or rows.shape[0] != count:
        raise MeasurementError(
            f"output {name!r} has shape {tuple(rows.shape)} for a batch of {count} requests; "
            f"its first axis must be the batch"
        )
    return list(rows)


def named_rows(outputs: Mapping[str, np.ndarray], count: int) -> Sequence[dict[str, np.ndarray]]:
    """Return each request's row of every output, by name; rows are copies and share nothing.

    Raises:
        MeasurementError: If an output does not have ``count`` rows.
    """
    for name, rows in outputs.items():
        if rows.ndim < 1 or rows.shape[0] != count:
            first_rows({name: rows}, count)
    return [{name: rows[row].copy() for name, rows in outputs.items()} for row in range(count)]


@dataclass(frozen=True, slots=True)
class Work:
    """What a loop does around the engine.

    Attributes:
        pad: Encoded requests to one batch of feeds.
        encode: Payloads to encoded requests; ``None`` where payloads are encoded already.
        decode: Outputs and the batch size to one answer a request.
    """

    pad: Pad
    encode: Encode | None = None
    decode: Decode = first_rows


def token_count(encoded: Any) -> int:
    """Return the tokens of one encoded request: the length of its first input."""
    if not isinstance(encoded, Mapping) or not encoded:
        raise MeasurementError(
            f"an encoded request is a mapping from input names to token lists, "
            f"got {type(encoded).__name__}"
        )
    return len(next(iter(encoded.values())))
