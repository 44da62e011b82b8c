"""Proposals to build and measure: a front over divergence levels, and random plans to compare."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qbench.errors import InputError
from qbench.planning.solve import (
    Group,
    Objective,
    Options,
    Proposal,
    Ties,
    combined_costs,
    cost_of,
    group_options,
    propose,
    solve,
)

#: A random plan's cost is within this share of its target.
RANDOM_TOLERANCE = 0.02
#: Halvings of the divergence range in which the front's first level is sought.
_BISECTIONS = 12


def front(
    options: Options,
    levels: int = 8,
    *,
    objective: Objective = "latency",
    ties: Ties | None = None,
) -> list[Proposal]:
    """Return the cheapest proposals at log-spaced divergence levels, the most careful first.

    The greatest useful level is the sum of the cheapest choice of all: more divergence buys
    nothing. The least useful one is where the first ``1 / levels`` of that choice's saving is
    reached: below it there is hardly anything to build. Proposals that choose the same formats
    appear once, so there may be fewer than ``levels``; all high precision is never one (the first
    option of each layer counts as its high precision, as in ``Offer``).

    Args:
        options: What each layer may become.
        levels: Number of levels, at least 1.
        objective: ``balanced``, ``latency`` or ``bytes``.
        ties: Layers that share storage.

    Returns:
        The proposals; empty where no choice is cheaper than all high precision.

    Raises:
        InputError: If ``levels`` is below 1.
    """
    if levels < 1:
        raise InputError(f"levels: got {levels}; at least 1 is needed")
    groups = group_options(options, ties)
    careful = _at(options, 0.0, objective, ties, groups)
    cheapest = _cheapest(options, groups, objective, ties)
    kept = math.fsum(cost_of(group.options[0], objective) for group in groups)
    saving = kept - cost_of(cheapest, objective)
    if saving <= 0:
        return []
    most = cheapest.divergence_sum
    if most <= careful.divergence_sum:
        return [cheapest]
    share = kept - saving / levels
    least = _least_level(options, (careful.divergence_sum, most), share, objective, ties)
    found: dict[tuple[str, ...], Proposal] = {tuple(careful.formats.values()): careful}
    for level in np.geomspace(least, most, levels) if levels > 1 else [most]:
        formats = solve(options, max_divergence=float(level), objective=objective, ties=ties)
        proposal = propose(formats, options, ties, float(level))
        found.setdefault(tuple(formats.values()), proposal)
    found.pop(tuple(choices[0].format for choices in options.values()), None)
    return list(found.values())


def random_plan(
    options: Options,
    *,
    target_cost: float,
    objective: Objective = "latency",
    seed: int = 0,
    ties: Ties | None = None,
) -> Proposal:
    """Return a proposal of random formats whose cost is within 2 % of ``target_cost``.

    Every layer draws a format at random; then random layers draw again, and a draw is kept if it
    brings the sum nearer to the target. Where 200 such starts miss it (few layers, coarse costs)
    the nearest one seen is returned: compare its cost with the target.

    Args:
        options: What each layer may become.
        target_cost: Seconds or bytes, as ``Proposal`` counts them.
        objective: Which of the two; ``balanced`` means seconds.
        seed: Seed of the draws.
        ties: Layers that share storage.

    Raises:
        InputError: If the target lies outside of what the options can reach.
    """
    groups = group_options(options, ties)
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
    return propose(formats, options, ties)


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


def _at(
    options: Options, level: float, objective: Objective, ties: Ties | None, groups: Sequence[Group]
) -> Proposal:
    """Return the cheapest proposal at a level, or at the least level that can be reached."""
    least = math.fsum(min(o.divergence for o in group.options) for group in groups)
    allowed = max(level, least)
    formats = solve(options, max_divergence=allowed, objective=objective, ties=ties)
    return propose(formats, options, ties, allowed)


def _cheapest(
    options: Options, groups: Sequence[Group], objective: Objective, ties: Ties | None
) -> Proposal:
    """Return the cheapest choice whatever its divergence; of equal ones the least divergent."""
    formats: dict[str, str] = {}
    for group, costs in zip(groups, combined_costs(groups, objective), strict=True):
        ranked = zip(costs, (o.divergence for o in group.options), group.options, strict=True)
        _, _, best = min(ranked, key=lambda entry: entry[:2])
        formats |= dict.fromkeys(group.layers, best.format)
    return propose({layer: formats[layer] for layer in options}, options, ties)


def _least_level(
    options: Options,
    ends: tuple[float, float],
    share: float,
    objective: Objective,
    ties: Ties | None,
) -> float:
    """Return the lowest level, to a factor, whose best proposal costs at most ``share``."""
    positive = [o.divergence for choices in options.values() for o in choices if o.divergence > 0]
    low, high = max(ends[0], min(positive)), ends[1]
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        if not low < middle < high:
            break
        formats = solve(options, max_divergence=middle, objective=objective, ties=ties)
        if cost_of(propose(formats, options, ties), objective) <= share:
            high = middle
        else:
            low = middle
    return high
