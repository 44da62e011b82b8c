"""What is measured and built next, on a model of engines that is known."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest

from qbench.planning.costs import Option
from qbench.planning.front import front
from qbench.planning.interactions import (
    NotMeasured,
    Observation,
    fit_pairs,
    measured_interactions,
    minimal_set,
)
from qbench.planning.problem import Cell, Problem, Proposal
from qbench.planning.repair import Build, Built, Measure, Repair, Stop, lowered
from qbench.planning.solve import propose
from qbench.records import Estimate

LAYERS = tuple(f"layer.{i:02d}" for i in range(24))
HIGH = Option("fp32", 0.0, 4000, 0.0)


class World:
    """Engines whose divergence is the sum of their cells' and of planted sets."""

    def __init__(self, *planted: tuple[frozenset[str], float], limit: float = 0.1) -> None:
        rng = np.random.default_rng(0)
        self.alone = {name: float(rng.lognormal(-9, 1)) for name in LAYERS}
        self.planted, self.limit, self.looks = planted, limit, 0

    def problem(self) -> Problem:
        options = {n: (HIGH, Option("int8", d, 1000, -1e-3)) for n, d in self.alone.items()}
        return Problem(options)

    def divergence(self, cells: frozenset[Cell]) -> float:
        low = {layer for layer, _ in cells}
        own = sum(self.alone[name] for name in low)
        return own + sum(extra for names, extra in self.planted if names <= low)

    def engine(self, name: str, proposal: Proposal) -> Built:
        value = self.divergence(lowered(proposal.formats, "fp32"))
        estimate = Estimate(value, 0.9 * value, 1.1 * value, 100)
        return Built(name, proposal, estimate, value <= self.limit, value - self.limit)

    def repaired(self, rounds: int = 6) -> tuple[Repair, str]:
        """Drive a repair to its end and return it with why it stopped."""
        problem = self.problem()
        state = Repair(problem, rounds)
        for number, proposal in enumerate(front(problem, 4), 1):
            state.learn_engine(self.engine(f"front-{number}", proposal))
        while not isinstance(request := state.next(), Stop):
            if isinstance(request, Measure):
                for cells in request.sets:
                    self.looks += 1
                    state.learn_set(cells, self.divergence(cells))
            else:
                assert isinstance(request, Build)
                name = f"repair-{state.round}"
                state.learn_engine(self.engine(name, request.proposal), repaired=True)
        return state, request.why


def kept_high(formats: Mapping[str, str]) -> set[str]:
    return {name for name, form in formats.items() if form == "fp32"}


@pytest.mark.parametrize("pair", [(3, 17), (0, 1), (22, 23), (9, 10)])
def test_a_planted_pair_is_taken_apart(pair: tuple[int, int]) -> None:
    names = frozenset(LAYERS[i] for i in pair)
    world = World((names, 1.0))
    state, _ = world.repaired()
    best = state.best()
    assert best is not None
    high = kept_high(best.proposal.formats)
    assert len(high) == 1 and high < names  # one of the two, and nothing else, stays high
    assert world.looks <= 2 * 16


def test_three_layers_that_break_together_and_two_pairs() -> None:
    triple = World((frozenset(LAYERS[i] for i in (2, 11, 20)), 1.0))
    best = triple.repaired()[0].best()
    assert best is not None and len(kept_high(best.proposal.formats)) == 1
    pairs = World((frozenset(LAYERS[:2]), 1.0), (frozenset(LAYERS[10:12]), 0.8))
    best = pairs.repaired()[0].best()
    assert best is not None and len(kept_high(best.proposal.formats)) == 2


def test_nothing_is_measured_where_all_engines_are_accepted() -> None:
    world = World()
    state, why = world.repaired()
    assert world.looks == 0 and state.round == 1 and "cheaper" in why


def test_where_nothing_is_ever_accepted_rounds_end() -> None:
    world = World(limit=-1.0)
    state, why = world.repaired(rounds=3)
    assert state.best() is None
    assert why in ("all 3 rounds are used",) or "no choice" in why
    assert World(limit=-1.0).repaired(rounds=0)[1] == "all 0 rounds are used"


def test_an_engine_that_met_its_prediction_gets_a_lower_level() -> None:
    world = World(limit=4e-4)  # no interaction: the sum itself is too large
    state, _ = world.repaired()
    assert world.looks == 0
    repaired = [e for e in state.built if e.name.startswith("repair")]
    assert repaired
    best = state.best()
    assert best is not None and best.divergence.value <= 4e-4


def test_the_fit_blames_what_only_bad_engines_share() -> None:
    cells = [(name, "int8") for name in LAYERS[:8]]
    singles = dict.fromkeys(cells, 1e-4)
    rng = np.random.default_rng(1)
    bad = frozenset(cells[2:4])
    seen = []
    for _ in range(24):
        chosen = frozenset(c for c in cells if rng.random() < 0.5)
        seen.append(Observation(chosen, 1e-4 * len(chosen) + (0.3 if bad <= chosen else 0.0)))
    fitted = fit_pairs(singles, seen, cells)
    assert max(fitted, key=lambda pair: fitted[pair]) == bad
    assert fitted[bad] > 0.1  # few measurements for so many pairs: it is shrunk, and stands out
    assert set(fit_pairs(singles, [], cells).values()) == {0.0}


@pytest.mark.parametrize("size", [2, 3])
def test_the_search_finds_each_set_in_few_measurements(size: int) -> None:
    cells = [(name, "int8") for name in LAYERS[:12]]
    for planted in itertools.combinations(cells, size):
        asked = Counter[frozenset[Cell]]()
        assert set(minimal_set(cells, partial(_excess, planted, asked), 0.5)) == set(planted)
        assert len(asked) <= 5 * size


def _excess(
    planted: tuple[Cell, ...], asked: Counter[frozenset[Cell]], own: frozenset[Cell]
) -> float:
    asked[own] += 1
    return 1.0 if set(planted) <= own else 0.0


def test_the_search_asks_for_one_set_at_a_time() -> None:
    cells = [("a", "int8"), ("b", "int8")]

    def unknown(own: frozenset[Cell]) -> float:
        raise NotMeasured(own)

    with pytest.raises(NotMeasured) as asked:
        minimal_set(cells, unknown, 0.5)
    assert asked.value.cells == frozenset(cells[:1])


def test_terms_are_what_was_measured_beyond_smaller_ones() -> None:
    a, b, c = (("a", "int8"), ("b", "int8"), ("c", "int8"))
    singles = {a: 0.1, b: 0.2, c: 0.0}
    both, all_three = frozenset({a, b}), frozenset({a, b, c})
    seen = [Observation(both, 0.5), Observation(all_three, 1.1)]
    terms = measured_interactions(singles, seen, [all_three, both, frozenset({b, c})])
    assert [(t.cells, pytest.approx(t.extra)) for t in terms] == [((a, b), 0.2), ((a, b, c), 0.6)]
    options = {n: (HIGH, Option("int8", singles[n, "int8"], 1, 0.0)) for n in "abc"}
    whole = Problem(options, interactions=terms)
    assert propose(dict.fromkeys("abc", "int8"), whole).divergence_sum == pytest.approx(1.1)
