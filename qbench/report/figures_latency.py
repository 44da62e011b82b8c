"""Figures of a benchmark: where the time of a request goes, and how latencies are spread."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from qbench.records import BenchRun
from qbench.report.figure_style import (
    BLACK,
    BLUE,
    FORMAT_COLOURS,
    PURPLE,
    STAGE_COLOURS,
    VERMILION,
    empty_figure,
    finished,
    tips,
    titled,
)
from qbench.report.wording import PLAN, REFERENCE

#: Points of one engine's curve.
CURVE_POINTS = 200
_ENGINE_COLOURS = {
    **FORMAT_COLOURS, "reference": BLACK, "fp32": BLACK, "plan": VERMILION, "random": "#8c5aa8",
    "int8_dynamic": BLUE, "w4a16": PURPLE,
}  # fmt: skip
#: Conditions that a reader needs beside a latency, and how they are said.
_CONDITIONS = {
    "clients": "{} clients",
    "lanes": "{} lanes",
    "threads_per_lane": "{} thread(s) a lane",
    "token_budget": "batches up to {} padded tokens",
    "max_wait_ms": "waiting {:g} ms at most",
}
_SOLID = [1, 0]
_DASHES = [[7, 3], [2, 2], [8, 2, 2, 2], [4, 4], [12, 3]]


def stages_data(bench: BenchRun) -> pd.DataFrame:
    """Return mean milliseconds of each engine and stage, stages in the order of a request."""
    order = list(STAGE_COLOURS)
    rows = [
        {
            "engine": summary.engine,
            "stage": stage,
            "place": order.index(stage) if stage in order else len(order),
            "mean_ms": milliseconds,
            "requests": summary.requests,
        }
        for summary in bench.summaries
        for stage, milliseconds in summary.stages_ms.items()
    ]
    frame = pd.DataFrame(rows, columns=["engine", "stage", "place", "mean_ms", "requests"])
    return frame.sort_values("place", kind="stable").reset_index(drop=True)


def draw_stages(bench: BenchRun) -> Any:
    """Draw where the mean time of a request goes, one stacked bar an engine."""
    title = "Where the time of a request goes"
    data = stages_data(bench)
    if data.empty:
        return empty_figure(title, "No request was measured.")
    engines = [summary.engine for summary in bench.summaries]
    order = list(dict.fromkeys(data["stage"]))
    chart = (
        alt.Chart(data, width=560, height=26 * len(engines))
        .mark_bar(height=17)
        .encode(
            y=alt.Y("engine:N", sort=engines, title=None),
            x=alt.X("mean_ms:Q", title="mean time, ms"),
            color=alt.Color("stage:N", title="stage", scale=_stage_scale(order), sort=order,
                            legend=alt.Legend(orient="top")),
            order=alt.Order("place:Q"),
            tooltip=[*tips("engine:N", "stage:N", "requests:Q"),
                     alt.Tooltip("mean_ms:Q", format=".3g")],
        )
    )  # fmt: skip
    return finished(chart, titled(title, conditions_words(bench)))


def _stage_scale(stages: list[str]) -> alt.Scale:
    return alt.Scale(domain=stages, range=[STAGE_COLOURS.get(s, BLACK) for s in stages])


def distribution_data(bench: BenchRun) -> pd.DataFrame:
    """Return the share of requests that were answered within a latency, a curve an engine.

    Warm-up requests are left out. Curves have at most ``CURVE_POINTS`` points, at even shares.
    """
    parts = []
    for summary in bench.summaries:
        values = [
            item.total_ms
            for item in bench.latencies
            if item.engine == summary.engine and not item.warmup
        ]
        if not values:
            continue
        shares = np.linspace(0.0, 1.0, min(CURVE_POINTS, len(values)))
        parts.append(
            pd.DataFrame(
                {
                    "engine": summary.engine,
                    "share": shares,
                    "total_ms": np.quantile(values, shares),
                    "requests": len(values),
                }
            )
        )
    columns = ["engine", "share", "total_ms", "requests"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def draw_distribution(bench: BenchRun) -> Any:
    """Draw the cumulative distribution of latency, one line an engine."""
    title = "How latency is spread"
    data = distribution_data(bench)
    if data.empty:
        return empty_figure(title, "No request was measured.")
    engines = list(dict.fromkeys(data["engine"]))
    spare = [c for c in FORMAT_COLOURS.values() if c not in _ENGINE_COLOURS.values()] or [BLACK]
    colours = [_ENGINE_COLOURS.get(e, spare[i % len(spare)]) for i, e in enumerate(engines)]
    dashes = [_SOLID if e in (PLAN, REFERENCE) else _DASHES[i % len(_DASHES)]
              for i, e in enumerate(engines)]  # fmt: skip
    lines = (
        alt.Chart(data, width=560, height=300)
        .mark_line(strokeWidth=2, clip=True)
        .encode(
            x=alt.X("total_ms:Q", title="latency from sending to answer, ms (log)",
                    scale=alt.Scale(type="log", nice=False), axis=alt.Axis(format="~g")),
            y=alt.Y("share:Q", title="share of requests within", axis=alt.Axis(format="%")),
            color=alt.Color("engine:N", title="engine",
                            scale=alt.Scale(domain=engines, range=colours)),
            strokeDash=alt.StrokeDash("engine:N", title="engine",
                                      scale=alt.Scale(domain=engines, range=dashes)),
            tooltip=[*tips("engine:N"), alt.Tooltip("share:Q", format=".1%"),
                     alt.Tooltip("total_ms:Q", format=".4g"), *tips("requests:Q")],
        )
    )  # fmt: skip
    marks = pd.DataFrame({"share": [0.5, 0.95, 0.99], "name": ["P50", "P95", "P99"]})
    rules = (
        alt.Chart(marks).mark_rule(color="#b6bdc4", strokeDash=[3, 3]).encode(y=alt.Y("share:Q"))
    )
    names = (
        alt.Chart(marks)
        .mark_text(align="left", dx=4, dy=-6, fontSize=10, color="#57606a")
        .encode(x=alt.value(0), y=alt.Y("share:Q"), text=alt.Text("name:N"))
    )
    return finished(alt.layer(rules, names, lines), titled(title, conditions_words(bench)))


def conditions_words(bench: BenchRun) -> str:
    """Return how a benchmark was run, from its conditions, in one line."""
    counts = [summary.requests for summary in bench.summaries]
    words = [f"{min(counts):,} requests an engine or more"] if counts else []
    known = bench.conditions
    words += [text.format(known[key]) for key, text in _CONDITIONS.items() if known.get(key)]
    return "; ".join([*words, "engines interleaved in one run"])
