"""Repairing a plan that is not the sum of its parts: what to measure and what to build next.

Pure: a state machine that is fed with what was measured. It never runs anything itself.

A round: engines of the front that were not accepted although they are cheaper than the best one
accepted are looked at, the nearest miss first. Where its divergence is larger than the sum that
was predicted, the pairs whose interaction the fitted model says is largest are measured; where
they do not explain the excess, the cells that do are searched for by halving. The choice is solved
again with the measured pair terms, built and measured. A step that hurts is taken back: the next
one is more careful.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from qbench.errors import BudgetError
from qbench.planning.front import at_level
from qbench.planning.interactions import (
    Cells,
    NotMeasured,
    Observation,
    fit_pairs,
    measured_interactions,
    minimal_set,
)
from qbench.planning.problem import Cell, Interaction, Problem, Proposal
from qbench.planning.solve import propose, score
from qbench.records import Estimate

#: A divergence this much above the prediction, and beyond its interval, is a miss.
MISS = 1.25
#: Pairs that are measured first, by the fitted model.
_PAIRS = 4
#: More cautious levels that are tried for a choice that was not built yet.
_CAREFUL = 12


@dataclass(frozen=True, slots=True)
class Built:
    """An engine that was built and measured.

    Attributes:
        name: Its name.
        proposal: What was asked for.
        divergence: What was measured.
        accepted: Whether its drop was shown to stay within what is allowed.
        nearness: How near it is to being accepted; the least is the nearest.
    """

    name: str
    proposal: Proposal
    divergence: Estimate
    accepted: bool
    nearness: float


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure the divergence with exactly these cells lowered."""

    sets: tuple[Cells, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Build:
    """Build this proposal and measure its engine."""

    proposal: Proposal
    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Nothing more is to be done."""

    why: str


Request = Measure | Build | Stop


@dataclass(slots=True)
class Repair:
    """What was learned so far, and from it what comes next.

    Attributes:
        problem: What each layer may become, without pair terms.
        rounds: Most engines to build.
        looks: Most sets to measure in one round.
        built: Engines measured so far, the front's included.
        seen: Divergences of sets of cells.
        found: Sets of few cells that were measured for what they add together.
    """

    problem: Problem
    rounds: int
    looks: int = 16
    built: list[Built] = field(default_factory=list)
    seen: list[Observation] = field(default_factory=list)
    found: list[Cells] = field(default_factory=list)
    _done: int = 0
    _looked: int = 0

    def learn_engine(self, engine: Built, repaired: bool = False) -> None:
        """Take in what an engine gave; a repaired one ends its round."""
        self.built.append(engine)
        cells = lowered(engine.proposal.formats, self.problem.high_precision)
        self.seen.append(Observation(cells, engine.divergence.value))
        if repaired:
            self.end_round()

    def learn_set(self, cells: Cells, divergence: float) -> None:
        """Take in the divergence of a set of cells."""
        self.seen.append(Observation(cells, divergence))
        self._looked += 1
        if len(cells) == 2:
            self.found.append(cells)

    def end_looks(self) -> None:
        """Measure no more sets in this round: its time is used up."""
        self._looked = max(self._looked, self.looks)

    def end_round(self) -> None:
        """Count a round as used; also where its engine could not be built."""
        self._done, self._looked = self._done + 1, 0

    @property
    def round(self) -> int:
        """Number of the current round, from 1."""
        return self._done + 1

    @property
    def interactions(self) -> tuple[Interaction, ...]:
        """Those measured so far."""
        return measured_interactions(self._singles(), self.seen, dict.fromkeys(self.found))

    def predicted(self, formats: Mapping[str, str]) -> float:
        """Return the divergence that the model as it is now predicts."""
        return propose(formats, self._learned()).divergence_sum

    def best(self) -> Built | None:
        """Return the cheapest engine that was accepted, by prediction."""
        accepted = [engine for engine in self.built if engine.accepted]
        return min(accepted, key=lambda e: score(e.proposal, self.problem), default=None)

    def next(self) -> Request:
        """Return what is to be done next."""
        if self._done >= self.rounds:
            return Stop(f"all {self.rounds} rounds are used")
        targets = self._targets()
        if not targets:
            return Stop("no measured engine that was not accepted is cheaper than the accepted one")
        for target in targets:
            request = self._look(target) or self._build(target)
            if request is not None:
                return request
        return Stop("no choice that was not built yet is cheaper within a smaller divergence")

    def _learned(self) -> Problem:
        return replace(self.problem, interactions=self.interactions)

    def _targets(self) -> list[Built]:
        """Return the engines that were not accepted and would be cheaper, the nearest first."""
        best = self.best()
        limit = math.inf if best is None else score(best.proposal, self.problem)
        open_ones = [
            e for e in self.built if not e.accepted and score(e.proposal, self.problem) < limit
        ]
        return sorted(open_ones, key=lambda e: e.nearness)

    def _look(self, target: Built) -> Measure | None:
        """Return what is to be measured to explain a target's divergence, or ``None``."""
        high = self.problem.high_precision
        cells = lowered(target.proposal.formats, high)
        excess = self._unexplained(target)
        if excess <= 0 or len(cells) < 2 or self._looked >= self.looks:
            return None
        measured = {o.cells for o in self.seen}
        if self._looked == 0:
            fitted = fit_pairs(self._singles(), self.seen, cells)
            ranked = sorted(fitted, key=lambda pair: (-fitted[pair], sorted(pair)))
            first = [pair for pair in ranked if pair not in measured][:_PAIRS]
            if first:
                return Measure(tuple(first), "the pairs that the fitted model says add most")
        try:
            found = frozenset(minimal_set(self._suspects(cells), self._excess_of, excess / 2))
        except NotMeasured as asked:
            return Measure((asked.cells,), "searching for the layers that break together")
        if len(found) > 1 and found not in self.found:
            self.found.append(found)
            return self._look(target)
        return None

    def _suspects(self, cells: Cells) -> list[Cell]:
        """Return the cells in an order that does not change within a round."""
        place = {layer: index for index, layer in enumerate(self.problem.options)}
        return sorted(cells, key=lambda cell: place[cell[0]])

    def _excess_of(self, cells: Cells) -> float:
        """Return what a set diverges beyond its cells' own and the terms known of its pairs."""
        if len(cells) < 2:
            return 0.0
        for seen in reversed(self.seen):
            if seen.cells == cells:
                known = [i.extra for i in self.interactions if cells.issuperset(i.cells)]
                own = [self._singles().get(cell, 0.0) for cell in cells]
                return seen.divergence - math.fsum([*own, *known])
        raise NotMeasured(cells)

    def _unexplained(self, target: Built) -> float:
        """Return the target's divergence beyond the prediction; 0 where it is no miss."""
        predicted = self.predicted(target.proposal.formats)
        miss = target.divergence.low > predicted and target.divergence.value > MISS * predicted
        return target.divergence.value - predicted if miss else 0.0

    def _singles(self) -> dict[Cell, float]:
        return {
            (layer, o.format): o.divergence
            for layer, choices in self.problem.options.items()
            for o in choices
        }

    def _build(self, target: Built) -> Build | None:
        """Return the cheapest choice that was not built, within a level that may be accepted."""
        problem = self._learned()
        tried = {tuple(engine.proposal.formats.values()) for engine in self.built}
        best = self.best()
        most = math.inf if best is None else score(best.proposal, self.problem)
        careful = 0.0 if best is None else self.predicted(best.proposal.formats)
        for level in _levels(careful, self._first_level(target, careful)):
            try:
                proposal = at_level(problem, level)
            except BudgetError:
                break
            if all(form == problem.high_precision for form in proposal.formats.values()):
                break
            if score(proposal, self.problem) >= most:
                break
            if tuple(proposal.formats.values()) not in tried:
                return Build(proposal, _why(target, len(self.found), level))
        return None

    def _first_level(self, target: Built, careful: float) -> float:
        """Return the first level to try: what the target was meant to diverge by.

        Where the model explains the target's miss, the choice within that level leaves out what
        broke. Where the target met its prediction, the level itself was too high: the next one lies
        half way, in its logarithm, to the level that was accepted.
        """
        meant = target.proposal.divergence_sum
        if self.predicted(target.proposal.formats) > MISS * meant:
            return meant
        return math.sqrt(meant * careful) if 0 < careful < meant else meant / 2


def lowered(formats: Mapping[str, str], high_precision: str) -> Cells:
    """Return the cells of a choice that are not in high precision."""
    return frozenset((layer, form) for layer, form in formats.items() if form != high_precision)


def _levels(careful: float, first: float) -> list[float]:
    """Return levels from the first one down towards what was accepted, or to a thousandth."""
    low = careful if 0 < careful < first else first / 1000
    if first <= 0:
        return [0.0]
    step = (low / first) ** (1 / _CAREFUL)
    return [first * step**index for index in range(_CAREFUL)]


def _why(target: Built, sets: int, level: float) -> str:
    learned = f" with {sets} measured interactions" if sets else ""
    return f"{target.name} was not accepted; solved again{learned} within {level:.3g}"


def step_words(engine: Built, before: Sequence[Built]) -> str:
    """Return ``kept`` where a repaired engine is the best one accepted so far, else ``back``."""
    return "kept" if engine.accepted else "back" if any(e.accepted for e in before) else "worse"
