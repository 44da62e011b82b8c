from __future__ import annotations

from dataclasses import replace

import pytest

from qbench.planning.choose import Bounds, Candidate, Cost, choose, contenders
from qbench.planning.problem import Objective, Proposal
from qbench.records import Estimate, Judgement, Verdict

REFERENCE = Cost(1000, 1.0)


def candidate(
    name: str, drop: float, half: float, seconds: float = 0.5, size: int = 300
) -> Candidate:
    estimate = Estimate(drop, drop - half, drop + half, 230)
    judgement = Judgement(
        name,
        "sweep",
        "mrr",
        0.4,
        0.4 - drop,
        estimate,
        0.02,
        Verdict.VERIFIED,
        230,
        None,
        Estimate(0.0, 0.0, 0.0, 230),
        0.0,
        1.0,
    )
    return Candidate(Proposal(0.1, {"a": "int8"}, 0.1, size, -1.0), judgement, Cost(size, seconds))


def test_the_cheapest_that_is_non_inferior_is_the_plan() -> None:
    front = [
        candidate("careful", 0.001, 0.002, seconds=0.8),
        candidate("good", 0.005, 0.01, seconds=0.6),
        candidate("unsure", 0.015, 0.01, seconds=0.5),
        candidate("bad", 0.1, 0.02, seconds=0.4),
    ]
    choice = choose(front, REFERENCE, margin=0.02)
    assert choice.verdict is Verdict.VERIFIED and choice.candidate is front[1]
    assert "2 cheaper did not show it at n = 230" in choice.words
    assert "1.67x as fast, 30% of its size" in choice.words


def test_measured_cost_decides_and_the_objective_says_which() -> None:
    fast, small = candidate("fast", 0.0, 0.01, 0.4, 900), candidate("small", 0.0, 0.01, 0.9, 100)
    assert choose([fast, small], REFERENCE, margin=0.02).candidate is fast
    assert choose([fast, small], REFERENCE, margin=0.02, objective="bytes").candidate is small
    worse, better = candidate("worse", 0.005, 0.01), candidate("better", 0.0, 0.01)
    assert choose([worse, better], REFERENCE, margin=0.02).candidate is better


def test_neither_faster_nor_smaller_is_no_gain() -> None:
    slow = candidate("slow", 0.0, 0.01, seconds=1.2, size=1000)
    choice = choose([slow], REFERENCE, margin=0.02)
    assert choice.verdict is Verdict.NO_GAIN and "0.83x as fast, 100% of its size" in choice.words
    assert choose([], REFERENCE, margin=0.02).verdict is Verdict.NO_GAIN


def test_smaller_but_not_faster_is_said() -> None:
    small = [candidate("w", 0.0, 0.01, seconds=1.1, size=300)]
    choice = choose(small, REFERENCE, margin=0.02, objective="balanced")
    assert choice.verdict is Verdict.VERIFIED
    assert "smaller, not faster" in choice.words


@pytest.mark.parametrize(
    ("objective", "seconds", "size", "words"),
    [("latency", 1.1, 300, "not faster"), ("bytes", 0.5, 1000, "not smaller")],
)
def test_a_gain_is_what_was_asked_for(
    objective: Objective, seconds: float, size: int, words: str
) -> None:
    engines = [candidate("w", 0.0, 0.01, seconds=seconds, size=size)]
    choice = choose(engines, REFERENCE, margin=0.02, objective=objective)
    assert choice.verdict is Verdict.NO_GAIN
    assert "do not quantize" in choice.words and words in choice.words


def test_what_costs_more_than_asked_is_no_plan() -> None:
    big, small = candidate("big", 0.0, 0.01, 0.4, 900), candidate("small", 0.0, 0.01, 0.9, 100)
    bounds = Bounds(bytes=500)
    assert choose([big, small], REFERENCE, margin=0.02, bounds=bounds).candidate is small
    choice = choose([big], REFERENCE, margin=0.02, bounds=bounds)
    assert choice.verdict is Verdict.BUDGET_UNREACHABLE and choice.candidate is big
    assert "900 bytes, and 500 are allowed" in choice.words
    slow = choose([small], REFERENCE, margin=0.02, bounds=Bounds(seconds=0.5))
    assert "90.0% of the reference's time, and 50.0% is allowed" in slow.words
    assert choose([], REFERENCE, margin=0.02, bounds=bounds).verdict is Verdict.NO_GAIN


def test_the_least_divergent_is_chosen_where_divergence_is_the_objective() -> None:
    calm = replace(
        candidate("calm", 0.001, 0.01, 0.9),
        judgement=replace(candidate("calm", 0.001, 0.01).judgement),
    )
    wild_judgement = replace(calm.judgement, engine="wild", divergence=Estimate(0.2, 0.1, 0.3, 230))
    wild = replace(calm, judgement=wild_judgement, cost=Cost(100, 0.1))
    assert choose([wild, calm], REFERENCE, margin=0.02, objective="divergence").candidate is calm


def test_what_cannot_be_told_says_how_many_samples_would_do() -> None:
    front = [candidate("near", 0.01, 0.02), candidate("far", 0.1, 0.02, seconds=0.4)]
    choice = choose(front, REFERENCE, margin=0.02)
    assert choice.verdict is Verdict.NOT_RESOLVABLE and choice.candidate is front[0]
    assert "not resolvable at n = 230; about 920 would do" in choice.words


def test_when_all_fail_the_least_drop_is_named() -> None:
    front = [candidate("mild", 0.05, 0.01), candidate("hard", 0.2, 0.01, seconds=0.4)]
    choice = choose(front, REFERENCE, margin=0.02)
    assert choice.verdict is Verdict.BUDGET_UNREACHABLE and choice.candidate is front[0]
    assert "the least, mild: 0.05" in choice.words


@pytest.mark.parametrize("margin", [0.01, 0.0149])
def test_the_whole_interval_must_fit(margin: float) -> None:
    choice = choose([candidate("x", 0.005, 0.01)], REFERENCE, margin=margin)
    assert choice.verdict is Verdict.NOT_RESOLVABLE


def timed(
    name: str, seconds: float, spread: float, divergence: float, size: int = 300
) -> Candidate:
    made = candidate(name, 0.0, 0.01)
    judgement = replace(
        made.judgement, divergence=Estimate(divergence, divergence, divergence, 230)
    )
    return replace(made, judgement=judgement, cost=Cost(size, seconds, spread))


def test_of_times_that_are_not_told_apart_the_least_divergent_engine_is_the_plan() -> None:
    fastest, gentle = timed("fastest", 0.5, 0.01, 0.3), timed("gentle", 0.505, 0.01, 0.1)
    slower, blurred = timed("slower", 0.505, 0.001, 0.0), timed("blurred", 0.52, 0.5, 0.0)
    sharp = replace(fastest, cost=replace(fastest.cost, spread=0.001))
    for objective in ("latency", "balanced"):
        choice = choose([fastest, gentle, blurred], REFERENCE, margin=0.02, objective=objective)
        assert choice.candidate is gentle and "the least divergent of the cheapest" in choice.words
        told = choose([sharp, slower], REFERENCE, margin=0.02, objective=objective)
        assert told.candidate is sharp and "the cheapest of 2" in told.words
    large = timed("large", 0.5, 0.01, 0.0, size=900)
    assert choose([fastest, large], REFERENCE, margin=0.02).candidate is fastest
    assert choose([fastest, gentle], REFERENCE, margin=0.02, objective="bytes").candidate is fastest


def test_contenders_are_those_that_times_do_not_tell_from_the_cheapest() -> None:
    front = [timed(str(i), 0.5 + 0.1 * i, 0.06, 0.0) for i in range(4)]
    assert contenders(front, REFERENCE, "latency", 5) == front[:2]
    assert contenders(front, REFERENCE, "latency", 1) == front[:1]
    assert contenders(front, REFERENCE, "bytes", 5) == []
