"""The race: which cell is measured next and on how much, when a cell stops, and why.

A pure state machine: results go in, decisions come out; it has no clock and does no I/O.

What the plan needs decides. A plan of the front gives each layer the format that maximises
``saving − price · divergence``; from its careful to its bold end the front is a range of prices.
A cell matters where its divergence, anywhere in its interval, changes what its layer takes at one
of these prices, and only as much as that choice would then lose. So a cell stops when it is

* ``harmless``: even the upper end costs less than the tolerance at the highest price;
* ``harmful``: even at the lower end no plan takes it, given what else its layer may become;
* ``settled``: what may still change loses less than the tolerance.

The others are looked at again, on more samples, and at last on all of them.

Looks are paid for: of the ``1 − level`` that all looks at a cell may err together, each look gets
an equal part, so the interval of a look is wider the more looks there are (Bonferroni's
inequality; R. Simes, 1986, gives its history). Intervals are studentised bootstraps, which hold
for skewed divergences at the few samples of a first look.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from qbench.records import Estimate
from qbench.statistics.intervals import studentised_interval

Floats = NDArray[np.float64]
#: A cell by layer and format.
Cell = tuple[str, str]
#: Bootstrap resamples of a look's interval.
_RESAMPLES = 999
#: Prices at which choices are compared.
_PRICES = 65
#: What a cell may still lose when it stops, as a share of all that could be saved.
TOLERANCE = 0.03
#: Levels of the planner's front, where nobody says.
LEVELS = 8


class Fate(StrEnum):
    """Where a cell stands."""

    OPEN = "open"
    HARMLESS = "harmless"
    HARMFUL = "harmful"
    SETTLED = "settled"
    FULL = "full"  # measured on all samples
    CLOSED = "closed"  # it could not be measured


#: What is said of a cell that stopped.
WORDS = {
    Fate.HARMLESS: "harmless at every plan of the front",
    Fate.HARMFUL: "no plan of the front takes it",
    Fate.SETTLED: "it can no longer change the plan by more than the tolerance",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """How a race is run.

    Attributes:
        samples: Samples of each look, ascending.
        scales: What a look's mean divergence is multiplied with to compare with the full pool's.
        level: Coverage of a cell's intervals, all looks together.
        spread: How far, as a share, the full pool's divergence may lie from the scaled one for
            reasons that more samples of the look would not cure.
        tolerance: What a cell may still lose, as a share of all that could be saved.
        levels: Levels of the planner's front: its first one saves this part of all.
    """

    samples: tuple[int, ...]
    scales: tuple[float, ...]
    level: float = 0.95
    spread: float = 0.3
    tolerance: float = TOLERANCE
    levels: int = LEVELS

    @property
    def look_level(self) -> float:
        """Coverage of the interval of one look."""
        return 1.0 - (1.0 - self.level) / max(1, len(self.samples))


@dataclass(frozen=True, slots=True)
class Job:
    """A cell and the look that it is due for; ``look`` is ``None`` for the full pool."""

    cell: Cell
    look: int | None


@dataclass(slots=True)
class _Standing:
    fate: Fate = Fate.OPEN
    seen: list[Estimate] = field(default_factory=list)  # look by look, on the looks' own scale
    full: Estimate | None = None
    regret: float = 0.0


@dataclass(slots=True)
class Race:
    """The state of a race over cells.

    Attributes:
        cells: The cells, in the order in which they are measured.
        rules: How it is run.
        seed: Seed of the resamples.
    """

    cells: Sequence[Cell]
    rules: Rules
    seed: int = 0
    _standing: dict[Cell, _Standing] = field(default_factory=dict)
    _tops: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """All cells are open."""
        self._standing = {cell: _Standing() for cell in self.cells}

    def due(self) -> tuple[Job, ...]:
        """Return the jobs of this round: those with most at stake first, else in given order."""
        jobs = [
            Job(cell, len(now.seen) if len(now.seen) < len(self.rules.samples) else None)
            for cell, now in self._standing.items()
            if now.fate is Fate.OPEN
        ]
        nearest = min((_depth(job) for job in jobs), default=0.0)
        jobs = [job for job in jobs if _depth(job) == nearest]
        return tuple(sorted(jobs, key=lambda job: -self._standing[job.cell].regret))

    def tell(self, cell: Cell, divergences: Sequence[float]) -> None:
        """Take the divergences [m] of a cell at its next look, earlier looks' samples included."""
        values = np.asarray(divergences, dtype=np.float64)
        top = max(self._tops.get(cell[1], 0.0), float(values.max(initial=0.0)))
        self._tops[cell[1]] = top
        low, high = look_interval(values, top, self.rules.look_level, self.seed)
        mean, level = float(values.mean()), self.rules.level
        self._standing[cell].seen.append(Estimate(mean, low, high, len(values), level, "sub_pool"))

    def finish(self, cell: Cell, estimate: Estimate | None) -> None:
        """Take a cell's estimate on the full pool; ``None`` where it could not be measured."""
        now = self._standing[cell]
        now.full = estimate
        now.fate = Fate.FULL if estimate is not None else Fate.CLOSED

    def settle(self, savings: Mapping[Cell, float]) -> dict[Cell, Fate]:
        """End a round: return the cells that stop now, and as what.

        Args:
            savings: What each cell saves against the high precision, in one unit; a cell that is
                not in it saves nothing.
        """
        found = {cell: self.estimate(cell) for cell in self._standing}
        known = {cell: e for cell, e in found.items() if e is not None}
        if not known:
            return {}
        stakes = weigh(
            [cell[0] for cell in known],
            np.array([savings.get(cell, 0.0) for cell in known]),
            np.array([(e.low, e.value, e.high) for e in known.values()]),
            self.rules.levels,
        )
        stopped: dict[Cell, Fate] = {}
        for at, cell in enumerate(known):
            now = self._standing[cell]
            now.regret = float(stakes.regret[at])
            if now.fate is Fate.OPEN:
                now.fate = _fate(stakes, at, self.rules.tolerance)
                if now.fate is not Fate.OPEN:
                    stopped[cell] = now.fate
        return stopped

    def fate(self, cell: Cell) -> Fate:
        """Return where a cell stands."""
        return self._standing[cell].fate

    def looks(self, cell: Cell) -> int:
        """Return how often a cell was looked at on a part of the samples."""
        return len(self._standing[cell].seen)

    def estimate(self, cell: Cell) -> Estimate | None:
        """Return the newest estimate of a cell on the scale of the full pool, if it has one.

        The interval of a look holds the error of its samples, and the spread.
        """
        now = self._standing[cell]
        if now.full is not None or now.fate is Fate.CLOSED or not now.seen:
            return now.full
        last, scale = now.seen[-1], self.scale(len(now.seen) - 1)
        share = 1.0 + self.rules.spread
        return replace(
            last,
            value=last.value * scale,
            low=last.low * scale / share,
            high=last.high * scale * share,
        )

    def scale(self, look: int) -> float:
        """Return what a look's mean divergence is multiplied with to compare with the full one.

        It starts as the rules say and learns from the cells that were measured both ways; the
        start counts as one such cell.
        """
        given = self.rules.scales[look]
        logs = [
            np.log(now.full.value / (now.seen[look].value * given))
            for now in self._standing.values()
            if now.full is not None and len(now.seen) > look
            if now.full.value > 0 and now.seen[look].value > 0
        ]
        return given * float(np.exp(sum(logs) / (len(logs) + 1)))


def _depth(job: Job) -> float:
    return float("inf") if job.look is None else float(job.look)


def look_interval(values: Floats, top: float, level: float, seed: int) -> tuple[float, float]:
    """Return the interval of the mean of non-negative ``values`` [m] at one look.

    Args:
        values: Divergences of the look's samples.
        top: The largest divergence that any cell of the format showed; it bounds what samples
            that did not change may hide.
        level: Two-sided coverage.
        seed: Seed of the resamples.
    """
    ends = studentised_interval(values, seed=seed, resamples=_RESAMPLES, level=level)
    if ends is None:
        missed = min(1.0, -np.log(1.0 - level) / len(values))
        return 0.0, float(values.mean()) + top * float(missed)
    return max(0.0, ends[0]), max(ends[1], float(values.mean()))


@dataclass(frozen=True, slots=True, eq=False)
class Stakes:
    """What each of some cells may still change, in shares of all that could be saved.

    Attributes:
        burden: What its divergence costs at most at the front's highest price, shape [cells].
        taken: Whether a plan of the front takes it at the lower end of its interval [cells].
        regret: The most that a wrong choice about it would lose [cells].
    """

    burden: Floats
    taken: NDArray[np.bool_]
    regret: Floats


def _fate(stakes: Stakes, at: int, tolerance: float) -> Fate:
    if not stakes.taken[at]:
        return Fate.HARMFUL
    if stakes.burden[at] <= tolerance:
        return Fate.HARMLESS
    return Fate.SETTLED if stakes.regret[at] <= tolerance else Fate.OPEN


def weigh(layers: Sequence[str], savings: Floats, ends: Floats, levels: int) -> Stakes:
    """Return what is at stake in each cell.

    Args:
        layers: Layer of each cell, shape [cells].
        savings: What each saves against the high precision [cells].
        ends: Lower end, value and upper end of its divergence, shape [cells, 3].
        levels: Levels of the planner's front.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for at, layer in enumerate(layers):
        members[layer].append(at)
    groups = [np.array(group) for group in members.values()]
    total = sum(max(0.0, float(savings[group].max())) for group in groups)
    cells = len(layers)
    if total <= 0:
        return Stakes(np.zeros(cells), np.zeros(cells, bool), np.zeros(cells))
    gains = savings / total
    prices = _front_prices(groups, gains, ends[:, 1], levels)
    worth = gains[:, None, None] - ends[:, :, None] * prices  # [cells, 3, prices]
    rival = np.zeros((cells, len(prices)))  # the best of what else the layer may become
    for group in groups:
        for at in group:
            others = group[group != at]
            if len(others):
                rival[at] = np.maximum(worth[others, 1].max(axis=0), 0.0)
    low, value, high = worth[:, 0], worth[:, 1], worth[:, 2]
    loss = np.where(value > rival, rival - high, low - rival)
    return Stakes(
        burden=ends[:, 2] * prices.max(),
        taken=np.asarray((low > rival).any(axis=1)),
        regret=np.maximum(loss.max(axis=1), 0.0),
    )


def _front_prices(
    groups: Sequence[NDArray[np.int64]], gains: Floats, divergences: Floats, levels: int
) -> Floats:
    """Return the prices of divergence from the front's bold end to its careful end, ascending."""
    useful = (gains > 0) & (divergences > 0)
    if not useful.any():
        return np.zeros(1)
    slopes = gains[useful] / divergences[useful]
    prices = np.geomspace(slopes.min() / 10.0, slopes.max(), _PRICES)
    worth = gains[:, None] - divergences[:, None] * prices
    saved = np.zeros(len(prices))
    for group in groups:
        best = worth[group].argmax(axis=0)
        chosen = gains[group][best]
        saved += np.where(worth[group].max(axis=0) > 0, chosen, 0.0)
    kept = prices[saved >= 1.0 / levels]
    return kept if len(kept) else prices[:1]
