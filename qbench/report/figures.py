"""Every figure of a run: for each a data function (a DataFrame) and a drawing function (a chart).

``figures_of`` draws those that a run has data for; the rest of a run's story is in ``page``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

from qbench.report.comparison import front_table
from qbench.report.figures_engines import (
    draw_front,
    draw_plan_formats,
    draw_predicted,
    front_data,
    plan_formats_data,
    predicted_data,
)
from qbench.report.figures_latency import (
    distribution_data,
    draw_distribution,
    draw_stages,
    stages_data,
)
from qbench.report.figures_ranges import (
    draw_headroom,
    draw_outliers,
    draw_ranges,
    headroom_data,
    outlier_data,
    ranges_data,
)
from qbench.report.figures_sweep import draw_heat_map, draw_ranking, heat_map_data, ranking_data
from qbench.report.figures_trust import draw_views, views_data
from qbench.report.run_records import RunRecords
from qbench.report.trust_tables import floor_value

__all__ = [
    # what a layer does
    "heat_map_data", "draw_heat_map", "ranking_data", "draw_ranking",
    "views_data", "draw_views",
    "ranges_data", "draw_ranges", "outlier_data", "draw_outliers", "headroom_data",
    "draw_headroom",
    # what an engine does
    "front_data", "draw_front", "predicted_data", "draw_predicted", "plan_formats_data",
    "draw_plan_formats", "stages_data", "draw_stages", "distribution_data", "draw_distribution",
    # all of a run
    "Figure", "figures_of", "save_figures", "spec_of",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawn figure.

    Attributes:
        name: Its file name without an ending, and its anchor on the page.
        chart: The Altair chart.
    """

    name: str
    chart: Any


def figures_of(run: RunRecords) -> dict[str, Figure]:
    """Return the figures that the run has data for, by name."""
    kinds = run.kinds
    bench, plan = run.bench, run.plan
    drawn: dict[str, Callable[[], Any]] = {}
    if run.sweep:
        floor = floor_value(run.noise)
        drawn["heat_map"] = lambda: draw_heat_map(run.sweep, floor=floor)
        drawn["ranking"] = lambda: draw_ranking(run.sweep, noise_floor=floor)
    if (restored := run.restored) is not None:
        drawn["views"] = lambda: draw_views(restored)
    if run.ranges:
        drawn["ranges"] = lambda: draw_ranges(run.ranges, kinds)
        drawn["outliers"] = lambda: draw_outliers(run.ranges, kinds)
        drawn["headroom"] = lambda: draw_headroom(run.ranges, kinds)
    if plan is not None:
        drawn["plan_formats"] = lambda: draw_plan_formats(plan)
    if run.deciding or run.judgements:
        drawn["front"] = lambda: draw_front(
            front_data(run.front, run.deciding, run.judgements, run.engines, bench, plan)
        )
    if run.front:
        table = front_table(run.front, run.deciding, run.engines, plan)
        drawn["predicted"] = lambda: draw_predicted(
            predicted_data(table, run.judgements, run.sweep)
        )
    if bench is not None:
        drawn["stages"] = lambda: draw_stages(bench)
        drawn["distribution"] = lambda: draw_distribution(bench)
    return {name: Figure(name, draw()) for name, draw in drawn.items()}


def spec_of(chart: Any) -> dict[str, Any]:
    """Return a chart as a Vega-Lite specification that holds its own data."""
    with alt.data_transformers.enable("default", max_rows=None):
        spec: dict[str, Any] = chart.to_dict()
    return spec


def save_figures(run: RunRecords, folder: Path) -> tuple[Path, ...]:
    """Write every figure as PNG (two pixels a point) and SVG; no browser is needed.

    Returns:
        The files written.

    Raises:
        OSError: If the folder cannot be written.
    """
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    version = vegalite_version()
    written = []
    for figure in figures_of(run).values():
        spec = spec_of(figure.chart)
        png, svg = folder / f"{figure.name}.png", folder / f"{figure.name}.svg"
        png.write_bytes(vl_convert.vegalite_to_png(spec, vl_version=version, scale=2))
        svg.write_text(vl_convert.vegalite_to_svg(spec, vl_version=version), encoding="utf-8")
        written += [png, svg]
    return tuple(written)


def vegalite_version() -> str:
    """Return the Vega-Lite version to draw with: Altair's, or the next newer one there is."""
    import vl_convert

    wanted = tuple(int(part) for part in alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    have = sorted(
        tuple(int(part) for part in version.split("."))
        for version in vl_convert.get_vegalite_versions()
    )
    fitting = [version for version in have if version >= wanted] or have
    return ".".join(map(str, fitting[0]))
