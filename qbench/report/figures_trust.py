"""Figures of trust: each layer alone low against the same layer restored."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from qbench.records import RestoredView
from qbench.report.figure_style import (
    GREY,
    KIND_COLOURS,
    empty_figure,
    finished,
    interval_texts,
    scale_for,
    tips,
    titled,
)
from qbench.report.trust_tables import restored_table
from qbench.report.wording import estimate

#: Layers that get their name written beside them, at most.
_LABELS = 8
_WON = "divergence won by restoring it (linear near 0)"


def views_data(view: RestoredView) -> pd.DataFrame:
    """Return one row a layer with both views.

    Returns:
        The columns of ``restored_table``; ``label`` has the layer's name where the interaction is
        beyond noise and among the largest; and texts of the tooltip.
    """
    frame = restored_table(view)
    frame = frame[frame["single"].notna()].reset_index(drop=True)
    beyond = frame["resolvable"].eq(True)
    frame["label"] = frame["layer"].where(beyond & (beyond.cumsum() <= _LABELS), "")
    for name in ("single", "gain", "interaction"):
        frame[f"{name}_text"] = interval_texts(frame, name)
    return frame


def draw_views(view: RestoredView) -> Any:
    """Draw what a layer costs alone against what restoring it wins in company."""
    title = f"One layer low, and all low with one restored: {view.format}"
    data = views_data(view)
    data = data[data["single"].astype(float) > 0]
    if data.empty:
        return empty_figure(title, "No layer was measured in both views.")
    equal, x, y = _axes(data)
    columns = [name for name in data.columns if name != "resolvable"]
    base = alt.Chart(data[columns], width=560, height=420).encode(
        x=x, y=y, color=alt.Color("kind:N", scale=scale_for(data["kind"], KIND_COLOURS),
                                  title="kind", legend=alt.Legend(orient="top")),
        tooltip=[*tips("layer:N", "kind:N"), alt.Tooltip("single_text:N", title="alone [95 %]"),
                 alt.Tooltip("gain_text:N", title="won by restoring [95 %]"),
                 alt.Tooltip("interaction_text:N", title="interaction [95 %]"), *tips("n:Q")],
    )  # fmt: skip
    rules = base.mark_rule(strokeWidth=1, opacity=0.45).encode(
        y=alt.Y("gain_low:Q", title=_WON), y2=alt.Y2("gain_high")
    )
    points = base.mark_point(filled=True, size=60, opacity=1)
    line = alt.Chart(equal).mark_line(color=GREY, strokeDash=[4, 4], strokeWidth=1.5)
    text = alt.Chart(data[columns]).encode(x=x, y=y, text=alt.Text("label:N"))
    style: dict[str, Any] = {"align": "right", "dx": -9, "fontSize": 10.5}
    rim = text.mark_text(**style, stroke="white", strokeWidth=3, strokeJoin="round")
    notes = (
        f"n = {int(data['n'].iloc[0]):,}. All {view.lowered} layers in {view.format}: divergence "
        f"{estimate(view.all_low)}. Bars: 95 % intervals.",
        "On the dashed line a layer costs the same alone and in company; above it, more in "
        "company. Named: interactions beyond noise.",
    )
    layers = [line.encode(x=x, y=y), rules, points, rim, text.mark_text(**style)]
    return finished(alt.layer(*layers), titled(title, *notes))


def _axes(data: pd.DataFrame) -> tuple[pd.DataFrame, alt.X, alt.Y]:
    """Return the curve on which both views are equal, and both axes.

    The divergence won can be negative, so its axis is linear near zero and logarithmic beyond.
    """
    single = data["single"].astype(float)
    least, most = float(single.min()), float(single.max())
    curve = np.geomspace(least, max(most, least * 1.01), 80)
    top = max(float(data["gain_high"].astype(float).max()), most)
    x = alt.X(
        "single:Q",
        title="divergence, this layer alone low (log)",
        scale=alt.Scale(type="log", nice=False, padding=14),
        axis=alt.Axis(format=".0e", tickCount=5, labelOverlap="greedy"),
    )
    y = alt.Y(
        "gain:Q",
        title=_WON,
        scale=alt.Scale(type="symlog", constant=top / 20, nice=False, padding=10),
        axis=alt.Axis(format=".2~g", tickCount=7, labelOverlap="greedy"),
    )
    return pd.DataFrame({"single": curve, "gain": curve}), x, y
