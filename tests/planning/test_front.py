from __future__ import annotations

import numpy as np
import pytest

from qbench.errors import InputError
from qbench.planning.costs import Option
from qbench.planning.front import RANDOM_TOLERANCE, front, random_plan, without_mixture
from qbench.planning.problem import Limits, Objective, Problem, cost_of
from qbench.planning.solve import propose


def encoder(layers: int = 36, seed: int = 0) -> dict[str, list[Option]]:
    """Return options like those of a small encoder: a few layers are far more sensitive."""
    rng = np.random.default_rng(seed)
    options = {}
    for i in range(layers):
        size, base = (589_824, -9e-5) if i % 6 < 4 else (2_359_296, -3e-4)
        scale = float(rng.lognormal(-8, 1.5))
        options[f"layer.{i}"] = [
            Option("fp32", 0.0, size, 0.0),
            Option("int8_dynamic", scale, size // 4, base),
            Option("int8", 4 * scale, size // 4, 1.05 * base),
            Option("w8a16", 0.1 * scale, size // 4, 2e-5),
            Option("w4a16", 8 * scale, size // 8, 4e-5),
        ]
    return options


@pytest.mark.parametrize("objective", ["latency", "bytes"])
def test_the_front_goes_from_careful_to_cheapest(objective: Objective) -> None:
    options = encoder()
    proposals = front(Problem(options, objective=objective), 8)
    assert 5 <= len(proposals) <= 9
    sums = [p.divergence_sum for p in proposals]
    costs = [cost_of(p, objective) for p in proposals]
    assert sums == sorted(sums) and costs == sorted(costs, reverse=True)
    assert all(p.divergence_sum <= p.level * (1 + 1e-9) for p in proposals)
    cheapest = {k: min(v, key=lambda o: cost_of(o, objective)).format for k, v in options.items()}
    assert dict(proposals[-1].formats) == cheapest
    assert len({tuple(p.formats.values()) for p in proposals}) == len(proposals)
    assert all(set(p.formats.values()) != {"fp32"} for p in proposals)


def test_the_first_level_buys_a_share_of_the_saving() -> None:
    proposals = front(Problem(encoder()), 8)
    assert proposals[0].seconds <= proposals[-1].seconds / 8 * (1 - 1e-6)
    assert proposals[0].seconds >= proposals[-1].seconds / 3


def test_one_level_is_the_cheapest_and_none_is_an_error() -> None:
    assert len(front(Problem(encoder()), 1)) == 1
    with pytest.raises(InputError, match="levels: got 0"):
        front(Problem(encoder()), 0)


def test_nothing_cheaper_gives_no_front() -> None:
    high = Option("fp32", 0.0, 100, 0.0)
    assert front(Problem({"a": [high]})) == []
    assert front(Problem({"a": [high, Option("w8a16", 1e-3, 25, 1e-5)]})) == []
    assert (
        len(front(Problem({"a": [high, Option("w8a16", 1e-3, 25, 1e-5)]}, objective="bytes"))) == 1
    )


def test_what_costs_no_divergence_is_proposed_too() -> None:
    free = {"a": [Option("fp32", 0.0, 100, 0.0), Option("int8", 0.0, 25, -1.0)]}
    assert [dict(p.formats) for p in front(Problem(free))] == [{"a": "int8"}]


def test_a_mixture_is_proposed_with_each_of_its_formats_alone() -> None:
    high = Option("fp32", 0.0, 400, 0.0)
    dynamic, static = Option("int8_dynamic", 1e-3, 100, -1.0), Option("int8", 4e-3, 100, -1.1)
    slow = Option("int8", 4e-3, 100, -0.9)
    table = [high, Option("w8a16", 1e-4, 100, 0.0)]
    options = {"a": [high, dynamic, static], "b": [high, dynamic, static], "table": table}
    options |= {"c": [high, dynamic, slow], "d": [high, dynamic, slow], "kept": [high, static]}
    problem = Problem(options)
    formats = {"a": "int8", "b": "int8", "c": "int8_dynamic", "d": "int8_dynamic"}
    mixed = propose(formats | {"table": "w8a16", "kept": "fp32"}, problem)
    pure = without_mixture(problem, [mixed])
    kept = {"table": "w8a16", "kept": "fp32"}
    assert [dict(p.formats) for p in pure] == [
        dict.fromkeys("ab", "int8") | kept | dict.fromkeys("cd", "int8"),
        dict.fromkeys("abcd", "int8_dynamic") | kept,
    ]
    assert without_mixture(problem, pure[:1]) == []
    careful = Problem(options, limits=Limits(divergence=5e-3))
    assert [p.formats["a"] for p in without_mixture(careful, [mixed])] == ["int8_dynamic"]


def test_tied_layers_stay_together_on_the_front() -> None:
    options = encoder(6)
    ties = {"shared": ("layer.1", "layer.4")}
    for proposal in front(Problem(options, ties), 8):
        assert proposal.formats["layer.1"] == proposal.formats["layer.4"]


@pytest.mark.parametrize("objective", ["latency", "bytes"])
@pytest.mark.parametrize("share", [0.15, 0.5, 0.9])
def test_a_random_plan_costs_as_much_as_asked(objective: Objective, share: float) -> None:
    options = encoder()
    lowest, highest = (
        sum(pick(cost_of(o, objective) for o in choices) for choices in options.values())
        for pick in (min, max)
    )
    target = lowest + share * (highest - lowest)
    plans = [
        random_plan(Problem(options, objective=objective), target_cost=target, seed=seed)
        for seed in range(5)
    ]
    for plan in plans:
        assert abs(cost_of(plan, objective) - target) <= RANDOM_TOLERANCE * abs(target)
        assert plan == propose(plan.formats, Problem(options))
    assert len({tuple(plan.formats.values()) for plan in plans}) == 5
    again = random_plan(Problem(options, objective=objective), target_cost=target, seed=0)
    assert again == plans[0]


def test_a_random_plan_keeps_ties_and_refuses_what_cannot_be() -> None:
    options = encoder(8)
    ties = {"shared": ("layer.0", "layer.1", "layer.2")}
    plan = random_plan(Problem(options, ties), target_cost=-5e-4, seed=3)
    assert len({plan.formats[name] for name in ties["shared"]}) == 1
    with pytest.raises(InputError, match=r"no plan costs -5 \(latency\); reachable: "):
        random_plan(Problem(options), target_cost=-5)


def test_a_random_plan_draws_nothing_that_gains_nothing() -> None:
    useless = Option("fp8", 0.1, bytes=9, seconds=0.0)
    slower = Option("w8a16", 0.1, bytes=9, seconds=1e-3)
    kept, fast = Option("fp32", 0.0, bytes=9, seconds=0.0), Option("int8", 0.1, 9, -1e-3)
    options = {f"layer{i}": (kept, useless, slower, fast) for i in range(8)}
    for seed in range(5):
        plan = random_plan(Problem(options), target_cost=-4e-3, seed=seed)
        assert sorted(set(plan.formats.values())) == ["fp32", "int8"]


def test_coarse_costs_give_the_nearest_random_plan() -> None:
    coarse = {"a": [Option("fp32", 0.0, 100, 0.0), Option("int8", 0.1, 25, -1.0)]}
    assert random_plan(Problem(coarse, objective="bytes"), target_cost=40).bytes == 25
