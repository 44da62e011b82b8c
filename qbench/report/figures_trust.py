"""Figures of trust: each layer alone low against the same layer restored."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from qbench.records import RestoredView
from qbench.report.figure_style import (
    GREY,
    KIND_COLOURS,
    empty_figure,
    finished,
    interval_texts,
    label_layers,
    scale_for,
    tips,
    titled,
)
from qbench.report.trust_tables import restored_table
from qbench.report.wording import estimate

#: Layers that get their name written beside them, at most.
_LABELS = 8


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
    if data.empty:
        return empty_figure(title, "No layer was measured in both views.")
    both = pd.concat([data["single"], data["gain"]]).astype(float)
    least = float(both.abs()[both != 0].min()) if (both != 0).any() else 1e-9
    low, high = min(float(both.min()), 0.0), max(float(both.max()), least)
    scale = alt.Scale(type="symlog", constant=least, domain=[low, high], nice=False, padding=12)
    axis = alt.Axis(format=".0e", tickCount=5, labelOverlap="greedy")
    base = alt.Chart(data.drop(columns=["resolvable"]), width=520, height=420).encode(
        x=alt.X("single:Q", title="divergence, this layer alone low", scale=scale, axis=axis),
        y=alt.Y("gain:Q", title="divergence won by restoring it", scale=scale, axis=axis),
    )
    points = base.mark_point(filled=True, size=70, opacity=0.9).encode(
        color=alt.Color("kind:N", scale=scale_for(data["kind"], KIND_COLOURS), title="kind"),
        tooltip=[*tips("layer:N", "kind:N"), alt.Tooltip("single_text:N", title="alone [95 %]"),
                 alt.Tooltip("gain_text:N", title="won by restoring [95 %]"),
                 alt.Tooltip("interaction_text:N", title="interaction [95 %]"), *tips("n:Q")],
    )  # fmt: skip
    ends = pd.DataFrame({"single": [low, high], "gain": [low, high]})
    line = alt.Chart(ends).mark_line(color=GREY, strokeDash=[4, 4], strokeWidth=1.5)
    equal = line.encode(x=alt.X("single:Q", scale=scale), y=alt.Y("gain:Q", scale=scale))
    notes = (
        f"n = {int(data['n'].iloc[0]):,}. All {view.lowered} layers in {view.format}: divergence "
        f"{estimate(view.all_low)}.",
        "On the dashed line a layer costs the same alone and in company; below it, less in "
        "company. Named: largest interactions beyond noise.",
    )
    labels = label_layers(base, text=alt.Text("label:N"))
    return finished(alt.layer(equal, points, *labels), titled(title, *notes))
