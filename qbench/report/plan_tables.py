"""Tables of planning: the rounds of repair, and prices from two sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from qbench.records import Plan
from qbench.report.presentation import (
    Column,
    Shown,
    Writer,
    est,
    float_of,
    num,
    show,
    text,
    verdict_text,
)
from qbench.report.wording import megabytes, number

ROUND_COLUMNS = (
    "round", "engine", "step", "sets", "strongest", "level", "predicted", "measured", "drop",
    "verdict", "why",
)  # fmt: skip
PRICE_COLUMNS = (
    "kind", "shape", "format", "segments_ms", "segments_low_ms", "segments_high_ms", "profile_ms",
    "profile_low_ms", "profile_high_ms", "used_ms", "used_low_ms", "used_high_ms", "agree",
)  # fmt: skip


def shown_front(front: pd.DataFrame, *, short: bool = False) -> Shown:
    """Return the measured front: what was proposed, and what its engines gave.

    Args:
        front: What ``front_table`` gave.
        short: Whether the divergences are left out, for a narrow page.
    """
    divergences: list[tuple[Column, Writer]] = [
        (Column("predicted divergence [95 %]"), est("predicted")),
        (Column("measured divergence [95 %]"), est("divergence")),
    ]
    spec: list[tuple[Column, Writer]] = [
        (Column("point"), lambda row: f"{row.point}{' *' if row.pareto else ''}"),
        (Column("engine", right=False), text("engine")),
        (Column("formats", right=False), text("formats")),
        *(() if short else divergences),
        (Column("drop [95 %]"), est("drop")),
        (Column("verdict", right=False), verdict_text),
        (Column("size, MB"), lambda row: megabytes(float_of(row.bytes))),
        (Column("time ÷ reference"), num("time_ratio")),
    ]
    n = front["n"].max() if len(front) else None
    on = "" if n is None or pd.isna(n) else f" on n = {int(n):,} sweep samples"
    marked = [index for index, chosen in enumerate(front["chosen"]) if chosen]
    return show(
        front,
        spec,
        f"What the planner proposed and its engines gave{on}; * nothing beats it in drop, size "
        "and time at once",
        marked,
    )


def rounds_table(plan: Plan | None) -> pd.DataFrame:
    """Return one row a round of repair: what was measured, built, expected and seen.

    ``sets`` counts the sets of layers whose divergence was measured together, ``strongest`` names
    the interaction that adds most.
    """
    history: Sequence[Mapping[str, Any]] = () if plan is None else plan.history
    rows = [_round_row(entry) for entry in history if "round" in entry]
    return pd.DataFrame(rows, columns=list(ROUND_COLUMNS))


def _round_row(entry: Mapping[str, Any]) -> dict[str, Any]:
    terms = entry.get("interactions") or ()
    strongest = f"{' + '.join(terms[0]['cells'])}: {number(terms[0]['extra'])}" if terms else ""
    row = {name: entry.get(name) for name in ROUND_COLUMNS}
    return row | {"sets": len(entry.get("looked") or ()), "strongest": strongest}


def shown_rounds(plan: Plan | None) -> Shown:
    """Return the rounds of repair as a person reads them."""
    spec = [
        (Column("round"), text("round")),
        (Column("engine", right=False), text("engine")),
        (Column("step", right=False), text("step")),
        (Column("sets measured"), text("sets")),
        (Column("strongest interaction", right=False, wrap=True), text("strongest")),
        (Column("predicted divergence"), num("predicted")),
        (Column("measured divergence"), num("measured")),
        (Column("drop"), num("drop")),
        (Column("verdict", right=False), text("verdict")),
        (Column("why", right=False, wrap=True), text("why")),
    ]
    return show(rounds_table(plan), spec, f"Repair{_stop_words(plan)}")


def _stop_words(plan: Plan | None) -> str:
    said = [entry["stopped"] for entry in (plan.history if plan else ()) if entry.get("stopped")]
    return f": it ended because {said[-1]}" if said else ""


def prices_table(prices: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return one row a kind, weight shape and format: its price from each source, ms a batch.

    ``agree`` says whether the intervals of the two sources overlap.
    """
    rows = []
    for price in prices:
        row: dict[str, Any] = {
            "kind": price["kind"],
            "shape": "×".join(map(str, price["shape"])),
            "format": price["format"],
            "agree": price["agree"],
        }
        for source in ("segments", "profile", "used"):
            own = price[source]
            row[f"{source}_ms"] = own["value"]
            row |= {f"{source}_{end}_ms": own[end] for end in ("low", "high")}
        rows.append(row)
    return pd.DataFrame(rows, columns=list(PRICE_COLUMNS))


def shown_prices(prices: Iterable[Mapping[str, Any]]) -> Shown:
    """Return the prices as a person reads them."""
    spec = [
        (Column("kind", right=False), text("kind")),
        (Column("weight"), text("shape")),
        (Column("format", right=False), text("format")),
        (Column("segments, ms [95 %]"), est("segments", "_ms")),
        (Column("nodes of the engine, ms [95 %]"), est("profile", "_ms")),
        (Column("used, ms [95 %]"), est("used", "_ms")),
        (Column("agree", right=False), lambda row: "yes" if row.agree else "no"),
    ]
    return show(
        prices_table(prices),
        spec,
        "Change of a batch's time by a layer, from segments run in pairs and from profiled engines",
    )
