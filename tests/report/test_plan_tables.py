from __future__ import annotations

from dataclasses import replace

from qbench.report.comparison import front_table
from qbench.report.page import render_page
from qbench.report.plan_tables import prices_table, rounds_table, shown_prices, shown_rounds
from qbench.testing.runs import made_records

ROUND = {
    "round": 1,
    "engine": "repair-1",
    "why": "front-3 was not accepted; solved again with 2 measured interactions within 0.01",
    "level": 0.01,
    "predicted": 0.009,
    "measured": 0.0101,
    "drop": 0.002,
    "verdict": "verified",
    "step": "kept",
    "interactions": [{"cells": ["a int8", "b int8"], "extra": 0.5}],
    "looked": [{"layers": 2, "sum": 0.1, "divergence": 0.6}] * 3,
}
PRICE = {
    "kind": "linear",
    "shape": [384, 384],
    "format": "int8",
    "segments": {"value": -0.2, "low": -0.3, "high": -0.1},
    "profile": {"value": -0.25, "low": -0.3, "high": -0.2},
    "used": {"value": -0.24, "low": -0.28, "high": -0.2},
    "agree": True,
}


def test_rounds_of_repair_are_a_table_of_the_page() -> None:
    records = made_records()
    assert records.plan is not None
    history = ({"engine": "front-1"}, ROUND, {"stopped": "all 1 rounds are used"})
    plan = replace(records.plan, history=history)
    frame = rounds_table(plan)
    assert frame["round"].tolist() == [1] and frame["sets"].tolist() == [3]
    assert frame["strongest"][0] == "a int8 + b int8: 0.500"
    shown = shown_rounds(plan)
    assert shown.caption == "Repair: it ended because all 1 rounds are used"
    page = render_page(replace(records, plan=plan, prices=(PRICE,)))
    assert "repair-1" in page and "What formats cost" in page
    assert rounds_table(None).empty and not shown_rounds(records.plan).rows


def test_prices_show_both_sources() -> None:
    frame = prices_table([PRICE])
    assert frame["shape"][0] == "384×384" and frame["profile_low_ms"][0] == -0.3
    assert shown_prices([PRICE]).rows[0][-1] == "yes"
    assert prices_table([]).empty


def test_points_that_nothing_beats_are_marked() -> None:
    records = made_records()
    frame = front_table(records.front, records.deciding, records.engines, records.plan)
    assert frame["point"].tolist() == list(range(1, len(frame) + 1))
    assert frame["pareto"].all()  # each further engine is faster, smaller, and drops more
    worse = [*records.front, {**records.front[-1], "engine": "worse", "bytes": 10**9}]
    last = replace(records.deciding[-1], engine="worse")
    frame = front_table(worse, [*records.deciding, last], (), records.plan)
    assert not frame["pareto"].iloc[-1] and frame["pareto"].iloc[:-1].all()
