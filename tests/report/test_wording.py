from __future__ import annotations

import math

import pytest

from qbench.records import Estimate, Rewritten
from qbench.report.wording import (
    counted,
    estimate,
    listed,
    megabytes,
    not_resolvable,
    number,
    rewritten_words,
    role_of,
    share,
    split_block,
)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0, "0"),
        (0.012345, "0.0123"),
        (-0.012345, "−0.0123"),
        (12345.6, "12,346"),
        (3.21e-7, "3.21e−7"),
        (1.5e12, "1.50e+12"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "–"),
        (None, "–"),
    ],
)
def test_number(value: float | None, written: str) -> None:
    assert number(value) == written


def test_estimate_has_its_interval() -> None:
    assert estimate(Estimate(0.0123, -0.001, 0.0256, 50)) == "0.012 [−0.0010, 0.026]"
    assert estimate(None) == "–"
    assert estimate(Estimate(0.5, math.nan, math.nan, 0)) == "0.50 [–, –]"


def test_sizes_and_shares() -> None:
    assert megabytes(90_900_000) == "90.9"
    assert megabytes(None) == "–"
    assert share(0.25) == "25.0 %"


def test_not_resolvable_names_the_n_that_would_do() -> None:
    assert not_resolvable(330, 7500) == "not resolvable at n = 330; about 7,500 would do"
    assert not_resolvable(330, None) == "not resolvable at n = 330"


def test_lists() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(["a", "b", "c"], most=2) == "a, b and 1 more"
    assert counted(["int8", "fp32", "int8", "own"]) == "1 fp32, 2 int8, 1 own"


@pytest.mark.parametrize(
    ("name", "block", "part"),
    [
        ("encoder.layer.3.output.dense", "encoder.layer.3", "output.dense"),
        ("/encoder/layer.3/output/dense/MatMul", "encoder.layer.3", "output.dense.MatMul"),
        ("layers.0", "layers.0", "0"),
        ("pooler.dense", "", "pooler.dense"),
        ("MatMul_13", "", "MatMul_13"),
    ],
)
def test_split_block(name: str, block: str, part: str) -> None:
    assert split_block(name) == (block, part)


def test_roles() -> None:
    names = ["plan", "reference", "random", "int8", "front-3"]
    assert [role_of(n) for n in names] == ["plan", "reference", "random", "uniform", "front"]


def test_constants_of_masks_are_told_with_what_they_become() -> None:
    items = [Rewritten(f"l.{i}", "scores", "fill", -1e12, -65504.0) for i in range(3)]
    items.append(Rewritten("l.3", "scores", "open", -math.inf, -math.inf))
    told = rewritten_words(items)
    assert told == "fill (-1e+12) → -65504, 3 layers; open (-inf) stays, 1 layers"
    assert rewritten_words([]) == ""
