"""Figures of the ranges that calibration saw: extent, outlier channels, room in fp16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from qbench.records import TensorRange
from qbench.report.figure_style import (
    BLACK,
    BLUE,
    KIND_COLOURS,
    ORANGE,
    SKY,
    VERMILION,
    balanced,
    empty_figure,
    finished,
    panel_title,
    rows_high,
    scale_for,
    tips,
    titled,
)
from qbench.report.tables import ranges_table

#: Rows of one panel of ranges, at most; the widest ones of a kind are shown.
PANEL_ROWS = 48
_DECADES = [10.0**power for power in range(-6, 13)]


def ranges_data(ranges: Sequence[TensorRange], kinds: Mapping[str, str]) -> pd.DataFrame:
    """Return one row a tensor that a layer reads, with the ends of the bars of the figure.

    Returns:
        The columns of ``ranges_table`` and ``band_low``, ``band_high``: the part of the range
        whose magnitude is within the 99.99th percentile (``core_…``: the 99th).
    """
    frame = ranges_table(ranges, kinds)
    frame = frame[(frame["layer"] != "") & ~frame["implicit"].astype(bool)].copy()
    for name, column in (("band", "p99.99"), ("core", "p99")):
        limit = frame[column].fillna(frame["absmax"])
        frame[f"{name}_low"] = np.maximum(frame["min"], -limit)
        frame[f"{name}_high"] = np.minimum(frame["max"], limit)
    repeated = frame["layer"].duplicated(keep=False)
    frame["label"] = frame["layer"].where(
        ~repeated, frame["layer"].astype(str) + " ← " + frame["tensor"].astype(str)
    )
    return frame.reset_index(drop=True)


def draw_ranges(ranges: Sequence[TensorRange], kinds: Mapping[str, str]) -> Any:
    """Draw the range of each layer's input: extremes, and the bulk inside of them."""
    title = "What enters each layer: extremes and bulk"
    data = ranges_data(ranges, kinds)
    if data.empty:
        return empty_figure(title, "No range belongs to a layer.")
    order = [kind for kind in KIND_COLOURS if kind in set(data["kind"])]
    rest = sorted(set(data["kind"]) - set(order))
    groups = {kind: data[data["kind"] == kind] for kind in order + rest}
    charts = [_range_panel(kind, group) for kind, group in groups.items()]
    heights = [rows_high(min(len(group), PANEL_ROWS), 15) for group in groups.values()]
    notes = (
        "Thin line: smallest to largest element. Bar: magnitudes within the 99.99th percentile; "
        "dark bar: within the 99th.",
        "A long thin line beyond the bar is what makes INT8 coarse: one scale must hold it all.",
    )
    return finished(balanced(charts, heights), titled(title, *notes))


def _range_panel(kind: str, group: pd.DataFrame) -> Any:
    shown = group
    name = kind or "no layer"
    if len(group) > PANEL_ROWS:
        widest = group["absmax"].nlargest(PANEL_ROWS).index
        shown = group.loc[group.index.isin(widest)]
        name += f" (the {PANEL_ROWS} widest of {len(group)})"
    columns = ["label", "layer", "tensor", "min", "max", "absmax", "p99", "p99.99", "band_low",
               "band_high", "core_low", "core_high", "count", "kurtosis"]  # fmt: skip
    data = shown[columns].rename(columns={"p99.99": "p9999"})
    numbers = {"min": "min", "max": "max", "p99": "99 % of magnitudes ≤",
               "p9999": "99.99 % of magnitudes ≤", "kurtosis": "excess kurtosis"}  # fmt: skip
    base = alt.Chart(data, width=260, height=rows_high(len(data), 15)).encode(
        y=alt.Y("label:N", sort=data["label"].tolist(), title=None,
                axis=alt.Axis(labelFontSize=10.5, labelLimit=230)),
        tooltip=[*tips("layer:N", "tensor:N", "count:Q"),
                 *[alt.Tooltip(f"{k}:Q", title=v, format=".4g") for k, v in numbers.items()]],
    )  # fmt: skip
    axis = alt.X("min:Q", title="value", axis=alt.Axis(tickCount=6))
    line = base.mark_rule(color="#7a838c").encode(x=axis, x2=alt.X2("max"))
    band = base.mark_bar(height=8, color=SKY).encode(x=alt.X("band_low:Q"), x2=alt.X2("band_high"))
    core = base.mark_bar(height=8, color=BLUE).encode(x=alt.X("core_low:Q"), x2=alt.X2("core_high"))
    ends = [
        base.mark_tick(color=BLACK, thickness=1.5, height=9).encode(x=alt.X(f"{end}:Q"))
        for end in ("min", "max")
    ]
    return alt.layer(line, band, core, *ends, title=panel_title(name))


def outlier_data(
    ranges: Sequence[TensorRange], kinds: Mapping[str, str], tensors: int = 20, channels: int = 5
) -> pd.DataFrame:
    """Return the largest channels of the tensors whose largest channel stands out most.

    Returns:
        One row a (tensor, channel): its ``absmax``, the tensor's ``median`` over channels, their
        ``ratio``, and ``place`` (1 is the largest channel of its tensor). Tensors that no layer
        reads, and tensors without a channel axis of fixed size, are left out.
    """
    rows = []
    for item in ranges:
        values = np.asarray(item.channel_absmax, dtype=np.float64)
        median = float(np.median(values)) if values.size > 1 else 0.0
        if not item.layer or item.implicit or median <= 0:
            continue
        for place, channel in enumerate(np.argsort(-values)[:channels], 1):
            rows.append(
                {
                    "layer": item.layer, "kind": kinds.get(item.layer, ""), "tensor": item.tensor,
                    "channel": int(channel), "channels": values.size, "place": place,
                    "absmax": float(values[channel]), "median": median,
                    "ratio": float(values[channel]) / median,
                }
            )  # fmt: skip
    columns = ["layer", "kind", "tensor", "channel", "channels", "place", "absmax", "median",
               "ratio"]  # fmt: skip
    frame = pd.DataFrame(rows, columns=columns).astype({"ratio": float})
    worst = frame[frame["place"] == 1].nlargest(tensors, "ratio")["tensor"]
    kept = frame[frame["tensor"].isin(worst)]
    order = {tensor: index for index, tensor in enumerate(worst)}
    return kept.sort_values(
        ["tensor", "place"], key=lambda s: s.map(order) if s.name == "tensor" else s
    ).reset_index(drop=True)


def draw_outliers(
    ranges: Sequence[TensorRange], kinds: Mapping[str, str], tensors: int = 20, channels: int = 5
) -> Any:
    """Draw how far the largest channels of a tensor stand out of its median channel."""
    title = "Outlier channels"
    data = outlier_data(ranges, kinds, tensors, channels)
    if data.empty:
        return empty_figure(title, "No tensor has channels to compare.")
    data["label"] = _unique_labels(data)
    labels = list(dict.fromkeys(data["label"]))
    base = alt.Chart(data, width=520, height=rows_high(len(labels))).encode(
        y=alt.Y("label:N", sort=labels, title=None),
        tooltip=[*tips("layer:N", "tensor:N", "channel:Q", "channels:Q"),
                 alt.Tooltip("absmax:Q", title="largest magnitude", format=".4g"),
                 alt.Tooltip("median:Q", title="median channel", format=".4g"),
                 alt.Tooltip("ratio:Q", format=".1f")],
    )  # fmt: skip
    axis = alt.X(
        "ratio:Q",
        title="largest magnitude of a channel ÷ median over channels (log)",
        scale=alt.Scale(type="log", domainMin=1, nice=False, padding=8),
        axis=alt.Axis(format="~g", values=_ratio_ticks(float(data["ratio"].max()))),
    )
    first = alt.datum.place == 1
    rest = base.transform_filter(~first).mark_point(
        filled=True, size=34, color="#b6bdc4", opacity=1
    )
    top = base.transform_filter(first).mark_point(filled=True, size=70, opacity=1)
    kind = alt.Color(
        "kind:N",
        scale=scale_for(data["kind"], KIND_COLOURS),
        title="largest channel, by kind",
        legend=alt.Legend(orient="top"),
    )
    chart = alt.layer(rest.encode(x=axis), top.encode(x=axis, color=kind))
    notes = (
        f"The {channels} largest channels of the {len(labels)} tensors that stand out most; 1 is "
        "the median channel of the same tensor.",
    )
    return finished(chart, titled(title, *notes))


def _ratio_ticks(largest: float) -> list[float]:
    ticks = [m * 10**e for e in range(5) for m in (1, 2, 5)]
    return [float(tick) for tick in ticks if tick <= largest * 1.2]


def _unique_labels(data: pd.DataFrame) -> pd.Series[Any]:
    tensors = data.groupby("layer")["tensor"].transform("nunique")
    return data["layer"].where(tensors == 1, data["layer"] + " ← " + data["tensor"])


def headroom_data(
    ranges: Sequence[TensorRange], kinds: Mapping[str, str], tensors: int = 20
) -> pd.DataFrame:
    """Return the tensors with least room below the largest fp16 number, least first."""
    frame = ranges_table(ranges, kinds)
    finite = frame[np.isfinite(frame["fp16_headroom"].astype(float))]
    kept = finite.nsmallest(tensors, "fp16_headroom").reset_index(drop=True)
    kept["overflows"] = kept["fp16_headroom"] < 1
    kept["what"] = np.where(kept["implicit"].astype(bool), "inside an operator", "tensor")
    return kept


def draw_headroom(
    ranges: Sequence[TensorRange], kinds: Mapping[str, str], tensors: int = 20
) -> Any:
    """Draw the tensors that come closest to the largest fp16 number."""
    title = "Room in fp16"
    data = headroom_data(ranges, kinds, tensors)
    if data.empty:
        return empty_figure(title, "No tensor has a finite headroom.")
    pairs = zip(data["layer"].astype(str), data["tensor"].astype(str), strict=True)
    data["label"] = [
        tensor if layer in tensor else f"{layer} ← {tensor}" for layer, tensor in pairs
    ]
    columns = ["label", "layer", "tensor", "absmax", "fp16_headroom", "overflows", "what"]
    base = alt.Chart(data[columns], width=420, height=rows_high(len(data))).encode(
        y=alt.Y("label:N", sort=data["label"].tolist(), title=None,
                axis=alt.Axis(labelLimit=420)),
        tooltip=[*tips("layer:N", "tensor:N", "what:N"), alt.Tooltip("absmax:Q", format=".4g"),
                 alt.Tooltip("fp16_headroom:Q", format=".4g")],
    )  # fmt: skip
    points = base.mark_point(filled=True, size=70, opacity=1).encode(
        x=alt.X("fp16_headroom:Q", title="65,504 ÷ largest magnitude (log); below 1 it overflows",
                scale=alt.Scale(type="log"), axis=alt.Axis(format="~g", values=_DECADES)),
        color=alt.Color("what:N", title=None, legend=alt.Legend(orient="top"),
                        scale=alt.Scale(domain=["tensor", "inside an operator"],
                                        range=[BLUE, ORANGE])),
    )  # fmt: skip
    rule = alt.Chart(pd.DataFrame({"limit": [1.0]})).mark_rule(
        color=VERMILION, strokeDash=[5, 4], strokeWidth=1.5
    )
    chart = alt.layer(rule.encode(x=alt.X("limit:Q")), points)
    over = int(data["overflows"].sum())
    note = f"{over} would overflow." if over else "None overflows on the calibration samples."
    return finished(chart, titled(title, f"The {len(data)} tensors with least room. {note}"))
