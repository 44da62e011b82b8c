from __future__ import annotations

import pytest

from qbench.backends import BACKENDS
from qbench.errors import ConfigError, PlanError
from qbench.planning.costs import Offer, Option
from qbench.planning.plancheck import check_plan
from qbench.planning.targets import check_target, missing_on, offer_on
from qbench.records import Kind, Plan, PlanLayer

CPU, TENSORRT = BACKENDS["ort-cpu"], BACKENDS["tensorrt"]
FP8 = TENSORRT.support("fp8")


def test_a_format_that_the_target_lacks_is_not_offered() -> None:
    assert FP8 is not None and FP8.hardware == "SM89"
    assert missing_on("SM86", "fp8", TENSORRT) == (
        "fp8 needs SM89 on tensorrt, and the target is SM86"
    )
    assert missing_on("sm 89", "fp8", TENSORRT) == missing_on(None, "fp8", TENSORRT) == ""
    assert missing_on("SM86", "int8", TENSORRT) == ""
    options = {"a": (Option("fp16", 0, 4, 0.0), Option("fp8", 1e-3, 1, -1.0))}
    offer = Offer(options, (), {}, "fp16")
    left = offer_on(offer, "SM86", TENSORRT)
    assert [o.format for o in left.options["a"]] == ["fp16"]
    assert "SM86" in left.not_offered[0].reason
    assert offer_on(offer, None, TENSORRT) is offer


def test_a_hand_edit_to_such_a_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qbench.planning.plancheck.backend_named", lambda name: TENSORRT)
    row = PlanLayer("a", Kind.LINEAR, "fp8", clips={"x": 1.0})
    plan = Plan(1, "tensorrt", "", "0" * 64, (row,), constraints={"hardware": "SM86"})
    with pytest.raises(PlanError, match="layer 'a' cannot take fp8: fp8 needs SM89"):
        check_plan(plan, "plan.yaml")


@pytest.mark.parametrize("target", ["ampere", "SM50"])
def test_a_target_that_is_none_is_said(target: str) -> None:
    with pytest.raises(ConfigError, match=f"got '{target}'; tensorrt runs on SM75: give SM"):
        check_target(target, TENSORRT)
    check_target("SM75", TENSORRT)
    with pytest.raises(ConfigError, match="ort-cpu runs on x86-64, Arm"):
        check_target("SM86", CPU)


def test_where_a_backend_lists_its_hardware_nothing_else_is_taken() -> None:
    rtx = BACKENDS["tensorrt-rtx"]
    for target in ("SM75", "sm 86", "SM120"):
        check_target(target, rtx)
    for target in ("SM90", "SM999", "SM86x", "86"):
        with pytest.raises(ConfigError, match=f"got '{target}'; tensorrt-rtx runs on SM75, 80"):
            check_target(target, rtx)


def test_a_target_that_was_edited_by_hand_is_checked() -> None:
    row = PlanLayer("a", Kind.LINEAR, "fp16")
    for target in ("foo", "SM90"):
        plan = Plan(1, "tensorrt-rtx", "", "0" * 64, (row,), constraints={"hardware": target})
        with pytest.raises(PlanError, match=f"constraints, hardware: got '{target}'"):
            check_plan(plan, "plan.yaml")
