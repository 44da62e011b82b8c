"""How often the intervals hold the truth, by simulation.

Draws samples from populations whose mean, or whose metric, is known, and counts how often the 95 %
interval holds it: changes carried by few or all samples, bounded and heavy-tailed, of one or both
signs, for divergences and for every metric. It takes some minutes:

    python benchmarks/coverage.py
    python benchmarks/coverage.py --trials 200 --samples 230 --json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from qbench.records import Estimate
from qbench.statistics import mean_interval, paired_drop
from qbench.tasks.base import Metric
from qbench.tasks.metrics import (
    ACCURACY,
    CROSS_ENTROPY,
    MACRO_F1,
    MRR,
    NDCG,
    SPEARMAN,
    mean_statistic,
)

Array = np.ndarray[Any, Any]
Draw = Callable[[np.random.Generator, int], Array]

TRIALS, SAMPLES = 400, (100, 230, 500, 1000)
#: Samples that change, on average.
CHANGED = (1, 5, 12, 25, 40, 80, 200)
#: The library resamples 2000 times; what is counted here moves by less than its noise.
RESAMPLES = 1000
#: Samples that stand for the population of a metric that is no mean.
POPULATION = 400_000
PERPLEXITY = Metric("perplexity", "", False, 1.0, math.inf, lambda p: np.exp(mean_statistic(p)))


@dataclass(frozen=True, slots=True)
class Row:
    """One case.

    Attributes:
        case: Metric or divergence, and how it changes.
        n: Samples.
        changed: Samples that change on average.
        few: Trials with fewer than 20 changed samples are counted; else the others are.
        trials: Trials counted.
        coverage: Share of them whose interval held the truth.
        width: Median width of the interval.
    """

    case: str
    n: int
    changed: int
    few: bool
    trials: int
    coverage: float
    width: float


def moved_ranks(rng: np.random.Generator, size: int) -> Array:
    """Return changes of reciprocal ranks: most answers move by a place or so, some far."""
    found = np.empty(0)
    while len(found) < size:
        before = 1 / np.ceil(rng.pareto(0.7, 3 * size) + 1e-9)
        after = 1 / np.ceil(np.maximum(1, np.exp(rng.normal(0.2, 0.7, 3 * size)) / before))
        found = np.concatenate([found, (before - after)[before != after]])
    return found[:size]


def signed(draw: Draw) -> Draw:
    """Return the same changes with random signs."""
    return lambda rng, size: draw(rng, size) * rng.choice([-1.0, 1.0], size)


def gains(rng: np.random.Generator, size: int) -> Array:
    """Return changes of an nDCG: hundredths mostly, a fifth of them larger."""
    return np.clip(rng.normal(0.01, np.where(rng.random(size) < 0.2, 0.3, 0.05)), -1, 1)


#: Changes of samples that change, and their mean; the metric that they change.
CHANGES: dict[str, tuple[Draw, Metric]] = {
    "accuracy, as many won as lost": (lambda r, s: r.choice([-1.0, 1.0], s), ACCURACY),
    "accuracy, four of five lost": (lambda r, s: r.choice([-1, 1, 1, 1, 1.0], s), ACCURACY),
    "MRR": (moved_ranks, MRR),
    "MRR, no loss": (signed(moved_ranks), MRR),
    "nDCG": (gains, NDCG),
    "uniform": (lambda r, s: r.uniform(-1, 1, s), MRR),
    "exponential": (lambda r, s: np.minimum(r.exponential(0.1, s), 1.0), MRR),
    "cross-entropy": (lambda r, s: 0.1 * (r.gamma(0.5, 1, s) - r.exponential(0.3, s)),
                      CROSS_ENTROPY),
    "cross-entropy, log-normal 1": (signed(lambda r, s: r.lognormal(-4, 1, s)), CROSS_ENTROPY),
}  # fmt: skip
DIVERGENCES: dict[str, Draw] = {
    "exponential": lambda r, s: 0.01 * r.exponential(1.0, s),
    "squared normal": lambda r, s: 0.01 * r.standard_normal(s) ** 2,
    "gamma 0.3": lambda r, s: 0.01 * r.gamma(0.3, 1.0, s),
    "mixed": lambda r, s: np.where(r.random(s) < 0.1, 0.1, 0.002) * r.lognormal(0, 0.7, s),
    "log-normal 1": lambda r, s: r.lognormal(-6, 1.0, s),
    "log-normal 1.5": lambda r, s: r.lognormal(-6, 1.5, s),
    "log-normal 2": lambda r, s: r.lognormal(-7, 2.0, s),
}


def counted(
    case: str, n: int, changed: int, trials: int, one: Callable[[], tuple[int, Estimate, float]]
) -> Iterator[Row]:
    """Yield the rows of one case: trials with few changed samples, and those with more."""
    held: dict[bool, list[bool]] = {True: [], False: []}
    widths: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(trials):
        count, found, truth = one()
        few = count < 20
        held[few].append(found.low <= truth <= found.high)
        widths[few].append(found.high - found.low)
    for few in (True, False):
        if len(held[few]) >= trials // 2:
            share, width = float(np.mean(held[few])), float(np.median(widths[few]))
            yield Row(case, n, changed, few, len(held[few]), share, width)


def change_rows(n: int, trials: int) -> Iterator[Row]:
    """Yield coverage of drops of metrics that are means, by how many samples change."""
    for case, (draw, metric) in CHANGES.items():
        truth = float(draw(np.random.default_rng(1), 4_000_000).mean())
        for changed in (c for c in CHANGED if c < n):
            rng = np.random.default_rng([n, changed])

            def one(
                draw: Draw = draw,
                metric: Metric = metric,
                truth: float = truth,
                share: float = changed / n,
                rng: np.random.Generator = rng,
            ) -> tuple[int, Estimate, float]:
                worse = draw(rng, n) * (rng.random(n) < share)
                sign = 1.0 if metric.higher_is_better else -1.0
                before = np.maximum(sign * worse, 0.0)
                before += 0.0 if sign > 0 else np.abs(worse) + rng.gamma(1.0, 1.5, n)
                drop = paired_drop(metric, before, before - sign * worse, resamples=RESAMPLES)
                return int(np.count_nonzero(worse)), drop, truth * share

            yield from counted(case, n, changed, trials, one)


def divergence_rows(n: int, trials: int) -> Iterator[Row]:
    """Yield coverage of mean divergences, by how many samples diverge at all."""
    for case, draw in DIVERGENCES.items():
        truth = float(draw(np.random.default_rng(1), 8_000_000).mean())
        for changed in (*(c for c in CHANGED if c < n), n):
            rng = np.random.default_rng([n, changed])

            def one(
                draw: Draw = draw,
                truth: float = truth,
                share: float = changed / n,
                rng: np.random.Generator = rng,
            ) -> tuple[int, Estimate, float]:
                values = draw(rng, n) * (rng.random(n) < share)
                found = mean_interval(values, resamples=RESAMPLES)
                return int(np.count_nonzero(values)), found, truth * share

            yield from counted(f"divergence, {case}", n, changed, trials, one)


def labelled(rng: np.random.Generator, size: int, share: float) -> tuple[Array, Array]:
    """Return class answers of three unequal classes, a share of which another model changes."""
    label = rng.choice(3, size, p=[0.6, 0.3, 0.1])
    before = np.where(rng.random(size) < 0.8, label, rng.choice(3, size))
    after = np.where(rng.random(size) < share, rng.choice(3, size), before)
    return np.stack([before, label], 1).astype(float), np.stack([after, label], 1).astype(float)


def graded(rng: np.random.Generator, size: int, share: float) -> tuple[Array, Array]:
    """Return scores beside the truth, a share of which another model changes."""
    truth = rng.normal(size=size)
    before = truth + 0.7 * rng.normal(size=size)
    after = before + 0.6 * rng.normal(size=size) * (rng.random(size) < share)
    return np.stack([before, truth], 1), np.stack([after, truth], 1)


def losses(rng: np.random.Generator, size: int, share: float) -> tuple[Array, Array]:
    """Return losses of tokens, a share of which another model changes."""
    before = rng.gamma(1.0, 1.5, size)
    change = (0.3 * (rng.gamma(0.5, 1.0, size) - rng.exponential(0.3, size))) * (
        rng.random(size) < share
    )
    return before[:, None], np.maximum(before + change, 0.0)[:, None]


PAIRS: dict[str, tuple[Callable[..., tuple[Array, Array]], Metric]] = {
    "macro F1": (labelled, MACRO_F1),
    "Spearman": (graded, SPEARMAN),
    "perplexity": (losses, PERPLEXITY),
}


def pair_rows(n: int, trials: int) -> Iterator[Row]:
    """Yield coverage of drops of metrics that are no means."""
    for case, (draw, metric) in PAIRS.items():
        for changed in (c for c in CHANGED if 5 <= c < n):
            share = changed / n
            many = [draw(np.random.default_rng([7, i]), POPULATION, share) for i in range(5)]
            sign = 1.0 if metric.higher_is_better else -1.0
            truth = float(np.mean([metric.statistic(b) - metric.statistic(a) for b, a in many]))
            rng = np.random.default_rng([n, changed, 2])

            def one(
                draw: Callable[..., tuple[Array, Array]] = draw,
                metric: Metric = metric,
                truth: float = sign * truth,
                share: float = share,
                rng: np.random.Generator = rng,
            ) -> tuple[int, Estimate, float]:
                before, after = draw(rng, n, share)
                drop = paired_drop(metric, before, after, resamples=RESAMPLES)
                return int(np.count_nonzero((before != after).any(axis=1))), drop, truth

            yield from counted(case, n, changed, trials, one)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--samples", type=int, nargs="+", default=list(SAMPLES))
    parser.add_argument("--json", action="store_true", help="print one object and nothing else")
    chosen = parser.parse_args(arguments)
    rows = []
    for n in chosen.samples:
        for rows_of in (change_rows, divergence_rows, pair_rows):
            for row in rows_of(n, chosen.trials):
                rows.append(row)
                if not chosen.json:
                    part = "fewer than 20" if row.few else "20 or more"
                    print(
                        f"{row.case:32} n {row.n:5} changed ~{row.changed:4} ({part:13}) "
                        f"{row.coverage:.3f} ± {1.96 * (0.0475 / row.trials) ** 0.5:.3f}",
                        flush=True,
                    )
    if chosen.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
