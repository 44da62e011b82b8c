"""``sweep.budget``: times with a unit, and clear errors for the rest."""

from __future__ import annotations

import pytest

from qbench.config import make_config, parse_seconds
from qbench.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5 h", 5400), (" 2M ", 120)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["0s", "0m", "-5m", "10", "soon", "", "m", "infs", "nanm"])
def test_nonsense_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: a time above zero with its unit, such as 90s"):
        parse_seconds(text)


def test_it_is_part_of_the_sweep() -> None:
    said = {"model": {"source": "m"}, "data": {"source": "d.csv"}, "task": {"kind": "none"}}
    assert make_config(said).sweep.budget_s is None
    assert make_config(said | {"sweep": {"budget": "90s"}}).sweep.budget_s == 90
    with pytest.raises(ConfigError, match="budget"):
        make_config(said | {"sweep": {"budget": "0s"}})
