from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from qbench.errors import InputError
from qbench.planning.costs import Option
from qbench.planning.problem import (
    Limits,
    Objective,
    Options,
    Problem,
    Proposal,
    Ties,
    combined_costs,
    cost_of,
    group_options,
)
from qbench.planning.solve import propose, solve

HIGH = Option("fp32", 0.0, 1000, 0.0)


def chosen(
    options: Options,
    max_divergence: float,
    objective: Objective = "latency",
    ties: Ties | None = None,
) -> dict[str, str]:
    limits = Limits(divergence=max_divergence)
    return solve(Problem(options, ties or {}, limits=limits, objective=objective))


def instance(rng: np.random.Generator) -> dict[str, list[Option]]:
    """Return a small problem: layers of like sizes, so that costs tie now and then."""
    options = {}
    for layer in range(int(rng.integers(2, 6))):
        size = int(rng.choice([1000, 4000]))
        choices = [Option("fp32", 0.0, size, 0.0)]
        for form, share in (("int8", 4), ("w8a16", 4), ("w4a16", 8))[: int(rng.integers(0, 4))]:
            seconds = float(np.round(rng.normal(-1e-4, 2e-4), int(rng.integers(4, 7))))
            divergence = float(rng.choice([0.0, rng.lognormal(-8, 2)], p=[0.1, 0.9]))
            choices.append(Option(form, divergence, size // share, seconds))
        options[f"layer.{layer}"] = choices
    return options


def best_by_brute_force(
    options: dict[str, list[Option]], limit: float, objective: Objective
) -> tuple[float, float]:
    """Return the least (objective, other cost) of every choice within the limit."""
    other: Objective = "bytes" if objective == "latency" else "latency"
    costs = [
        (math.fsum(cost_of(o, objective) for o in pick), math.fsum(cost_of(o, other) for o in pick))
        for pick in itertools.product(*options.values())
        if math.fsum(o.divergence for o in pick) <= limit
    ]
    return min(costs)


@pytest.mark.parametrize("seed", range(200))
def test_the_solution_is_the_best_there_is(seed: int) -> None:
    rng = np.random.default_rng(seed)
    options = instance(rng)
    objective: Objective = "latency" if seed % 2 else "bytes"
    most = sum(max(o.divergence for o in choices) for choices in options.values())
    limit = float(rng.uniform(0, 1)) ** 3 * most
    formats = chosen(options, limit, objective=objective)
    got = propose(formats, Problem(options))
    assert got.divergence_sum <= limit * (1 + 1e-9)
    best, _ = best_by_brute_force(options, limit, objective)
    spread = sum(
        max(cost_of(o, objective) for o in c) - min(cost_of(o, objective) for o in c)
        for c in options.values()
    )
    # The other cost may outweigh a millionth of the objective's span, no more.
    assert cost_of(got, objective) <= best + 2e-6 * spread + 1e-15


def test_the_other_cost_decides_between_equals() -> None:
    twins = [HIGH, Option("int8", 1e-3, 250, -1e-4), Option("w4a16", 1e-3, 125, -1e-4)]
    assert chosen({"a": twins}, 1.0) == {"a": "w4a16"}
    equal = [HIGH, Option("w8a16", 1e-3, 250, -1e-5), Option("int8", 1e-3, 250, -2e-4)]
    assert chosen({"a": equal}, 1.0, objective="bytes") == {"a": "int8"}


def test_a_budget_of_zero_keeps_what_diverges() -> None:
    options = {
        "a": [HIGH, Option("int8", 1e-9, 250, -1.0)],
        "b": [HIGH, Option("int8", 0.0, 250, -1.0)],
    }
    assert chosen(options, 0.0) == {"a": "fp32", "b": "int8"}


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e6])
def test_the_budget_holds_at_any_scale(scale: float) -> None:
    rng = np.random.default_rng(1)
    options = {
        f"l{i}": [HIGH, Option("int8", float(scale * rng.random()), 250, -1e-4 * rng.random())]
        for i in range(40)
    }
    for share in (0.01, 0.3, 0.77):
        formats = chosen(options, share * scale * 20)
        assert propose(formats, Problem(options)).divergence_sum <= share * scale * 20 * (1 + 1e-9)
        assert "int8" in formats.values()


def test_a_large_model_is_solved_quickly() -> None:
    rng = np.random.default_rng(2)
    options = {
        f"l{i}": [
            HIGH,
            *(
                Option(f, float(rng.lognormal(-8, 2)), 250, float(-1e-4 * rng.random()))
                for f in ("int8", "int8_dynamic", "w8a16", "w4a16", "fp16")
            ),
        ]
        for i in range(300)
    }
    formats = chosen(options, 0.05)
    assert propose(formats, Problem(options)).divergence_sum <= 0.05 * (1 + 1e-9)


def test_an_impossible_budget_names_the_reachable_range() -> None:
    options = {"a": [Option("int8", 0.1, 1, 0.0), Option("w4a16", 0.4, 1, 0.0)]}
    with pytest.raises(InputError, match="at most 0.05; reachable: 0.1 to 0.4"):
        chosen(options, 0.05)
    for nonsense in (-1.0, math.nan):
        with pytest.raises(InputError, match="reachable"):
            chosen(options, nonsense)


def test_tied_layers_take_one_format_and_count_their_bytes_once() -> None:
    options = {
        "embed": [HIGH, Option("w8a16", 1e-3, 250, 0.0)],
        "middle": [HIGH, Option("int8", 1e-3, 250, -1e-3)],
        "head": [HIGH, Option("int8", 1e-3, 250, -1e-3), Option("w8a16", 2e-3, 250, -1e-4)],
    }
    ties = {"table": ("embed", "head")}
    groups = group_options(Problem(options, ties))
    assert [g.layers for g in groups] == [("embed", "head"), ("middle",)]
    assert [o.format for o in groups[0].options] == ["fp32", "w8a16"]
    formats = chosen(options, 1.0, objective="bytes", ties=ties)
    assert formats == {"embed": "w8a16", "middle": "int8", "head": "w8a16"}
    total = propose(formats, Problem(options, ties))
    assert (total.bytes, total.divergence_sum) == (500, pytest.approx(4e-3))
    assert total.seconds == pytest.approx(-1.1e-3)
    assert chosen(options, 2e-3, ties=ties)["head"] == "fp32"
    with pytest.raises(InputError, match="embed and head cannot take fp32 and w8a16"):
        propose({**formats, "head": "fp32"}, Problem(options, ties))


def test_options_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="layer 'a' as int8: divergence nan"):
        chosen({"a": [HIGH, Option("int8", math.nan, 1, 0.0)]}, 1)
    with pytest.raises(InputError, match="layer 'a' has no option"):
        chosen({"a": []}, 1)
    with pytest.raises(InputError, match="tie 't' names 'b'"):
        chosen({"a": [HIGH]}, 1, ties={"t": ["a", "b"]})
    with pytest.raises(InputError, match="no format in common"):
        group_options(Problem({"a": [HIGH], "b": [Option("int8", 0.0, 1, 0.0)]}, {"t": ["a", "b"]}))
    with pytest.raises(InputError, match="a cannot take fp16; offered: fp32"):
        propose({"a": "fp16"}, Problem({"a": [HIGH]}))


def test_costs_without_a_span_do_not_divide_by_zero() -> None:
    assert combined_costs(group_options(Problem({"a": [HIGH]})), "latency") == [
        [pytest.approx(1e-3)]
    ]
    assert chosen({"a": [HIGH]}, 0) == {"a": "fp32"}


def test_a_proposal_keeps_the_order_of_the_layers() -> None:
    options = {name: [HIGH] for name in "cab"}
    got = propose(dict.fromkeys("abc", "fp32"), Problem(options), level=0.5)
    assert isinstance(got, Proposal) and list(got.formats) == list("cab") and got.level == 0.5
