"""One batch through the engine: padded, run, checked and taken apart; a bad request fails alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qbench.errors import MeasurementError
from qbench.serving.clock import Clock
from qbench.serving.failures import NotANumberError
from qbench.serving.request import Encoded, Run, Work


@dataclass(slots=True)
class Outcome:
    """What a batch gave.

    Attributes:
        values: One value a request; ``None`` where it failed.
        errors: Why, by the request's place in the batch.
        start_s: When the batch went into the runtime for the first time.
        end_s: When the last outputs came.
        reruns: Times that parts of it ran again to find a request that makes the engine fail.
    """

    values: list[Any]
    errors: dict[int, Exception]
    start_s: float
    end_s: float
    reruns: int = 0


def run_batch(run: Run, work: Work, encoded: Sequence[Encoded], clock: Clock) -> Outcome:
    """Run a batch; if the engine raises or answers NaN, run its halves: only bad requests fail.

    Of a NaN the halves are run too, because where activations share one scale a batch, or a norm
    runs over it, one request's NaN is in every row.

    A batch of n with one bad request costs at most ``2 * log2(n)`` further runs, one whose every
    request fails ``2 * n - 2``. A failure that was no request's fault may thus heal.
    """
    outcome = Outcome([None] * len(encoded), {}, clock(), 0.0)
    _run_part(run, work, encoded, range(len(encoded)), (outcome, clock))
    outcome.end_s = outcome.end_s or clock()
    return outcome


def _run_part(
    run: Run,
    work: Work,
    encoded: Sequence[Encoded],
    part: range,
    into: tuple[Outcome, Clock],
) -> None:
    outcome, clock = into
    try:
        feeds = work.pad([encoded[index] for index in part])
        start_s = clock()
        if not outcome.end_s and not outcome.reruns:
            outcome.start_s = start_s
        outputs = run(feeds)
        outcome.end_s = clock()
        spoilt = find_nan(outputs, len(part))
        if spoilt is not None:
            raise NotANumberError(spoilt)
        values = work.decode(outputs, len(part))
        if len(values) != len(part):
            raise MeasurementError(f"decoding gave {len(values)} answers for {len(part)} requests")
    except Exception as error:  # the engine's exceptions have no common base
        outcome.end_s = clock()
        if len(part) == 1:
            outcome.errors[part[0]] = error
            return
        middle = len(part) // 2
        for half in (part[:middle], part[middle:]):
            outcome.reruns += 1
            _run_part(run, work, encoded, half, into)
        return
    for index, value in zip(part, values, strict=True):
        outcome.values[index] = value


def find_nan(outputs: Mapping[str, np.ndarray], count: int) -> str | None:
    """Return the name of an output of a batch that holds NaN, or ``None``.

    Infinities are left alone: masked scores are infinite by design.
    """
    for name, array in outputs.items():
        if array.dtype.kind != "f" or array.ndim < 1 or array.shape[0] != count:
            continue
        # NOTE: a sum is NaN where a term is, and is one pass without a mask; inf - inf makes it
        # NaN too, so suspects are looked at element by element.
        with np.errstate(invalid="ignore", over="ignore"):
            if not np.isnan(array.sum()):
                continue
        if np.isnan(array).any():
            return name
    return None
