"""The best choice of formats within limits: a multiple-choice knapsack, solved exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qbench.errors import BudgetError, InputError, MeasurementError
from qbench.planning.costs import Option
from qbench.planning.problem import (
    Group,
    Limits,
    Places,
    Problem,
    Proposal,
    amount_of,
    combined_costs,
    elements_of,
    group_options,
    joint_terms,
)

#: The objective is scaled to this span, far above the solver's absolute tolerances of 1e-6.
_SCALE = 1e4
#: Relative slack of a limit: rounding in the sum, nothing more.
_SLACK = 1e-9
#: What ``scipy.optimize.milp`` calls a program without a solution.
_INFEASIBLE = 2
#: Choices that the solver's tolerance let through are forbidden one by one, at most so many;
#: after that the limit itself is lowered by a hair.
_FORBIDDEN = 6
_WORDS = {
    "divergence": "a divergence of",
    "seconds": "a change of a batch's time, in seconds, of",
    "bytes": "weights, in bytes, of",
    "bits": "mean bits a weight of",
}


def solve(problem: Problem) -> dict[str, str]:
    """Return the best format of each layer within the problem's limits.

    Minimises seconds (``latency``), bytes or divergence; of equally good choices the one that has
    less of the other costs is taken. ``balanced`` minimises seconds plus a tenth of bytes, each
    over its span, so that a hair of time does not keep a large table. Exact: a mixed-integer
    program, one binary variable an option, and one bounded variable a measured interaction, which
    is 1 where all its cells are chosen. The limits are checked on the choice, not believed.

    Raises:
        BudgetError: If no choice keeps the limits; the message has the range that can be reached.
        InputError: If the options are none.
    """
    groups, extras = joint_terms(group_options(problem), problem.interactions)
    limits = _reachable_limits(groups, extras, problem.limits)
    program = _Program(groups, extras, combined_costs(groups, problem.objective), problem.objective)
    picks = program.best(limits)
    if picks is None:
        raise BudgetError(_together(groups, extras, limits))
    return _spread(groups, [g.options[p] for g, p in zip(groups, picks, strict=True)], problem)


def propose(formats: Mapping[str, str], problem: Problem, level: float | None = None) -> Proposal:
    """Return a choice of formats with its summed costs.

    Raises:
        InputError: If a layer takes a format that it was not offered.
    """
    groups, extras = joint_terms(group_options(problem), problem.interactions)
    picks = [_pick(group, formats) for group in groups]
    chosen = [group.options[pick] for group, pick in zip(groups, picks, strict=True)]
    total = max(0.0, _total(groups, extras, picks, "divergence"))
    elements = elements_of(groups)
    stored = sum(o.bytes for o in chosen if o.elements)
    return Proposal(
        level=total if level is None else level,
        formats=_spread(groups, chosen, problem),
        divergence_sum=total,
        bytes=sum(o.bytes for o in chosen),
        seconds=math.fsum(o.seconds for o in chosen),
        bits=math.fsum(amount_of(o, "bits", elements) for o in chosen),
        stored_bits=8 * stored / elements if elements else 0.0,
    )


def reach(problem: Problem, quantity: str) -> tuple[float, float]:
    """Return the least and the most that any choice has of one quantity, other limits aside."""
    groups, _ = joint_terms(group_options(problem), problem.interactions)
    return _reach(groups, quantity)


def check_limits(problem: Problem) -> None:
    """Check each limit alone against what the options can reach.

    Raises:
        BudgetError: If one lies below; the message has the range that can be reached.
    """
    groups, extras = joint_terms(group_options(problem), problem.interactions)
    _reachable_limits(groups, extras, problem.limits)


def _pick(group: Group, formats: Mapping[str, str]) -> int:
    wanted = {formats[layer] for layer in group.layers}
    for place, option in enumerate(group.options):
        if wanted == {option.format}:
            return place
    raise InputError(
        f"{' and '.join(group.layers)} cannot take {' and '.join(sorted(wanted))}; "
        f"offered: {', '.join(o.format for o in group.options)}"
    )


def _reach(groups: Sequence[Group], quantity: str) -> tuple[float, float]:
    elements = elements_of(groups)
    amounts = [[amount_of(o, quantity, elements) for o in group.options] for group in groups]
    return math.fsum(min(row) for row in amounts), math.fsum(max(row) for row in amounts)


def _reachable_limits(
    groups: Sequence[Group], extras: Mapping[Places, float], limits: Limits
) -> Limits:
    """Return the limits, those a hair below what can be reached set to it."""
    fitted: dict[str, float] = {}
    for quantity, limit in limits.given().items():
        least, most = _reach(groups, quantity)
        if quantity == "divergence" and extras:
            fitted[quantity] = limit  # they may lower a sum: the program itself decides
        elif not limit >= least - _SLACK * abs(least):
            raise BudgetError(
                f"no plan has {_WORDS[quantity]} at most {limit:.10g}; "
                f"reachable: {least:.6g} to {most:.6g}"
            )
        else:
            fitted[quantity] = max(limit, least)
    return replace(limits, **fitted)


def _together(groups: Sequence[Group], extras: Mapping[Places, float], limits: Limits) -> str:
    """Return why limits that can each be kept alone cannot be kept together."""
    told = []
    given = limits.given()
    for quantity, limit in given.items():
        others = replace(limits, **{quantity: None})
        elements = elements_of(groups)
        costs = [[amount_of(o, quantity, elements) for o in g.options] for g in groups]
        picks = _Program(groups, extras, costs, quantity).best(others)
        if picks is not None:
            least = _total(groups, extras, picks, quantity)
            told.append(
                f"{_WORDS[quantity]} at most {limit:.10g} (reachable within the rest: {least:.6g})"
            )
    words = " and ".join(told or [f"{_WORDS[q]} at most {v:.10g}" for q, v in given.items()])
    return f"no plan has {words} at once; loosen one of them"


def _total(
    groups: Sequence[Group], extras: Mapping[Places, float], picks: Sequence[int], quantity: str
) -> float:
    elements = elements_of(groups)
    parts = [
        amount_of(g.options[p], quantity, elements) for g, p in zip(groups, picks, strict=True)
    ]
    if quantity == "divergence":
        chosen = set(enumerate(picks))
        parts += [extra for places, extra in extras.items() if chosen.issuperset(places)]
    return math.fsum(parts)


@dataclass(slots=True)
class _Program:
    """The mixed-integer program of one problem; limits come when it is solved.

    Attributes:
        groups: The independent choices.
        extras: Extra divergence of two options.
        costs: Cost of each option.
        objective: What it is; interactions count in ``divergence``.
    """

    groups: Sequence[Group]
    extras: Mapping[Places, float]
    costs: Sequence[Sequence[float]]
    objective: str

    def best(self, limits: Limits) -> list[int] | None:
        """Return the best option of each group within the limits; ``None`` where there is none."""
        forbidden: list[list[int]] = []
        asked = limits.given()
        for attempt in range(2 * _FORBIDDEN):
            picks = self._solve(asked, forbidden)
            if picks is None:
                return self._most_careful(limits)
            over = self._over(picks, limits)
            if not over:
                return picks
            # The solver's feasibility tolerance let a hair more through.
            if attempt < _FORBIDDEN:
                forbidden.append(picks)
            else:
                asked = {q: v - 2 * over.get(q, 0.0) for q, v in asked.items()}
        return self._most_careful(limits)

    def _over(self, picks: Sequence[int], limits: Limits) -> dict[str, float]:
        found = {}
        for quantity, limit in limits.given().items():
            total = _total(self.groups, self.extras, picks, quantity)
            if total > limit + _SLACK * abs(limit):
                found[quantity] = total - limit
        return found

    def _most_careful(self, limits: Limits) -> list[int] | None:
        """Return the least divergent choice if it keeps the limits: rounding hides it at times."""
        picks = [int(np.argmin([o.divergence for o in g.options])) for g in self.groups]
        return None if self._over(picks, limits) else picks

    def _solve(
        self, limits: Mapping[str, float], forbidden: Sequence[Sequence[int]]
    ) -> list[int] | None:
        from scipy.optimize import Bounds, milp

        places = [(g, o) for g, group in enumerate(self.groups) for o in range(len(group.options))]
        column = {place: index for index, place in enumerate(places)}
        joint = list(self.extras)
        width = len(places) + len(joint)
        rows = _Rows(width)
        for g, group in enumerate(self.groups):
            rows.add({column[g, o]: 1.0 for o in range(len(group.options))}, 1.0, 1.0)
        for picks in forbidden:
            rows.add({column[place]: 1.0 for place in enumerate(picks)}, -np.inf, len(picks) - 1.0)
        for index, ends in enumerate(joint, len(places)):
            if self.extras[ends] > 0:
                own = dict.fromkeys((column[end] for end in ends), 1.0)
                rows.add({index: -1.0, **own}, -np.inf, len(ends) - 1.0)
            else:
                for end in ends:
                    rows.add({index: 1.0, column[end]: -1.0}, -np.inf, 0.0)
        upper = np.ones(width)
        for quantity, limit in limits.items():
            self._limit(rows, upper, column, quantity, limit)
        result = milp(
            self._objective_row(places, joint),
            integrality=np.r_[np.ones(len(places)), np.zeros(len(joint))],
            bounds=Bounds(0, upper),
            constraints=rows.constraints(),
            options={"mip_rel_gap": 0.0},
        )
        if result.x is None and result.status != _INFEASIBLE:
            raise MeasurementError(f"the solver gave up on the choice of formats: {result.message}")
        return None if result.x is None else _largest(result.x, places, len(self.groups))

    def _limit(
        self,
        rows: _Rows,
        upper: NDArray[np.float64],
        column: Mapping[tuple[int, int], int],
        quantity: str,
        limit: float,
    ) -> None:
        """Add a limit as a row, counted above each group's least so that it is scaled well."""
        elements = elements_of(self.groups)
        joint = self.extras if quantity == "divergence" else {}
        left, row = limit, dict[int, float]()
        for g, group in enumerate(self.groups):
            amounts = [amount_of(o, quantity, elements) for o in group.options]
            left -= min(amounts)
            for o, amount in enumerate(amounts):
                row[column[g, o]] = amount - min(amounts)
        row |= {i: extra for i, extra in enumerate(joint.values(), len(column))}
        largest = max(map(abs, row.values()), default=0.0)
        if not any(extra < 0 for extra in joint.values()):
            for index, amount in row.items():
                if amount > max(left, 0.0) + _SLACK * largest:
                    upper[index] = 0.0
        scale = left if left > _SLACK * largest else largest or 1.0
        rows.add({i: v / scale for i, v in row.items()}, -np.inf, left / scale)

    def _objective_row(
        self, places: Sequence[tuple[int, int]], joint: Sequence[Places]
    ) -> NDArray[np.float64]:
        least = [min(row) for row in self.costs]
        own = np.array([self.costs[g][o] - least[g] for g, o in places])
        spans = math.fsum(max(row) - min(row) for row in self.costs) or 1.0
        extra = np.zeros(len(joint))
        if self.objective == "divergence" and joint:
            widths = [
                max(o.divergence for o in g.options) - min(o.divergence for o in g.options)
                for g in self.groups
            ]
            unit = spans / (math.fsum(widths) or 1.0)
            extra = np.array([self.extras[ends] * unit for ends in joint])
        row: NDArray[np.float64] = np.r_[own, extra] * (_SCALE / spans)
        return row


@dataclass(slots=True)
class _Rows:
    """Linear constraints in the making, one a row."""

    width: int
    entries: list[tuple[int, int, float]]
    lower: list[float]
    upper: list[float]

    def __init__(self, width: int) -> None:
        self.width, self.entries, self.lower, self.upper = width, [], [], []

    def add(self, row: Mapping[int, float], lower: float, upper: float) -> None:
        """Add ``lower ≤ Σ row·x ≤ upper``."""
        self.entries += [(len(self.lower), index, value) for index, value in row.items()]
        self.lower.append(lower)
        self.upper.append(upper)

    def constraints(self) -> Any:
        """Return them as SciPy takes them."""
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_array

        at, index, values = zip(*self.entries, strict=True)
        shape = (len(self.lower), self.width)
        return LinearConstraint(csr_array((values, (at, index)), shape), self.lower, self.upper)


def _largest(x: NDArray[np.float64], places: Sequence[tuple[int, int]], groups: int) -> list[int]:
    best: dict[int, tuple[float, int]] = {}
    for share, (g, o) in zip(x, places, strict=False):
        if g not in best or share > best[g][0]:
            best[g] = (float(share), o)
    return [best[g][1] for g in range(groups)]


def _spread(groups: Sequence[Group], chosen: Sequence[Option], problem: Problem) -> dict[str, str]:
    formats = {
        layer: option.format
        for group, option in zip(groups, chosen, strict=True)
        for layer in group.layers
    }
    order: Iterable[str] = problem.options
    return {layer: formats[layer] for layer in order}


def score(proposal: Proposal, problem: Problem) -> float:
    """Return what a choice costs by the problem's objective, as ``combined_costs`` counts it."""
    groups, _ = joint_terms(group_options(problem), problem.interactions)
    costs = combined_costs(groups, problem.objective)
    return math.fsum(
        row[_pick(group, proposal.formats)] for group, row in zip(groups, costs, strict=True)
    )
