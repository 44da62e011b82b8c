from __future__ import annotations

import math

import pytest

from qbench.errors import InputError
from qbench.planning.margins import margin_of, parse_max_drop


@pytest.mark.parametrize("written", ["5 %", "5%", " 5.0 % "])
def test_a_share_of_the_reference(written: str) -> None:
    assert margin_of(written, 0.4) == pytest.approx(0.02)
    assert margin_of(written, -0.4) == pytest.approx(0.02)
    assert margin_of(parse_max_drop(written), 0.4) == pytest.approx(0.02)


@pytest.mark.parametrize("written", [0.01, "0.01", "1e-2"])
def test_a_number_in_the_metric_unit(written: str | float) -> None:
    assert margin_of(written, 0.4) == 0.01


@pytest.mark.parametrize(
    "written",
    ["-1 %", -0.1, "five", "", "%", "0,01", "nan", "inf", math.nan, 0, "0 %", "150 %", True],
)
def test_nonsense_is_refused(written: str | float) -> None:
    with pytest.raises(InputError, match="max_drop"):
        margin_of(written, 0.4)


@pytest.mark.parametrize("reference", [0.0, math.nan])
def test_a_share_of_nothing_is_no_margin(reference: float) -> None:
    with pytest.raises(InputError, match="metric's own unit"):
        margin_of("5 %", reference)
