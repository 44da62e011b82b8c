"""What a planner chooses from and within what: a multiple-choice knapsack before it is solved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from qbench.errors import InputError
from qbench.planning.costs import Offer, Option

Objective = Literal["balanced", "latency", "bytes", "divergence"]
Options = Mapping[str, Sequence[Option]]
#: Layers that take one format, by the name of what binds them.
Ties = Mapping[str, Sequence[str]]
#: A layer in a format.
Cell = tuple[str, str]
#: Options by (index of the group, index of the option).
Places = tuple[tuple[int, int], ...]

#: The other cost counts this much of its span: it decides between equals and nothing else.
TIEBREAK = 1e-6
#: ``balanced`` is latency, with all the bytes that can be saved worth a tenth of all the time.
BALANCE = 0.1


@dataclass(frozen=True, slots=True)
class Limits:
    """What a choice may not exceed; ``None`` is no limit.

    Attributes:
        divergence: Largest sum of divergences, interactions included.
        seconds: Largest change of a batch's time against all high precision; below zero asks
            for a saving.
        bytes: Largest sum of the layers' weights and scales; tied storage counts once.
        bits: Largest mean bits of a weight, scales not counted.
    """

    divergence: float | None = None
    seconds: float | None = None
    bytes: float | None = None
    bits: float | None = None

    def given(self) -> dict[str, float]:
        """Return the limits that are set, by name."""
        names = ("divergence", "seconds", "bytes", "bits")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class Interaction:
    """What cells add to the divergence when all of them are chosen, beyond the rest; either sign.

    Most have two cells: a pair of layers that break together.
    """

    cells: tuple[Cell, ...]
    extra: float


@dataclass(frozen=True, slots=True)
class Problem:
    """A choice to be made.

    Attributes:
        options: What each layer may become.
        ties: Layers whose weight is one storage: they take one format and its bytes count once.
        fused: Layers that the backend computes as one: they take one format.
        tied_bytes: Bytes of a tie's storage in a format, by tie and format, where they were
            counted; else the largest of its layers' counts.
        interactions: Those that were measured.
        limits: What the choice may not exceed.
        objective: What it minimises.
        high_precision: Name of the format that layers keep.
    """

    options: Options
    ties: Ties = field(default_factory=dict)
    fused: Ties = field(default_factory=dict)
    tied_bytes: Mapping[Cell, int] = field(default_factory=dict)
    interactions: tuple[Interaction, ...] = ()
    limits: Limits = Limits()
    objective: Objective = "latency"
    high_precision: str = "fp32"


def problem_of(
    offer: Offer, objective: Objective = "latency", limits: Limits | None = None
) -> Problem:
    """Return the choice that an offer leaves."""
    return Problem(
        offer.options,
        offer.ties,
        offer.fused,
        offer.tied_bytes,
        limits=limits or Limits(),
        objective=objective,
        high_precision=offer.high_precision,
    )


@dataclass(frozen=True, slots=True)
class Proposal:
    """A choice of formats with what it is expected to cost.

    Attributes:
        level: The divergence that it was allowed; for a random plan, its own sum.
        formats: Format of each layer.
        divergence_sum: Sum of its cells' divergences and measured interactions: it orders
            proposals, it predicts no drop.
        bytes: Bytes of all layers' weights; tied storage counts once.
        seconds: Change of a batch's time against all high precision.
        bits: Mean bits of a weight, scales not counted; 0 where no layer holds a matrix.
        stored_bits: The same with all that is stored beside the weights.
    """

    level: float
    formats: Mapping[str, str]
    divergence_sum: float
    bytes: int
    seconds: float
    bits: float = 0.0
    stored_bits: float = 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that take one format together, and what each format means for all of them."""

    layers: tuple[str, ...]
    options: tuple[Option, ...]


def group_options(problem: Problem) -> list[Group]:
    """Return the independent choices: a layer each, or the layers of one tie or fusion together.

    The format of a group is one that all its layers offer; divergences and seconds add up, and
    so do bytes, but those of shared storage count once.

    Raises:
        InputError: If a layer has no option, an option's number is not finite or its divergence
            is negative, a tie names an unknown layer, or its layers share no format.
    """
    options = problem.options
    for layer, choices in options.items():
        _check_options(layer, choices)
    for tie, names in (*problem.ties.items(), *problem.fused.items()):
        unknown = [name for name in names if name not in options]
        if unknown:
            raise InputError(f"tie {tie!r} names {unknown[0]!r}, which has no options")
    storage = {layer: tie for tie, names in problem.ties.items() for layer in names}
    return [
        Group(layers, _merge(layers, problem, storage))
        for layers in bound_layers(options, (problem.ties, problem.fused))
    ]


def bound_layers(layers: Iterable[str], bonds: Iterable[Ties]) -> list[tuple[str, ...]]:
    """Return sets of layers that must take one format, singles too, each in the layers' order."""
    order = list(layers)
    root = {layer: layer for layer in order}

    def find(layer: str) -> str:
        while root[layer] != layer:
            layer = root[layer]
        return layer

    for bond in bonds:
        for names in bond.values():
            for name in list(names)[1:]:
                root[find(name)] = find(names[0])
    sets: dict[str, list[str]] = {}
    for layer in order:
        sets.setdefault(find(layer), []).append(layer)
    return [tuple(names) for names in sets.values()]


def cost_of(item: Option | Proposal, objective: Objective) -> float:
    """Return what the objective counts first of an option or a proposal."""
    if objective == "divergence":
        return item.divergence if isinstance(item, Option) else item.divergence_sum
    return float(item.bytes) if objective == "bytes" else item.seconds


def combined_costs(groups: Sequence[Group], objective: Objective) -> list[list[float]]:
    """Return each option's cost: the objective over its span plus its share of the other costs.

    ``balanced`` counts seconds, and a tenth of bytes; ``latency`` and ``bytes`` count a millionth
    of the other, and ``divergence`` a millionth of both, so that equals are decided.
    """
    shares: dict[Objective, float] = {objective: 1.0}
    if objective == "balanced":
        shares["bytes"] = BALANCE
    elif objective == "divergence":
        shares |= {"latency": TIEBREAK, "bytes": TIEBREAK}
    else:
        shares["latency" if objective == "bytes" else "bytes"] = TIEBREAK
    spans = {
        name: sum(_width([cost_of(o, name) for o in group.options]) for group in groups) or 1.0
        for name in shares
    }
    return [
        [
            math.fsum(share * cost_of(o, name) / spans[name] for name, share in shares.items())
            for o in group.options
        ]
        for group in groups
    ]


def amount_of(option: Option, quantity: str, elements: int) -> float:
    """Return what an option adds to a limited quantity.

    Args:
        option: An option of a group.
        quantity: ``divergence``, ``seconds``, ``bytes`` or ``bits``.
        elements: Weight elements of all groups, over which bits are averaged.
    """
    if quantity == "bits":
        return option.bits * option.elements / elements if elements else 0.0
    return float(getattr(option, quantity))


def elements_of(groups: Sequence[Group]) -> int:
    """Return the number of weight elements of all groups; shared storage counts once."""
    return sum(group.options[0].elements for group in groups)


def joint_terms(
    groups: Sequence[Group], interactions: Iterable[Interaction]
) -> tuple[list[Group], dict[Places, float]]:
    """Return the groups, and the extra divergence of options of different groups.

    An interaction within one group is part of the group's own option; one of a cell that is not
    offered, or of two options of one group, can never come about and is left out.

    Returns:
        The groups, and the extras by places (group, option), ascending.
    """
    places = {
        (layer, option.format): (g, o)
        for g, group in enumerate(groups)
        for o, option in enumerate(group.options)
        for layer in group.layers
    }
    inner: dict[tuple[int, int], float] = {}
    outer: dict[Places, float] = {}
    for interaction in interactions:
        if not all(cell in places for cell in interaction.cells):
            continue
        ends = tuple(sorted({places[cell] for cell in interaction.cells}))
        if len({g for g, _ in ends}) < len(ends) or not ends:
            continue
        if len(ends) == 1:
            inner[ends[0]] = inner.get(ends[0], 0.0) + interaction.extra
        else:
            outer[ends] = outer.get(ends, 0.0) + interaction.extra
    return [_with_inner(g, group, inner) for g, group in enumerate(groups)], outer


def _with_inner(index: int, group: Group, inner: Mapping[tuple[int, int], float]) -> Group:
    if not any(place[0] == index for place in inner):
        return group
    changed = [
        Option(
            o.format,
            max(0.0, o.divergence + inner.get((index, place), 0.0)),
            o.bytes,
            o.seconds,
            o.elements,
            o.bits,
        )
        for place, o in enumerate(group.options)
    ]
    return Group(group.layers, tuple(changed))


def _check_options(layer: str, choices: Sequence[Option]) -> None:
    if not choices:
        raise InputError(f"layer {layer!r} has no option; its high precision is always one")
    for o in choices:
        if not (math.isfinite(o.divergence) and math.isfinite(o.seconds) and o.divergence >= 0):
            raise InputError(
                f"layer {layer!r} as {o.format}: divergence {o.divergence:g}, seconds "
                f"{o.seconds:g}; both must be finite and the divergence ≥ 0"
            )


def _merge(
    layers: Sequence[str], problem: Problem, storage: Mapping[str, str]
) -> tuple[Option, ...]:
    if len(layers) == 1:
        return tuple(problem.options[layers[0]])
    by_format = [{o.format: o for o in problem.options[layer]} for layer in layers]
    shared = [form for form in by_format[0] if all(form in other for other in by_format[1:])]
    if not shared:
        told = "; ".join(
            f"{layer}: {', '.join(offered)}"
            for layer, offered in zip(layers, by_format, strict=True)
        )
        raise InputError(
            f"layers that take one format have no format in common; offer them one ({told})"
        )
    merged = []
    for form in shared:
        parts = {layer: own[form] for layer, own in zip(layers, by_format, strict=True)}
        counted = {layer: storage.get(layer, layer) for layer in layers}
        merged.append(
            Option(
                form,
                math.fsum(o.divergence for o in parts.values()),
                sum(
                    problem.tied_bytes.get(
                        (store, form), max(o.bytes for n, o in parts.items() if counted[n] == store)
                    )
                    for store in dict.fromkeys(counted.values())
                ),
                math.fsum(o.seconds for o in parts.values()),
                sum(
                    max(o.elements for n, o in parts.items() if counted[n] == store)
                    for store in dict.fromkeys(counted.values())
                ),
                max(o.bits for o in parts.values()),
            )
        )
    return tuple(merged)


def _width(values: Sequence[float]) -> float:
    return max(values) - min(values)
