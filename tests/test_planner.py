"""What is proposed to be built, before anything is."""

from __future__ import annotations

import pytest

from qbench.config import PlanConfig
from qbench.planner import proposals_of
from qbench.planning.costs import Offer, Option
from qbench.planning.problem import Objective, problem_of


@pytest.mark.parametrize("objective", ["balanced", "latency", "bytes"])
def test_smaller_engines_are_built_although_no_layer_alone_is_faster(objective: Objective) -> None:
    options = {
        f"layer.{i}": (Option("fp32", 0.0, 4000, 0.0), Option("w8a16", 1e-4, 1000, 1e-3))
        for i in range(4)
    }
    offer = Offer(options, (), {}, "fp32")
    found = proposals_of(problem_of(offer, objective), PlanConfig(objective=objective, levels=2))
    assert {"w8a16": 4} in [{f: list(p.formats.values()).count(f) for f in p.formats.values()}
                            for p in found]  # fmt: skip


def test_nothing_is_built_where_nothing_is_cheaper() -> None:
    options = {"layer": (Option("fp32", 0.0, 4000, 0.0), Option("fp16", 1e-4, 4000, 1e-3))}
    assert proposals_of(problem_of(Offer(options, (), {}, "fp32")), PlanConfig()) == []
