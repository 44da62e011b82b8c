"""The cheapest choice of formats within a divergence: a multiple-choice knapsack."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from qbench.errors import InputError, MeasurementError
from qbench.planning.costs import Option

Objective = Literal["balanced", "latency", "bytes"]
Options = Mapping[str, Sequence[Option]]
Ties = Mapping[str, Sequence[str]]

#: The other cost counts this much of its span: it decides between equals and nothing else.
TIEBREAK = 1e-6
#: ``balanced`` is latency, with all the bytes that can be saved worth a tenth of all the time.
BALANCE = 0.1
#: The objective is scaled to this span, far above the solver's absolute tolerances of 1e-6.
_SCALE = 1e4
#: Relative slack of the budget: rounding in the sum, nothing more.
_SLACK = 1e-9
#: What ``scipy.optimize.milp`` calls a program without a solution.
_INFEASIBLE = 2


@dataclass(frozen=True, slots=True)
class Proposal:
    """A choice of formats with what it is expected to cost.

    Attributes:
        level: The divergence that it was allowed; for a random plan, its own sum.
        formats: Format of each layer.
        divergence_sum: Sum of its cells' divergences: it orders proposals, it predicts no drop.
        bytes: Bytes of all layers' weights; tied storage counts once.
        seconds: Change of a batch's time against all high precision.
    """

    level: float
    formats: Mapping[str, str]
    divergence_sum: float
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that take one format together, and what each format means for all of them."""

    layers: tuple[str, ...]
    options: tuple[Option, ...]


def group_options(options: Options, ties: Ties | None = None) -> list[Group]:
    """Return the independent choices: a layer each, or the layers of one tie together.

    The format of a tie is one that all its layers offer; divergences and seconds add up, the
    bytes of the shared storage count once.

    Raises:
        InputError: If a layer has no option, an option's number is not finite or its divergence
            is negative, a tie names an unknown layer, or its layers share no format.
    """
    for layer, choices in options.items():
        _check_options(layer, choices)
    tied: dict[str, tuple[str, ...]] = {}
    for tie, names in (ties or {}).items():
        unknown = [name for name in names if name not in options]
        if unknown:
            raise InputError(f"tie {tie!r} names {unknown[0]!r}, which has no options")
        tied |= dict.fromkeys(names, tuple(names))
    members = dict.fromkeys(tied.get(layer, (layer,)) for layer in options)
    return [Group(layers, _merge([options[layer] for layer in layers])) for layers in members]


def solve(
    options: Options,
    *,
    max_divergence: float,
    objective: Objective = "latency",
    ties: Ties | None = None,
) -> dict[str, str]:
    """Return the cheapest format of each layer such that the divergences sum to at most a level.

    Minimises seconds (``latency``) or bytes; of equally cheap choices the one that has less of
    the other is taken. ``balanced`` minimises seconds plus a tenth of bytes, each over its span,
    so that a hair of time does not keep a large table. Exact: a mixed-integer program, one binary
    variable an option.

    Args:
        options: What each layer may become.
        max_divergence: Largest sum of divergences.
        objective: ``balanced``, ``latency`` or ``bytes``.
        ties: Layers that share storage, and so take one format.

    Raises:
        InputError: If no choice stays within ``max_divergence``; the message has the range that
            can be reached.
    """
    groups = group_options(options, ties)
    least = sum(min(o.divergence for o in group.options) for group in groups)
    most = sum(max(o.divergence for o in group.options) for group in groups)
    if not max_divergence >= least * (1 - _SLACK):
        raise InputError(
            f"no plan has a divergence of at most {max_divergence:g}; "
            f"reachable: {least:.4g} to {most:.4g}"
        )
    limit = max(max_divergence, least)
    chosen = _solve_groups(groups, limit, objective)
    return _spread(groups, chosen, options)


def propose(
    formats: Mapping[str, str],
    options: Options,
    ties: Ties | None = None,
    level: float | None = None,
) -> Proposal:
    """Return a choice of formats with its summed costs.

    Raises:
        InputError: If a layer takes a format that it was not offered.
    """
    groups = group_options(options, ties)
    chosen = []
    for group in groups:
        wanted = {formats[layer] for layer in group.layers}
        match = [o for o in group.options if wanted == {o.format}]
        if not match:
            raise InputError(
                f"{' and '.join(group.layers)} cannot take {' and '.join(sorted(wanted))}; "
                f"offered: {', '.join(o.format for o in group.options)}"
            )
        chosen.append(match[0])
    total = math.fsum(o.divergence for o in chosen)
    return Proposal(
        level=total if level is None else level,
        formats=_spread(groups, chosen, options),
        divergence_sum=total,
        bytes=sum(o.bytes for o in chosen),
        seconds=math.fsum(o.seconds for o in chosen),
    )


def cost_of(item: Option | Proposal, objective: Objective) -> float:
    """Return what the objective counts first of an option or a proposal."""
    return float(item.bytes) if objective == "bytes" else item.seconds


def combined_costs(groups: Sequence[Group], objective: Objective) -> list[list[float]]:
    """Return each option's cost: the objective over its span plus its share of the other cost."""
    other: Objective = "latency" if objective == "bytes" else "bytes"
    share = BALANCE if objective == "balanced" else TIEBREAK
    spans = {}
    for name in (objective, other):
        widths = (_width([cost_of(o, name) for o in group.options]) for group in groups)
        spans[name] = sum(widths) or 1.0
    return [
        [
            cost_of(o, objective) / spans[objective] + share * cost_of(o, other) / spans[other]
            for o in group.options
        ]
        for group in groups
    ]


def _check_options(layer: str, choices: Sequence[Option]) -> None:
    if not choices:
        raise InputError(f"layer {layer!r} has no option; its high precision is always one")
    for o in choices:
        if not (math.isfinite(o.divergence) and math.isfinite(o.seconds) and o.divergence >= 0):
            raise InputError(
                f"layer {layer!r} as {o.format}: divergence {o.divergence:g}, seconds "
                f"{o.seconds:g}; both must be finite and the divergence ≥ 0"
            )


def _merge(choices: Sequence[Sequence[Option]]) -> tuple[Option, ...]:
    if len(choices) == 1:
        return tuple(choices[0])
    by_format = [{o.format: o for o in offered} for offered in choices]
    shared = [form for form in by_format[0] if all(form in other for other in by_format[1:])]
    if not shared:
        raise InputError("layers that share storage have no format in common; offer them one")
    merged = []
    for form in shared:
        parts = [offered[form] for offered in by_format]
        merged.append(
            Option(
                form,
                math.fsum(o.divergence for o in parts),
                max(o.bytes for o in parts),
                math.fsum(o.seconds for o in parts),
            )
        )
    return tuple(merged)


def _solve_groups(groups: Sequence[Group], limit: float, objective: Objective) -> list[Option]:
    """Return the best option of each group; the sum is checked, not believed."""
    budget = limit
    for _ in range(8):
        chosen = _solve_once(groups, budget, objective)
        total = math.fsum(o.divergence for o in chosen)
        if total <= limit * (1 + _SLACK):
            return chosen
        # The solver's feasibility tolerance let a hair more through: ask for a hair less.
        budget -= 2 * (total - limit)
    return [min(group.options, key=lambda o: o.divergence) for group in groups]


def _solve_once(groups: Sequence[Group], budget: float, objective: Objective) -> list[Option]:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    costs = combined_costs(groups, objective)
    flat = [
        (g, o, cost)
        for g, group in enumerate(groups)
        for o, cost in zip(group.options, costs[g], strict=True)
        if o.divergence <= budget or o.divergence == 0
    ]
    owner = np.array([g for g, _, _ in flat])
    weights = np.array([o.divergence for _, o, _ in flat])
    least = np.array([min(row) for row in costs])
    objective_row = (np.array([cost for _, _, cost in flat]) - least[owner]) * _SCALE
    one_each = csr_array((np.ones(len(flat)), (owner, np.arange(len(flat)))))
    constraints = [LinearConstraint(one_each, 1, 1)]
    if budget > 0:
        constraints.append(LinearConstraint(weights[None, :] / budget, -np.inf, 1.0))
    result = milp(
        objective_row,
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None and result.status != _INFEASIBLE:
        raise MeasurementError(f"the solver gave up on the choice of formats: {result.message}")
    if result.x is None:
        return [min(group.options, key=lambda o: o.divergence) for group in groups]
    best: dict[int, tuple[float, Option]] = {}
    for share, (g, o, _) in zip(result.x, flat, strict=True):
        if g not in best or share > best[g][0]:
            best[g] = (float(share), o)
    return [best[g][1] for g in range(len(groups))]


def _spread(
    groups: Sequence[Group], chosen: Sequence[Option], order: Iterable[str]
) -> dict[str, str]:
    formats = {
        layer: option.format
        for group, option in zip(groups, chosen, strict=True)
        for layer in group.layers
    }
    return {layer: formats[layer] for layer in order}


def _width(values: Sequence[float]) -> float:
    return max(values) - min(values)
