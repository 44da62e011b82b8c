from __future__ import annotations

from dataclasses import replace

from qbench.planning.matches import Standing, match_words, matched_by
from qbench.records import Estimate, Verdict

DROP = Estimate(0.01, 0.0, 0.02, 400)
RATE = Estimate(100.0, 97.0, 103.0, 6)
PLAN = Standing("plan", 23_000, DROP, Verdict.VERIFIED, RATE)


def other(**changes: object) -> Standing:
    return replace(PLAN, name="int8", **changes)  # type: ignore[arg-type]


def test_an_engine_that_nothing_tells_from_the_plan_matches_it() -> None:
    assert matched_by(PLAN, [other()]) == ["int8"]
    assert matched_by(PLAN, [other(bytes=20_000)]) == ["int8"]


def test_what_is_shown_to_be_worse_in_one_thing_does_not() -> None:
    worse = [
        other(bytes=24_000),
        other(drop=Estimate(0.04, 0.03, 0.05, 400)),
        other(verdict=Verdict.NOT_RESOLVABLE),
        other(throughput=Estimate(90.0, 88.0, 92.0, 6)),
        other(throughput=None),
    ]
    assert matched_by(PLAN, worse) == []


def test_before_the_benchmark_size_and_drop_are_compared() -> None:
    plan = replace(PLAN, throughput=None)
    assert matched_by(plan, [other(throughput=None)]) == ["int8"]


def test_words() -> None:
    assert match_words([], timed=True) == ""
    assert match_words(["int8"], timed=True).startswith("int8 matches it in size, drop and thr")
    assert match_words(["a", "b", "c"], timed=False).startswith("a, b and c match it in size and")
