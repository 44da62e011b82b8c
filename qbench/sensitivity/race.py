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

A common factor on all divergences changes no choice, and most of the error of a look is one: the
samples that it happens to hold are easy or hard for every cell. So a cell is compared with the
*profile* of its look, the mean over the other cells of their divergences, each over its own mean:
its interval is that of the logarithm of a ratio, by the jackknife (B. Efron, 1982, "The jackknife,
the bootstrap and other resampling plans"), with Student's quantile at as many samples as carry the
profile. What the factor is, cells tell that are measured both ways (``scale``).

Looks are paid for: of the ``1 − level`` that all looks at a cell may err together, each look gets
an equal part, so the interval of a look is wider the more looks there are (Bonferroni's
inequality).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from qbench.records import Estimate

Floats = NDArray[np.float64]
#: A cell by layer and format.
Cell = tuple[str, str]
#: Other cells that a profile takes.
FELLOWS = 4
#: Largest half-width of a logarithm.
_WIDEST = 12.0
#: Prices at which choices are compared.
_PRICES = 65
#: What a cell may still lose when it stops, as a share of all that could be saved.
TOLERANCE = 0.02
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
    seen: list[Floats] = field(default_factory=list)  # divergences [m], look by look
    full: Estimate | None = None
    regret: float = 0.0


@dataclass(slots=True)
class Race:
    """The state of a race over cells.

    Attributes:
        cells: The cells, in the order in which they are measured.
        rules: How it is run.
    """

    cells: Sequence[Cell]
    rules: Rules
    _standing: dict[Cell, _Standing] = field(default_factory=dict)
    _intervals: dict[tuple[Cell, int], Estimate] = field(default_factory=dict)
    _tables: dict[int, LookTable] = field(default_factory=dict)

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
        self._standing[cell].seen.append(np.asarray(divergences, dtype=np.float64))
        self._intervals.clear()
        self._tables.clear()

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
        look = len(now.seen) - 1
        own, scale, share = self._interval(cell, look), self.scale(look), 1.0 + self.rules.spread
        return replace(
            own,
            value=own.value * scale,
            low=own.low * scale / share,
            high=own.high * scale * share,
        )

    def _interval(self, cell: Cell, look: int) -> Estimate:
        """Return a cell's mean at a look, on the look's own scale, with its interval."""
        if (cell, look) not in self._intervals:
            if look not in self._tables:
                self._tables[look] = LookTable(
                    {c: s.seen[look] for c, s in self._standing.items() if len(s.seen) > look}
                )
            low, mean, high = self._tables[look].interval(cell, self.rules.look_level)
            n, level = len(self._standing[cell].seen[look]), self.rules.level
            self._intervals[cell, look] = Estimate(mean, low, high, n, level, "sub_pool")
        return self._intervals[cell, look]

    def scale(self, look: int) -> float:
        """Return what a look's mean divergence is multiplied with to compare with the full one.

        It starts as the rules say and learns from the cells that were measured both ways; the
        start counts as one such cell.
        """
        given = self.rules.scales[look]
        logs = [
            np.log(now.full.value / (now.seen[look].mean() * given))
            for now in self._standing.values()
            if now.full is not None and len(now.seen) > look
            if now.full.value > 0 and now.seen[look].any()
        ]
        return given * float(np.exp(sum(logs) / (len(logs) + 1)))


def _depth(job: Job) -> float:
    return float("inf") if job.look is None else float(job.look)


class LookTable:
    """The divergences of all cells at one look, and each cell's interval beside the others.

    With fewer than ``FELLOWS`` other cells there is no profile: it is then the same for all
    samples. A cell that changed no sample may hide what others showed: its upper end is the rule
    of three times the largest divergence of all.

    Args:
        rows: Divergences [m] of each cell, the same samples in every one.
    """

    def __init__(self, rows: Mapping[Cell, Floats]) -> None:
        """Add up the profile; no interval is taken yet."""
        self._rows = rows
        means = {cell: float(row.mean()) for cell, row in rows.items()}
        self._shares = {cell: rows[cell] / mean for cell, mean in means.items() if mean > 0}
        self._total = sum(self._shares.values(), start=np.zeros(1))
        self._largest = max((float(row.max()) for row in rows.values()), default=0.0)

    def interval(self, cell: Cell, level: float) -> tuple[float, float, float]:
        """Return low end, mean and high end of one cell's divergence.

        Args:
            cell: The cell.
            level: Two-sided coverage.
        """
        row = self._rows[cell]
        if cell not in self._shares:
            return 0.0, 0.0, min(1.0, -float(np.log(1.0 - level)) / len(row)) * self._largest
        share, fellows, mean = self._shares[cell], len(self._shares) - 1, float(row.mean())
        profile = (self._total - share) / fellows if fellows >= FELLOWS else np.ones_like(share)
        factor = float(np.exp(_log_half(share, profile, level)))
        return mean / factor, mean, mean * factor


def _log_half(values: Floats, profile: Floats, level: float) -> float:
    """Return the half-width of the logarithm of ``sum(values) / sum(profile)``, both [m]."""
    n = len(values)
    floor = 1e-9 * float(values.sum())  # one sample may carry it all
    left = np.maximum(values.sum() - values, floor) / (profile.sum() - profile)
    logs = np.log(left)
    error = np.sqrt((n - 1) / n * np.square(logs - logs.mean()).sum())
    carrying = float(np.square(profile.sum()) / np.square(profile).sum())
    return min(_student(max(1.0, carrying - 1.0), level) * float(error), _WIDEST)


@lru_cache(maxsize=64)
def _student(freedom: float, level: float) -> float:
    from scipy.stats import t

    return float(t.ppf((1.0 + level) / 2.0, freedom))


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
