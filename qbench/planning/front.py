"""Proposals to build and measure: a front over divergence levels, and random plans to compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from qbench.errors import BudgetError, InputError
from qbench.planning.costs import Option
from qbench.planning.problem import Group, Objective, Problem, Proposal, cost_of, group_options
from qbench.planning.solve import propose, reach, solve

#: A random plan's cost is within this share of its target.
RANDOM_TOLERANCE = 0.02
#: Halvings of the divergence range in which the front's first level is sought.
_BISECTIONS = 12


def front(problem: Problem, levels: int = 8) -> list[Proposal]:
    """Return the cheapest proposals at log-spaced divergence levels, the most careful first.

    The greatest useful level is the sum of the cheapest choice of all: more divergence buys
    nothing. The least useful one is where the first ``1 / levels`` of that choice's saving is
    reached: below it there is hardly anything to build. Proposals that choose the same formats
    appear once, so there may be fewer than ``levels``; all high precision is never one. Every
    proposal keeps the problem's limits. Where the objective is divergence the first proposal is
    its optimum, and the others trade divergence for time and bytes (``balanced``).

    Args:
        problem: What each layer may become, and within what.
        levels: Number of levels, at least 1.

    Returns:
        The proposals; empty where no choice is cheaper than all high precision.

    Raises:
        InputError: If ``levels`` is below 1.
        BudgetError: If no choice keeps the limits.
    """
    if levels < 1:
        raise InputError(f"levels: got {levels}; at least 1 is needed")
    traded = replace(problem, objective=_traded(problem.objective))
    careful = _most_careful(problem)
    cheapest = _cheapest(traded)
    saving = cost_of(careful, traded.objective) - cost_of(cheapest, traded.objective)
    if saving <= 0:
        return _worth_building([careful], problem)
    most = cheapest.divergence_sum
    if most <= careful.divergence_sum:
        return [cheapest]
    share = cost_of(careful, traded.objective) - saving / levels
    least = _least_level(traded, (careful.divergence_sum, most), share)
    found = [careful]
    for level in np.geomspace(least, most, levels) if levels > 1 else [most]:
        found.append(at_level(traded, float(level)))
    return _worth_building(found, problem)


def without_mixture(problem: Problem, proposals: Sequence[Proposal]) -> list[Proposal]:
    """Return the last of a front's proposals with one format where it mixes several.

    There is one for each format that two groups of layers take. What layers cost alone decides
    narrowly between kernels that are about as fast; other batches, or the layers beside each
    other, may decide otherwise, which the engines tell. A layer that keeps the high precision, or
    is not offered the format, stays as it is.

    Args:
        problem: What each layer may become, and within what.
        proposals: A front; nothing that it holds is returned.
    """
    groups = group_options(problem)
    taken = [proposals[-1].formats[group.layers[0]] for group in groups]
    known = {tuple(p.formats.values()) for p in proposals}
    found: dict[tuple[str, ...], Proposal] = {}
    for form in dict.fromkeys(taken):
        if form == problem.high_precision or taken.count(form) < 2:
            continue
        formats: dict[str, str] = {}
        for group, own in zip(groups, taken, strict=True):
            offered = own != problem.high_precision and form in {o.format for o in group.options}
            formats |= dict.fromkeys(group.layers, form if offered else own)
        other = propose(formats, problem)
        if _within(other, problem):
            found.setdefault(tuple(other.formats.values()), other)
    return [proposal for formats, proposal in found.items() if formats not in known]


def _within(proposal: Proposal, problem: Problem) -> bool:
    costs = {
        "divergence": proposal.divergence_sum,
        "seconds": proposal.seconds,
        "bytes": proposal.bytes,
        "bits": proposal.bits,
    }
    return all(costs[name] <= most for name, most in problem.limits.given().items())


def at_level(problem: Problem, level: float) -> Proposal:
    """Return the best proposal whose divergence is at most ``level``, within the other limits.

    Raises:
        BudgetError: If there is none.
    """
    given = problem.limits.divergence
    limit = level if given is None else min(level, given)
    limited = replace(problem, limits=replace(problem.limits, divergence=limit))
    return propose(solve(limited), problem, level)


def random_plan(problem: Problem, *, target_cost: float, seed: int = 0) -> Proposal:
    """Return a proposal of random formats whose cost is within 2 % of ``target_cost``.

    Every layer draws a format at random, the high precision among them, and no other that is
    neither faster nor smaller than it: a plan is not compared with what nobody would build. Then
    random layers draw again, and a draw is kept if it brings the sum nearer to the target. Where
    200 such starts miss it (few layers, coarse costs) the nearest one seen is returned: compare
    its cost with the target.

    Args:
        problem: What each layer may become; its limits do not bind a random plan.
        target_cost: Seconds or bytes, as ``Proposal`` counts them; ``balanced`` means seconds.
        seed: Seed of the draws.

    Raises:
        InputError: If the target lies outside of what the options can reach.
    """
    objective = _traded(problem.objective)
    groups = [replace(g, options=_worth_drawing(g)) for g in group_options(problem)]
    costs = [np.array([cost_of(o, objective) for o in group.options], float) for group in groups]
    lowest = math.fsum(float(c.min()) for c in costs)
    highest = math.fsum(float(c.max()) for c in costs)
    allowed = RANDOM_TOLERANCE * abs(target_cost)
    if not lowest - allowed <= target_cost <= highest + allowed:
        raise InputError(
            f"no plan costs {target_cost:g} ({objective}); reachable: {lowest:g} to {highest:g}"
        )
    rng = np.random.default_rng([seed, len(groups)])
    best: list[int] = []
    best_gap = math.inf
    for _ in range(200):
        picks, gap = _walk(costs, target_cost, allowed, rng)
        if gap < best_gap:
            best, best_gap = picks, gap
        if best_gap <= allowed:
            break
    formats = {
        layer: group.options[pick].format
        for group, pick in zip(groups, best, strict=True)
        for layer in group.layers
    }
    return propose(formats, problem)


def _worth_drawing(group: Group) -> tuple[Option, ...]:
    """Return a group's high precision, and what is faster or smaller than it."""
    kept, *others = group.options
    gains = [o for o in others if o.seconds < kept.seconds or o.bytes < kept.bytes]
    return (kept, *gains)


def _traded(objective: Objective) -> Objective:
    """Return the cost that a front trades for divergence."""
    return "balanced" if objective == "divergence" else objective


def _worth_building(proposals: Sequence[Proposal], problem: Problem) -> list[Proposal]:
    """Return the proposals that differ from each other and lower something."""
    found: dict[tuple[str, ...], Proposal] = {}
    for proposal in proposals:
        found.setdefault(tuple(proposal.formats.values()), proposal)
    high = problem.high_precision
    return [p for formats, p in found.items() if any(form != high for form in formats)]


def _walk(
    costs: Sequence[NDArray[np.float64]], target: float, allowed: float, rng: np.random.Generator
) -> tuple[list[int], float]:
    picks = [int(rng.integers(len(c))) for c in costs]
    total = math.fsum(float(c[pick]) for c, pick in zip(costs, picks, strict=True))
    for _ in range(40 * len(costs)):
        if abs(total - target) <= allowed:
            break
        at = int(rng.integers(len(costs)))
        pick = int(rng.integers(len(costs[at])))
        moved = total + float(costs[at][pick] - costs[at][picks[at]])
        if abs(moved - target) < abs(total - target):
            picks[at], total = pick, moved
    return picks, abs(total - target)


def _most_careful(problem: Problem) -> Proposal:
    """Return the best proposal of the least divergence that the limits allow."""
    limits = problem.limits
    if any(value is not None for value in (limits.seconds, limits.bytes, limits.bits)):
        formats = solve(replace(problem, objective="divergence"))
        return propose(formats, problem)
    return at_level(problem, max(0.0, reach(problem, "divergence")[0]))


def _cheapest(problem: Problem) -> Proposal:
    """Return the cheapest choice within the limits; of equal ones the least divergent."""
    found = propose(solve(problem), problem)
    if found.divergence_sum <= 0:
        return found
    limits = problem.limits
    cost = cost_of(found, problem.objective)
    if problem.objective == "balanced":
        return found
    name = "bytes" if problem.objective == "bytes" else "seconds"
    same = replace(limits, **{name: cost})
    try:
        formats = solve(replace(problem, limits=same, objective="divergence"))
    except BudgetError:  # the cost itself, to the last digit, is on the edge of a rounding
        return found
    return propose(formats, problem)


def _least_level(problem: Problem, ends: tuple[float, float], share: float) -> float:
    """Return the lowest level, to a factor, whose best proposal costs at most ``share``."""
    every = [o.divergence for choices in problem.options.values() for o in choices]
    positive = [divergence for divergence in every if divergence > 0]
    low, high = max(ends[0], min(positive)), ends[1]
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        if not low < middle < high:
            break
        if cost_of(at_level(problem, middle), problem.objective) <= share:
            high = middle
        else:
            low = middle
    return high
