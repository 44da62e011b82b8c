"""The token budget of a device, from a small grid of batches measured at warm-up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qbench.serving.request import Encoded, Feeds, Pad, Run, token_count

CANDIDATES = (64, 128, 256, 512, 1024)
_LENGTH_PERCENTILES = (10, 50, 90)
_NEAR_BEST = 0.97


@dataclass(frozen=True, slots=True)
class GridCell:
    """Best time of a batch of ``batch`` requests that all have ``length`` tokens."""

    batch: int
    length: int
    best_ms: float


@dataclass(frozen=True, slots=True)
class BudgetChoice:
    """The budget chosen, and what it was chosen from.

    Attributes:
        token_budget: The smallest candidate whose throughput is within 3 % of the best one.
        requests_per_s: Throughput of one lane by candidate: lengths weigh alike.
        grid: The measured cells.
    """

    token_budget: int
    requests_per_s: dict[int, float]
    grid: tuple[GridCell, ...]


def calibrate_budget(
    run: Run,
    pad: Pad,
    encoded: Sequence[Encoded],
    candidates: Sequence[int] = CANDIDATES,
    repeats: int = 3,
    limit_s: float = 5.0,
    most_rows: int | None = None,
) -> BudgetChoice:
    """Measure batches of the user's own lengths and choose a token budget.

    Requests at three percentiles of length are repeated to batches of 1, 2, 4, … up to the
    largest candidate. Up to ``repeats`` rounds go over the whole grid, after one that is thrown
    away, and the best time of a cell counts: what disturbs a machine only adds time.

    NOTE: one lane is measured alone; lanes that share caches and memory may prefer less. A
    small budget is taken among near equals, because it also answers sooner.

    Args:
        run: A lane's engine.
        pad: Encoded requests to feeds.
        encoded: The user's encoded requests.
        candidates: Budgets to choose from, padded tokens.
        repeats: Most rounds that count.
        limit_s: No further round begins after so many seconds; one always counts.
        most_rows: Most requests of a batch; ``None`` for no limit but the tokens.
    """
    budgets = sorted(candidates)
    samples = _samples(encoded)
    shapes = [
        (batch, length)
        for length in samples
        for batch in _powers_of_two(_rows(budgets[-1], length, most_rows))
    ]
    best = dict.fromkeys(shapes, float("inf"))
    stop_s = time.perf_counter() + limit_s
    for repeat in range(repeats + 1):
        if repeat > 1 and time.perf_counter() > stop_s:
            break
        for batch, length in shapes:
            elapsed_s = _time_once(run, pad([samples[length]] * batch))
            if repeat > 0:
                best[batch, length] = min(best[batch, length], elapsed_s)
    rates = {budget: _rate(budget, samples, best, most_rows) for budget in budgets}
    enough = _NEAR_BEST * max(rates.values())
    return BudgetChoice(
        token_budget=next(budget for budget in budgets if rates[budget] >= enough),
        requests_per_s=rates,
        grid=tuple(GridCell(b, length, best[b, length] * 1e3) for b, length in shapes),
    )


def _time_once(run: Run, feeds: Feeds) -> float:
    start_s = time.perf_counter()
    run(feeds)
    return time.perf_counter() - start_s


def _samples(encoded: Sequence[Encoded]) -> dict[int, Encoded]:
    """Return one request for each percentile of length, by its length."""
    by_length = sorted(encoded, key=_length)
    ranks = np.percentile(np.arange(len(by_length)), _LENGTH_PERCENTILES, method="nearest")
    picked = [by_length[int(rank)] for rank in ranks]
    return {_length(one): one for one in picked}


def _length(encoded: Encoded) -> int:
    return max(token_count(encoded), 1)


def _powers_of_two(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length())]


def _rows(budget: int, length: int, most_rows: int | None) -> int:
    """Return the requests of that length that a batch may hold."""
    rows = max(budget // length, 1)
    return rows if most_rows is None else min(rows, most_rows)


def _rate(
    budget: int,
    samples: dict[int, Encoded],
    best: dict[tuple[int, int], float],
    most_rows: int | None,
) -> float:
    """Return requests a second of one lane if each length comes equally often."""
    seconds = 0.0
    for length in samples:
        batch = _powers_of_two(_rows(budget, length, most_rows))[-1]
        seconds += best[batch, length] / batch
    return len(samples) / seconds
