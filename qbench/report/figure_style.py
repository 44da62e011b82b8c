"""What all figures share: colours, fonts, sizes, and how panels are put together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt
import pandas as pd

from qbench.formats import FORMATS
from qbench.report.wording import interval, number

#: Okabe and Ito's palette, which people with any colour vision can tell apart.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE, GREY = (
    "#1b1f24", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7",
    "#9aa1a9",
)  # fmt: skip

FORMAT_COLOURS = {
    "fp32": "#c9ced4", "fp16": SKY, "bf16": YELLOW, "int8": ORANGE, "int8_dynamic": VERMILION,
    "w8a16": GREEN, "w4a16": PURPLE, "w4a8": BLUE, "fp8": BLACK,
}  # fmt: skip
KIND_COLOURS = {
    "linear": BLUE, "embedding": GREEN, "conv": BLACK, "layernorm": ORANGE, "softmax": VERMILION,
    "attention_scores": PURPLE, "attention_context": "#8c5aa8", "kv": SKY,
    "activation": "#b8a200", "residual_add": GREY,
}  # fmt: skip
ROLE_COLOURS = {
    "plan": VERMILION, "front": BLUE, "uniform": "#5b6570", "random": PURPLE, "reference": BLACK,
}  # fmt: skip
ROLE_SHAPES = {
    "plan": "diamond", "front": "circle", "uniform": "square", "random": "triangle-up",
    "reference": "cross",
}  # fmt: skip
STAGE_COLOURS = {
    "queue": GREY, "preprocess": SKY, "formation": GREEN, "inference": BLUE,
    "postprocess": ORANGE,
}  # fmt: skip

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"
_ROW_PX = 17
# One object for all settings: each of Altair's configure methods would copy the whole chart.
_CONFIG = alt.Config(
    font=FONT,
    view=alt.ViewConfig(stroke="#d8dde2"),
    axis=alt.AxisConfig(
        labelFontSize=11, titleFontSize=11, titleFontWeight="normal", titleColor="#57606a",
        labelColor=BLACK, gridColor="#e6e9ec", domainColor="#9aa1a9", tickColor="#9aa1a9",
        labelLimit=300,
    ),
    legend=alt.LegendConfig(labelFontSize=11, titleFontSize=11, symbolSize=90, labelLimit=240),
)  # fmt: skip


def rows_high(count: int, row_px: int = _ROW_PX) -> int:
    """Return the height in pixels of a panel with ``count`` rows."""
    return max(1, count) * row_px


def titled(text: str, *notes: str) -> alt.TitleParams:
    """Return a title with its conditions in lines below it."""
    return alt.TitleParams(
        text=text,
        subtitle=[note for note in notes if note],
        anchor="start",
        fontSize=15,
        fontWeight=600,
        subtitleFontSize=11.5,
        subtitleColor="#57606a",
        subtitleLineHeight=15,
        offset=12,
    )


def panel_title(text: str) -> alt.TitleParams:
    """Return the title of one panel among several."""
    return alt.TitleParams(text=text, anchor="start", fontSize=12, fontWeight=600, offset=6)


def finished(chart: Any, title: alt.TitleParams) -> Any:
    """Return a chart with its title and the look that all figures share."""
    return chart.properties(title=title, background="white", padding=10, config=_CONFIG)


def panels(charts: Sequence[Any], columns: int) -> Any:
    """Return panels in rows of ``columns``."""
    return alt.concat(*charts, columns=columns, spacing=26)


def balanced(charts: Sequence[Any], heights: Sequence[int]) -> Any:
    """Return panels of unlike heights in two columns of about equal height."""
    columns: tuple[list[Any], list[Any]] = ([], [])
    filled = [0, 0]
    for chart, height in zip(charts, heights, strict=True):
        shorter = int(filled[1] < filled[0])
        columns[shorter].append(chart)
        filled[shorter] += height + 70
    stacks = [alt.vconcat(*column, spacing=22) for column in columns if column]
    return alt.hconcat(*stacks, spacing=26)


def label_layers(base: Any, **encoding: Any) -> list[Any]:
    """Return text marks beside points, with a white rim that keeps them readable over lines."""
    text = {"align": "left", "dx": 8, "dy": -7, "fontSize": 10.5}
    rim = base.mark_text(**text, stroke="white", strokeWidth=3, strokeJoin="round")
    return [rim.encode(**encoding), base.mark_text(**text).encode(**encoding)]


def scale_for(values: Iterable[str], colours: dict[str, str]) -> alt.Scale:
    """Return the colour scale of the names in ``values``, in the order of ``colours``."""
    present = set(values)
    known = [name for name in colours if name in present]
    rest = sorted(present - set(known))
    return alt.Scale(
        domain=known + rest, range=[colours[name] for name in known] + [GREY] * len(rest)
    )


def format_order(names: Iterable[str]) -> list[str]:
    """Return format names in the order of ``FORMATS``; unknown ones follow."""
    present = set(names)
    return [n for n in FORMATS if n in present] + sorted(present - set(FORMATS))


def interval_texts(frame: pd.DataFrame, name: str) -> list[str]:
    """Return the column ``name`` with its interval as text, a dash where it is missing."""
    columns = [frame[key].astype(float).tolist() for key in (name, f"{name}_low", f"{name}_high")]
    return [
        "–" if math.isnan(value) else f"{number(value)} {interval(low, high)}"
        for value, low, high in zip(*columns, strict=True)
    ]


def tips(*fields: str) -> list[alt.Tooltip]:
    """Return plain tooltips of fields such as ``layer:N``.

    NOTE: Altair also takes the bare strings, and is several times slower with them.
    """
    return [alt.Tooltip(field) for field in fields]


def empty_figure(title: str, reason: str) -> Any:
    """Return a figure that says why there is nothing to draw."""
    data = pd.DataFrame({"text": [reason]})
    mark = alt.Chart(data, width=640, height=60).mark_text(fontSize=13, color="#57606a")
    return finished(mark.encode(text=alt.Text("text:N")), titled(title))
