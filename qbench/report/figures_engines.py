"""Figures of engines: the measured front, predicted beside measured, and the plan's formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from qbench.planning.costs import sum_divergence
from qbench.records import BenchRun, EngineReport, Judgement, Plan, SweepRecord
from qbench.report.comparison import compare_engines, engines_table, front_table
from qbench.report.figure_style import (
    FORMAT_COLOURS,
    GREY,
    ROLE_COLOURS,
    ROLE_SHAPES,
    VERMILION,
    empty_figure,
    finished,
    interval_texts,
    label_layers,
    panel_title,
    panels,
    scale_for,
    tips,
    titled,
)
from qbench.report.samples import cells_by_format
from qbench.report.tables import estimate_columns
from qbench.report.wording import PLAN, split_block

_SPLIT_WORDS = {"sweep": "sweep split (decided)", "verification": "verification split (held out)"}
#: How each cost is said: in a heading, and at an axis.
_COST_WORDS = {
    "size": ("size", "engine size, MB"),
    "time": ("time of a batch", "time of a batch ÷ the reference's"),
    "latency": ("latency under load", "median latency under load, ms"),
}
FRONT_DATA_COLUMNS = (
    "panel", "split", "engine", "role", "cost", "cost_value", "metric", "drop", "drop_low",
    "drop_high", "margin", "verdict", "n",
)  # fmt: skip


def front_data(
    front: Iterable[Mapping[str, Any]],
    sweep: Sequence[Judgement],
    verification: Sequence[Judgement],
    reports: Sequence[EngineReport],
    bench: BenchRun | None = None,
    plan: Plan | None = None,
) -> pd.DataFrame:
    """Return one row for each engine, split and cost: its paired drop beside what it costs.

    Costs on the sweep split are ``size`` (MB) and ``time`` (of a batch, reference = 1); on the
    verification split ``size`` and ``latency`` (median ms under load).
    """
    deciding = front_table(front, sweep, reports, plan)
    held_out = engines_table(compare_engines(verification, reports, bench))
    parts = [
        _with_cost(deciding, "sweep", "size", deciding["bytes"] / 1e6),
        _with_cost(deciding, "sweep", "time", deciding["time_ratio"]),
        _with_cost(held_out, "verification", "size", held_out["bytes"] / 1e6),
        _with_cost(held_out, "verification", "latency", held_out["p50_ms"]),
    ]
    filled = [part for part in parts if len(part)]
    if not filled:
        return pd.DataFrame(columns=list(FRONT_DATA_COLUMNS))
    return pd.concat(filled, ignore_index=True)


def _with_cost(frame: pd.DataFrame, split: str, cost: str, values: pd.Series[Any]) -> pd.DataFrame:
    found = frame.assign(split=split, cost=cost, cost_value=values.astype(float))
    found["panel"] = f"{_SPLIT_WORDS[split]}: {_COST_WORDS[cost][0]}"
    kept = found["drop"].notna() & found["cost_value"].notna()
    return found.loc[kept, list(FRONT_DATA_COLUMNS)]


def draw_front(data: pd.DataFrame) -> Any:
    """Draw ``front_data``: drop with its interval over cost, one panel a split and cost."""
    title = "The measured front: what accuracy costs"
    if data.empty:
        return empty_figure(title, "No engine was judged.")
    data = data.assign(drop_text=interval_texts(data, "drop"))
    ends = data[["drop_low", "drop_high", "margin"]].astype(float)
    low, high = min(0.0, ends.min().min()), max(0.0, ends.max().max())
    domain = [low - 0.05 * (high - low), high + 0.05 * (high - low)]
    roles = [role for role in ROLE_COLOURS if role in set(data["role"])]
    charts = [
        _front_panel(str(name), group, roles, domain)
        for name, group in data.groupby("panel", sort=False)
    ]
    metric = data["metric"].iloc[0]
    notes = (
        f"Paired drop of {metric} against the reference with its 95 % interval; below 0 is better "
        "than the reference. Left and low is good.",
        "Dashed: the largest drop allowed. Engines whose intervals overlap are not told apart.",
    )
    return finished(panels(charts, 2), titled(title, *notes))


def _front_panel(name: str, group: pd.DataFrame, roles: list[str], domain: list[float]) -> Any:
    cost = _COST_WORDS[str(group["cost"].iloc[0])][1]
    colour = alt.Color("role:N", title="engine", scale=scale_for(roles, ROLE_COLOURS),
                       legend=alt.Legend(orient="top"))  # fmt: skip
    shape = alt.Shape("role:N", title="engine", legend=alt.Legend(orient="top"),
                      scale=alt.Scale(domain=roles, range=[ROLE_SHAPES[r] for r in roles])
                      )  # fmt: skip
    base = alt.Chart(group, width=400, height=300).encode(
        x=alt.X("cost_value:Q", title=cost, scale=alt.Scale(zero=False, padding=36)),
        color=colour,
        tooltip=[*tips("engine:N", "role:N"), alt.Tooltip("cost_value:Q", title=cost, format=".4g"),
                 alt.Tooltip("drop_text:N", title="drop [95 %]"), *tips("verdict:N", "n:Q")],
    )  # fmt: skip
    axis = alt.Y("drop_low:Q", title="drop (> 0 is worse)", axis=alt.Axis(format="~g"),
                 scale=alt.Scale(domain=domain, nice=False))  # fmt: skip
    layers: list[Any] = [
        alt.Chart(pd.DataFrame({"y": [0.0]})).mark_rule(color=GREY).encode(y=alt.Y("y:Q")),
        base.mark_rule(strokeWidth=1.5, opacity=0.7).encode(y=axis, y2=alt.Y2("drop_high")),
        base.mark_point(filled=True, size=110, opacity=1).encode(y=alt.Y("drop:Q"), shape=shape),
        *label_layers(base, y=alt.Y("drop:Q"), text=alt.Text("engine:N")),
    ]
    margin = group["margin"].dropna()
    if len(margin):
        limit = alt.Chart(pd.DataFrame({"y": [float(margin.iloc[0])]}))
        layers.insert(
            0,
            limit.mark_rule(color=VERMILION, strokeDash=[5, 4], strokeWidth=1.5).encode(
                y=alt.Y("y:Q")
            ),
        )
    heading = f"{name}, n = {int(group['n'].max()):,}"
    return alt.layer(*layers, title=panel_title(heading))


def predicted_data(
    front: pd.DataFrame,
    verification: Sequence[Judgement],
    records: Sequence[SweepRecord] = (),
) -> pd.DataFrame:
    """Return the predicted divergence of each engine beside what the engine gave.

    Args:
        front: What ``front_table`` gave: predictions, and measurements on the sweep split.
        verification: What engines gave on the verification split.
        records: The sweep, for the predictions of uniform engines.

    Returns:
        One row an engine and split, for engines with a prediction. The plan's engine is measured
        on both splits.
    """
    columns = ["engine", "role", "predicted", "predicted_low", "predicted_high"]
    predicted = front.loc[front["predicted"].notna()]
    measured = [*columns, "divergence", "divergence_low", "divergence_high", "n"]
    decided = predicted.loc[predicted["divergence"].notna(), measured]
    known: dict[str, dict[str, Any]] = _uniform_predictions(records)
    for row in predicted[columns].to_dict("records"):
        name = PLAN if row["role"] == PLAN else str(row["engine"])
        known[name] = {**{str(key): value for key, value in row.items()}, "engine": name}
    rows = [
        known[item.engine] | estimate_columns("divergence", item.divergence) | {"n": item.n}
        for item in verification
        if item.engine in known
    ]
    held_out = pd.DataFrame(rows, columns=measured)
    parts = [
        decided.assign(split=_SPLIT_WORDS["sweep"]),
        held_out.assign(split=_SPLIT_WORDS["verification"]),
    ]
    filled = [part for part in parts if len(part)]
    return pd.concat(filled, ignore_index=True) if filled else parts[0]


def _uniform_predictions(records: Sequence[SweepRecord]) -> dict[str, dict[str, Any]]:
    """Return the summed divergence of each engine that takes one format wherever it can."""
    found: dict[str, dict[str, Any]] = {}
    for name, places in cells_by_format(records).items():
        formats = {records[place].layer: name for place in places}
        total = sum_divergence(formats, records)
        if total is not None:
            found[name] = {"engine": name, "role": "uniform"}
            found[name] |= estimate_columns("predicted", total)
    return found


def draw_predicted(data: pd.DataFrame) -> Any:
    """Draw ``predicted_data``: the sum of single-layer divergences against the engine's own."""
    title = "Predicted and measured divergence of whole engines"
    names = ["predicted", "predicted_low", "predicted_high", "divergence", "divergence_low",
             "divergence_high"]  # fmt: skip
    values = data[names].to_numpy(dtype=float)
    if not (values > 0).any():
        return empty_figure(title, "No engine has both a prediction and a measurement.")
    floor = float(values[values > 0].min())
    data = data.assign(**{name: data[name].astype(float).clip(lower=floor) for name in names})
    ends = [floor, float(np.nanmax(values))]
    base = alt.Chart(data, width=430, height=330).encode(
        color=alt.Color("split:N", title=None, legend=alt.Legend(orient="top"),
                        scale=alt.Scale(domain=list(_SPLIT_WORDS.values()),
                                        range=["#0072b2", VERMILION])),
        tooltip=[*tips("engine:N", "split:N", "n:Q"),
                 *[alt.Tooltip(f"{n}:Q", format=".3g") for n in names]],
    )  # fmt: skip
    shape = alt.Shape("split:N", title=None, legend=alt.Legend(orient="top"),
                      scale=alt.Scale(domain=list(_SPLIT_WORDS.values())))  # fmt: skip
    scale = alt.Scale(type="log", nice=False, domain=[ends[0] * 0.8, ends[1] * 1.25])
    tick = alt.Axis(format=".0e", tickCount=5)
    across, up = "predicted: sum over layers (log)", "measured on the engine (log)"
    x = alt.X("predicted:Q", title=across, scale=scale, axis=tick)
    y = alt.Y("divergence:Q", title=up, scale=scale, axis=tick)
    low = alt.Y("divergence_low:Q", title=up, scale=scale, axis=tick)
    diagonal = alt.Chart(pd.DataFrame({"x": ends, "y": ends})).mark_line(
        color=GREY, strokeDash=[5, 4], strokeWidth=1.2
    )
    left = alt.X("predicted_low:Q", title=across, scale=scale, axis=tick)
    chart = alt.layer(
        diagonal.encode(x=alt.X("x:Q", scale=scale), y=alt.Y("y:Q", scale=scale)),
        base.mark_rule(opacity=0.6).encode(x=x, y=low, y2=alt.Y2("divergence_high")),
        base.mark_rule(opacity=0.6).encode(x=left, x2=alt.X2("predicted_high"), y=y),
        base.mark_point(filled=True, size=80, opacity=1).encode(x=x, y=y, shape=shape),
        *label_layers(base, x=x, y=y, text=alt.Text("engine:N")),
    )
    note = (
        "On the dashed line the sum of single-layer divergences tells the engine's own. Bars: "
        "95 % intervals. The sum orders proposals; it predicts no drop."
    )
    return finished(chart, titled(title, note))


def plan_formats_data(plan: Plan) -> pd.DataFrame:
    """Return one row a layer of the plan, with its place in the grid of blocks and parts."""
    rows = []
    for layer in plan.layers:
        block, part = split_block(layer.name)
        rows.append(
            {
                "layer": layer.name,
                "kind": str(layer.kind),
                "format": layer.format,
                "block": block,
                "part": part,
                "reason": layer.reason,
                "divergence": layer.divergence,
            }
        )
    return pd.DataFrame(
        rows, columns=["layer", "kind", "format", "block", "part", "reason", "divergence"]
    )


def draw_plan_formats(plan: Plan) -> Any:
    """Draw the format of every layer: parts of a block down, blocks across."""
    title = "The plan: which format each layer takes"
    data = plan_formats_data(plan)
    if data.empty:
        return empty_figure(title, "The plan has no layer.")
    formats = scale_for(data["format"], FORMAT_COLOURS)
    grid, single = data[data["block"] != ""], data[data["block"] == ""]
    charts = []
    if len(grid):
        charts.append(_plan_grid(grid, formats))
    if len(single):
        charts.append(_plan_grid(single.assign(block="layer"), formats))
    counts = data["format"].value_counts()
    note = ", ".join(f"{counts[name]} {name}" for name in formats.domain if name in counts)
    heading = titled(title, f"{len(data)} layers for {plan.backend}: {note}.")
    return finished(panels(charts, 2), heading)


def _plan_grid(data: pd.DataFrame, formats: alt.Scale) -> Any:
    blocks, parts = list(dict.fromkeys(data["block"])), list(dict.fromkeys(data["part"]))
    prefix = _shared_prefix(blocks)
    return (
        alt.Chart(
            data.assign(column=data["block"].str.removeprefix(prefix)),
            width=26 * len(blocks),
            height=17 * len(parts),
        )
        .mark_rect(stroke="white", strokeWidth=1.5)
        .encode(
            x=alt.X("column:N", sort=[b.removeprefix(prefix) for b in blocks],
                    title=f"{prefix}…" if prefix else None,
                    axis=alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False)),
            y=alt.Y("part:N", sort=parts, title=None, axis=alt.Axis(domain=False, ticks=False)),
            color=alt.Color("format:N", scale=formats, title="format",
                            legend=alt.Legend(orient="top")),
            tooltip=[*tips("layer:N", "kind:N", "format:N", "reason:N"),
                     alt.Tooltip("divergence:Q", format=".3g")],
        )
    )  # fmt: skip


def _shared_prefix(blocks: Sequence[str]) -> str:
    """Return what all blocks begin with up to a dot, or an empty string."""
    stems = {block.rpartition(".")[0] for block in blocks}
    stem = stems.pop() if len(stems) == 1 else ""
    return f"{stem}." if stem else ""
