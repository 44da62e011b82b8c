"""The knapsack with every objective and limit, groups, pins and pairs, against brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from qbench.errors import BudgetError, InputError
from qbench.planning.costs import Option
from qbench.planning.problem import (
    Interaction,
    Limits,
    Objective,
    Problem,
    Proposal,
    bound_layers,
    combined_costs,
    group_options,
    joint_terms,
)
from qbench.planning.solve import check_limits, propose, reach, score, solve

OBJECTIVES: tuple[Objective, ...] = ("balanced", "latency", "bytes", "divergence")
QUANTITIES = ("divergence", "seconds", "bytes", "bits")
BITS = {"fp32": 32, "int8": 8, "w8a16": 8, "w4a16": 4}


def instance(rng: np.random.Generator) -> Problem:
    """Return a small problem: groups, a pinned layer, and pairs of either sign now and then."""
    options = {}
    for layer in range(int(rng.integers(2, 6))):
        elements = int(rng.choice([250, 1000]))
        forms = ["fp32", *("int8", "w8a16", "w4a16")[: int(rng.integers(0, 4))]]
        choices = [
            Option(
                form,
                0.0
                if form == "fp32"
                else float(rng.choice([0.0, rng.lognormal(-8, 2)], p=[0.1, 0.9])),
                elements * BITS[form] // 8 + (0 if form == "fp32" else 40),
                0.0 if form == "fp32" else float(np.round(rng.normal(-1e-4, 2e-4), 5)),
                elements,
                BITS[form],
            )
            for form in forms
        ]
        options[f"layer.{layer}"] = choices
    names = list(options)
    fused = {"siblings": tuple(names[:2])} if rng.random() < 0.5 else {}
    ties = {"table": tuple(names[-2:])} if rng.random() < 0.3 else {}
    if rng.random() < 0.3:
        pinned = str(rng.choice(names))
        options[pinned] = [options[pinned][int(rng.integers(len(options[pinned])))]]
    free = Problem(options, ties, fused)
    try:
        group_options(free)
    except InputError:  # what was pinned leaves a group no format in common
        free = Problem(options)
    return replace(free, interactions=tuple(interactions_for(rng, free)))


def interactions_for(rng: np.random.Generator, problem: Problem) -> Iterator[Interaction]:
    cells = [(layer, o.format) for layer, own in problem.options.items() for o in own[1:]]
    for _ in range(int(rng.integers(0, 4))):
        size = int(rng.integers(2, 4))
        if len(cells) >= size:
            chosen = rng.choice(len(cells), size, replace=False)
            sign = (1, 1, -0.1)[int(rng.integers(3))]
            yield Interaction(tuple(cells[i] for i in chosen), float(rng.lognormal(-7, 2)) * sign)


def every_choice(problem: Problem) -> list[Proposal]:
    groups = group_options(problem)
    return [
        propose({n: o.format for g, o in zip(groups, pick, strict=True) for n in g.layers}, problem)
        for pick in itertools.product(*(g.options for g in groups))
    ]


def amount(proposal: Proposal, quantity: str) -> float:
    name = "divergence_sum" if quantity == "divergence" else quantity
    return float(getattr(proposal, name))


def limits_for(rng: np.random.Generator, every: list[Proposal]) -> Limits:
    """Return one or two limits somewhere in what can be reached."""
    chosen = rng.choice(QUANTITIES, int(rng.integers(1, 3)), replace=False)
    found = {}
    for quantity in chosen:
        values = [amount(p, quantity) for p in every]
        share = float(rng.uniform(0, 1)) ** (3 if quantity == "divergence" else 1)
        found[str(quantity)] = min(values) + share * (max(values) - min(values))
    return Limits(**found)


@pytest.mark.parametrize("seed", range(200))
def test_the_solution_is_the_best_there_is(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = replace(instance(rng), objective=OBJECTIVES[seed % 4])
    every = every_choice(problem)
    limits = limits_for(rng, every)
    problem = replace(problem, limits=limits)

    def kept(proposal: Proposal) -> bool:
        return all(amount(proposal, q) <= v + 1e-9 * abs(v) for q, v in limits.given().items())

    within = [p for p in every if kept(p)]
    if not within:
        with pytest.raises(BudgetError):
            solve(problem)
        return
    got = propose(solve(problem), problem)
    assert kept(got)
    if problem.objective == "divergence":
        assert got.divergence_sum <= min(p.divergence_sum for p in within) * (1 + 1e-5) + 1e-9
        return
    best = min(score(p, problem) for p in within)
    span = 1.2  # of a combined cost, by its definition
    assert score(got, problem) <= best + 2e-6 * span


def test_layers_are_bound_by_any_of_their_bonds() -> None:
    bonds = ({"t": ("a", "c")}, {"f": ("c", "d"), "g": ("e",)})
    assert bound_layers("abcde", bonds) == [("a", "c", "d"), ("b",), ("e",)]


def test_fused_layers_share_a_format_and_their_bytes_add_up() -> None:
    own = [Option("fp32", 0, 400, 0, 100, 32), Option("int8", 1e-3, 110, -1e-4, 100, 8)]
    options = {name: own for name in ("q", "k", "v")}
    free = Problem(options, fused={"siblings": ("q", "k", "v")})
    group = group_options(free)[0]
    assert group.layers == ("q", "k", "v")
    assert (group.options[1].bytes, group.options[1].elements) == (330, 300)
    tied = Problem(options, ties={"w": ("q", "k")}, fused={"siblings": ("q", "k", "v")})
    group = group_options(tied)[0]
    assert (group.options[1].bytes, group.options[1].elements) == (220, 200)
    counted = replace(tied, tied_bytes={("w", "int8"): 215})
    assert group_options(counted)[0].options[1].bytes == 325


def test_a_pair_within_a_group_is_part_of_its_option() -> None:
    own = [Option("fp32", 0, 4, 0), Option("int8", 1e-3, 1, -1e-4)]
    pair = Interaction((("q", "int8"), ("k", "int8")), 0.5)
    problem = Problem({"q": own, "k": own}, fused={"s": ("q", "k")}, interactions=(pair,))
    groups, outer = joint_terms(group_options(problem), problem.interactions)
    assert groups[0].options[1].divergence == pytest.approx(0.502) and not outer
    apart = replace(problem, fused={})
    assert joint_terms(group_options(apart), apart.interactions)[1] == {((0, 1), (1, 1)): 0.5}
    unknown = replace(apart, interactions=(Interaction((("q", "int8"), ("k", "w4a16")), 0.5),))
    assert not joint_terms(group_options(unknown), unknown.interactions)[1]


def test_a_pair_that_breaks_is_broken_up() -> None:
    own = [Option("fp32", 0, 4, 0), Option("int8", 1e-6, 1, -1e-4)]
    options = {name: own for name in "abcd"}
    pair = Interaction((("b", "int8"), ("d", "int8")), 0.5)
    problem = Problem(options, interactions=(pair,), limits=Limits(divergence=1e-3))
    formats = solve(problem)
    assert sorted(formats.values()) == ["fp32", "int8", "int8", "int8"]
    assert {formats["b"], formats["d"]} == {"fp32", "int8"}


def test_mean_bits_count_weights_and_tell_scales() -> None:
    options = {
        "m": [Option("fp32", 0, 4000, 0, 1000, 32), Option("w4a16", 1e-3, 532, 0, 1000, 4)],
        "norm": [Option("fp32", 0, 128, 0)],
    }
    problem = Problem(options, limits=Limits(bits=4.0), objective="divergence")
    got = propose(solve(problem), problem)
    assert (got.bits, got.stored_bits) == (4.0, pytest.approx(4.256))
    with pytest.raises(BudgetError, match=r"mean bits a weight of at most 3.9; reachable: 4 to 32"):
        check_limits(replace(problem, limits=Limits(bits=3.9)))
    assert reach(problem, "bits") == (4.0, 32.0)


def test_limits_that_exclude_each_other_say_how_far_each_goes() -> None:
    options = {
        "a": [
            Option("fp32", 0, 100, 0.0),
            Option("w8a16", 0.1, 25, 1.0),
            Option("int8", 0.1, 90, -1),
        ]
    }
    problem = Problem(options, limits=Limits(seconds=0.0, bytes=50))
    with pytest.raises(BudgetError) as caught:
        solve(problem)
    told = str(caught.value)
    assert "within the rest: 90" in told and "within the rest: 1" in told
    assert caught.value.exit_code == 1 and caught.value.verdict == "budget_unreachable"


def test_the_combined_cost_of_divergence_decides_equals_by_time_and_bytes() -> None:
    twins = [Option("fp32", 0, 100, 0.0), Option("w8a16", 0, 25, 0.0), Option("int8", 0, 25, -1.0)]
    costs = combined_costs(group_options(Problem({"a": twins})), "divergence")[0]
    assert costs[2] < costs[1] < costs[0] and math.isclose(costs[0] - costs[2], 2e-6, rel_tol=0.1)
    assert solve(Problem({"a": twins}, objective="divergence")) == {"a": "int8"}
