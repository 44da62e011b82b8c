"""Figures of the sweep: the heat map of all cells, and the most sensitive layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from qbench.records import Status, SweepRecord
from qbench.report.figure_style import (
    KIND_COLOURS,
    empty_figure,
    finished,
    format_order,
    interval_texts,
    panel_title,
    panels,
    rows_high,
    scale_for,
    tips,
    titled,
)
from qbench.report.presentation import span
from qbench.report.tables import measured_formats, sweep_table
from qbench.report.wording import STATUS_SIGN, number, split_block

#: Layers of one panel of the heat map, at most.
PANEL_ROWS = 40
_SIGN_UNRESOLVED = "~"
_SIGN_PARTIAL = "≈"


def heat_map_data(records: Sequence[SweepRecord]) -> pd.DataFrame:
    """Return one row a cell, in topological order of layers.

    Returns:
        The columns of ``sweep_table`` and: ``panel`` (the group of layers it is drawn in),
        ``label`` (its name in the panel), ``shown`` (the divergence, or the least positive one
        where it is 0; missing where there is no number), ``sign`` (what is written into the
        cell) and the texts of the tooltip.
    """
    frame = sweep_table(records)
    frame["panel"], frame["label"] = _panels_of(frame["layer"].tolist())
    divergence = frame["divergence"].astype(float)
    positive = divergence[divergence > 0]
    floor = positive.min() if len(positive) else 1e-12
    frame["shown"] = divergence.clip(lower=floor)
    frame["sign"] = [
        _sign(status, resolvable, effort)
        for status, resolvable, effort in zip(
            frame["status"], frame["resolvable"], frame["effort"], strict=True
        )
    ]
    frame["divergence_text"] = interval_texts(frame, "divergence")
    frame["drop_text"] = interval_texts(frame, "drop")
    frame["resolved_text"] = frame["resolvable"].map(_resolved_words)
    frame["p_text"] = [
        "–" if np.isnan(p) else f"{number(p, 2)}; {number(h, 2)}; {number(b, 2)}"
        for p, h, b in zip(frame["p"], frame["p_holm"], frame["p_bh"], strict=True)
    ]
    return frame


def _sign(status: str, resolvable: bool | None, effort: str) -> str:
    if status != Status.OK:
        return STATUS_SIGN[Status(status)]
    if effort != "full":
        return _SIGN_PARTIAL
    return _SIGN_UNRESOLVED if resolvable is False else ""


def _resolved_words(resolvable: bool | float | None) -> str:
    if resolvable is None or pd.isna(resolvable):
        return "no drop measured"
    return "beyond noise" if resolvable else "not resolvable: the interval holds 0"


def _panels_of(layers: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return panel and label of each layer: blocks by name, and long blocks cut in parts."""
    blocks = [split_block(name) for name in layers]
    positions: dict[str, dict[str, int]] = {}
    for name, (block, _) in zip(layers, blocks, strict=True):
        positions.setdefault(block, {}).setdefault(name, len(positions[block]))
    names, labels = [], []
    for name, (block, part) in zip(layers, blocks, strict=True):
        rows, place = len(positions[block]), positions[block][name]
        title = block or "outside of blocks"
        if rows > PANEL_ROWS:
            title += f" ({place // PANEL_ROWS + 1} of {-(-rows // PANEL_ROWS)})"
        names.append(title)
        labels.append(part if block else name)
    return names, labels


def draw_heat_map(
    records: Sequence[SweepRecord], columns: int = 3, floor: float | None = None
) -> Any:
    """Draw the divergence of each layer in each format; the tooltip has drops and intervals.

    Args:
        records: Cells of the sweep.
        columns: Panels beside each other.
        floor: Noise floor of the divergence, told below the title.
    """
    title = "How far each layer moves the answers, by format"
    data = heat_map_data(records)
    if data["divergence"].isna().all():
        return empty_figure(title, "No cell of the sweep has a number.")
    data = data[data["status"] != Status.NOT_APPLICABLE]
    formats = format_order(data["format"])
    charts = [
        _heat_panel(str(name), group, formats, _log_domain(data["shown"]))
        for name, group in data.groupby("panel", sort=False)
    ]
    ok = data[data["status"] == Status.OK]
    notes = (
        f"Mean divergence from the reference on n = {span(ok['n'])} samples; darker moves "
        "the answers more. Layers in topological order.",
        f"~ the interval of the {_metric(ok)} drop holds 0: not resolvable, noise. × invalid, "
        "! failed, · not offered yet; blank where the format means nothing.",
        _partial_note(ok, "≈"),
        _floor_note(floor),
    )
    return finished(panels(charts, columns), titled(title, *notes))


def _floor_note(floor: float | None) -> str:
    if floor is None:
        return ""
    return f"Noise floor, the reference in other batches: {number(floor)}."


def _log_domain(values: pd.Series[Any]) -> list[float]:
    low, high = float(values.min()), float(values.max())
    return [low, high if high > low else low * 10]


def _partial_note(cells: pd.DataFrame, sign: str) -> str:
    count = int((cells["effort"] != "full").sum())
    if not count:
        return ""
    return (
        f"{sign}: estimated from a part of the samples, where the race stopped ({count:,} cells)."
    )


def _metric(frame: pd.DataFrame) -> str:
    names = [name for name in frame["metric"].unique() if name]
    return names[0] if names else "metric"


def _heat_panel(name: str, group: pd.DataFrame, formats: list[str], domain: list[float]) -> Any:
    labels = list(dict.fromkeys(group["label"]))
    base = alt.Chart(
        group[_HEAT_COLUMNS], width=30 * len(formats), height=rows_high(len(labels))
    ).encode(
        x=alt.X("format:N", sort=formats, title=None, scale=alt.Scale(domain=formats),
                axis=alt.Axis(orient="top", labelAngle=-50, labelAlign="left", domain=False,
                              ticks=False)),
        y=alt.Y("label:N", sort=labels, title=None, axis=alt.Axis(domain=False, ticks=False)),
        tooltip=_HEAT_TOOLTIP,
    )  # fmt: skip
    ok = "datum.status === 'ok'"
    cells = base.transform_filter(ok).mark_rect(stroke="white").encode(color=_heat_colour(domain))
    others = base.transform_filter(f"!({ok})").mark_rect(stroke="white", color="#e4e8ec")
    middle = float(np.sqrt(domain[0] * domain[1]))
    signs = base.mark_text(fontSize=11, fontWeight="bold").encode(
        text=alt.Text("sign:N"),
        color=alt.condition(
            f"{ok} && datum.shown > {middle:.6g}",
            alt.value("white"),
            alt.value("#3d444d"),
        ),
    )
    return alt.layer(cells, others, signs, title=panel_title(name))


def _heat_colour(domain: list[float]) -> alt.Color:
    return alt.Color(
        "shown:Q",
        title="divergence a sample",
        scale=alt.Scale(type="log", scheme="viridis", reverse=True, domain=domain),
        legend=alt.Legend(orient="top", gradientLength=320, format=".0e", tickCount=6),
    )


_HEAT_COLUMNS = [
    "layer", "kind", "format", "label", "status", "shown", "sign", "divergence_text", "drop_text",
    "metric", "resolved_text", "p_text", "n", "effort", "flip_rate", "sqnr_db", "reason",
]  # fmt: skip
_HEAT_TOOLTIP = [
    *tips("layer:N", "kind:N", "format:N", "status:N"),
    alt.Tooltip("divergence_text:N", title="divergence [95 %]"),
    *tips("metric:N"),
    alt.Tooltip("drop_text:N", title="drop [95 %], > 0 is worse"),
    alt.Tooltip("resolved_text:N", title="drop is"),
    alt.Tooltip("p_text:N", title="p: raw; Holm; Benjamini–Hochberg"),
    *tips("n:Q", "effort:N"),
    alt.Tooltip("flip_rate:Q", title="answers changed", format=".1%"),
    alt.Tooltip("sqnr_db:Q", title="SQNR at output, dB", format=".1f"),
    *tips("reason:N"),
]


def ranking_data(records: Sequence[SweepRecord], top: int = 15) -> pd.DataFrame:
    """Return the ``top`` most divergent layers of each measured format, most divergent first."""
    frame = sweep_table(records)
    ranked = frame[frame["rank"].notna() & (frame["rank"] <= top)]
    order = {name: index for index, name in enumerate(measured_formats(records))}
    return ranked.sort_values(
        ["format", "rank"], key=lambda s: s.map(order) if s.name == "format" else s
    ).reset_index(drop=True)


def draw_ranking(
    records: Sequence[SweepRecord], top: int = 15, noise_floor: float | None = None
) -> Any:
    """Draw the most sensitive layers of each format with the intervals of their divergence.

    Args:
        records: Cells of the sweep.
        top: Layers of each format.
        noise_floor: Noise floor of the divergence; a line where it is not far left of the axis.
    """
    title = "The most sensitive layers, by format"
    data = ranking_data(records, top)
    if data.empty:
        return empty_figure(title, "No cell of the sweep has a number.")
    floor = float(data.loc[data["divergence"] > 0, "divergence"].min()) / 10
    for name in ("divergence", "divergence_low", "divergence_high"):
        data[name] = data[name].clip(lower=floor if np.isfinite(floor) else 1e-12)
    data["rank_text"] = interval_texts(data, "rank")
    kinds = scale_for(data["kind"], KIND_COLOURS)
    charts = [
        _rank_panel(str(n), g, kinds, noise_floor) for n, g in data.groupby("format", sort=False)
    ]
    notes = (
        f"Mean divergence a sample with its 95 % interval, n = {span(data['n'])}; the "
        f"{top} most divergent layers of each format.",
        "Layers whose intervals overlap are not told apart.",
        _partial_note(data, "Pale"),
        _floor_note(noise_floor) + _line_note(data, noise_floor),
    )
    return finished(panels(charts, 2), titled(title, *notes))


def _near(group: pd.DataFrame, floor: float | None) -> bool:
    """Whether a floor can be drawn without pressing the layers into a corner of the axis."""
    least = float(group["divergence"].min())
    return floor is not None and floor > least / 30


def _line_note(data: pd.DataFrame, floor: float | None) -> str:
    if floor is None:
        return ""
    drawn = any(_near(group, floor) for _, group in data.groupby("format"))
    return " It is the dashed line." if drawn else " It lies far left of the axis."


def _rank_panel(
    name: str, group: pd.DataFrame, kinds: alt.Scale, floor: float | None = None
) -> Any:
    columns = ["layer", "kind", "divergence", "divergence_low", "divergence_high", "rank_text",
               "n", "effort"]  # fmt: skip
    base = alt.Chart(group[columns], width=270, height=rows_high(len(group))).encode(
        y=alt.Y("layer:N", sort=group["layer"].tolist(), title=None),
        color=alt.Color("kind:N", scale=kinds, title="kind", legend=alt.Legend(orient="top")),
        tooltip=[*tips("layer:N", "kind:N"), alt.Tooltip("divergence:Q", format=".3g"),
                 alt.Tooltip("rank_text:N", title="rank [95 %]"), *tips("n:Q", "effort:N")],
        opacity=alt.condition("datum.effort === 'full'", alt.value(1), alt.value(0.4)),
    )  # fmt: skip
    axis = alt.X(
        "divergence_low:Q",
        title="divergence a sample (log)",
        scale=alt.Scale(type="log", nice=False, padding=8),
        axis=alt.Axis(format=".0e", tickCount=4, labelOverlap="greedy"),
    )
    rules = base.mark_rule(strokeWidth=2).encode(x=axis, x2=alt.X2("divergence_high"))
    points = base.mark_point(filled=True, size=55).encode(x=alt.X("divergence:Q"))
    layers = [rules, points]
    if _near(group, floor):
        line = alt.Chart(pd.DataFrame({"divergence_low": [floor]})).mark_rule(strokeDash=[4, 4])
        layers.insert(0, line.encode(x=axis))
    return alt.layer(*layers, title=panel_title(name))
