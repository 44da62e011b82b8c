from __future__ import annotations

import pytest

from qbench.planning.choose import Candidate, Cost, choose
from qbench.planning.solve import Proposal
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
    choice = choose([candidate("w", 0.0, 0.01, seconds=1.1, size=300)], REFERENCE, margin=0.02)
    assert choice.verdict is Verdict.VERIFIED
    assert "smaller, not faster" in choice.words


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
