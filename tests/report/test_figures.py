from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qbench.records import Estimate
from qbench.report.comparison import front_table
from qbench.report.figures import (
    distribution_data,
    draw_front,
    draw_heat_map,
    draw_predicted,
    draw_ranges,
    draw_ranking,
    figures_of,
    front_data,
    headroom_data,
    heat_map_data,
    outlier_data,
    plan_formats_data,
    predicted_data,
    ranges_data,
    ranking_data,
    save_figures,
    spec_of,
    stages_data,
)
from qbench.report.figures_latency import CURVE_POINTS, conditions_words
from qbench.report.run_records import RunRecords
from qbench.testing.runs import ODD_NAME, made_layers, made_ranges, made_sweep


def test_heat_map_has_every_cell_in_layer_order(records: RunRecords) -> None:
    data = heat_map_data(records.sweep)
    assert len(data) == len(records.sweep)
    assert data["layer"].drop_duplicates().tolist() == [x.name for x in records.layers.layers]
    assert data["panel"].drop_duplicates().tolist() == ["outside of blocks", "encoder.layer.0"]
    query = data[data["label"] == "attention.self.query"]
    assert query["layer"].unique().tolist() == ["encoder.layer.0.attention.self.query"]


def test_heat_map_marks_noise_and_statuses(records: RunRecords) -> None:
    data = heat_map_data(records.sweep)
    ok = data[data["status"] == "ok"]
    assert ((ok["sign"] == "~") == (ok["drop_low"].le(0) & ok["drop_high"].ge(0))).all()
    signs = data.drop_duplicates("status").set_index("status")["sign"]
    assert signs["invalid"] == "×" and signs["failed"] == "!" and signs["not_yet"] == "·"
    noise = ok[ok["sign"] == "~"]["resolved_text"]
    assert (noise == "not resolvable: the interval holds 0").all()


def test_heat_map_shows_a_divergence_of_zero(records: RunRecords) -> None:
    first = next(i for i, cell in enumerate(records.sweep) if cell.divergence is not None)
    cells = list(records.sweep)
    cells[first] = replace(cells[first], divergence=Estimate(0.0, 0.0, 0.0, 24))
    data = heat_map_data(cells)
    assert data["divergence"][first] == 0
    assert data["shown"][first] == data["shown"].min() > 0
    assert data["divergence_text"][first] == "0 [0, 0]"


def test_heat_map_cuts_long_lists_in_parts() -> None:
    layers = made_layers(0)
    flat = [
        replace(cell, layer=f"node_{i}") for i in range(50) for cell in made_sweep(layers, n=4)[-5:]
    ]
    panels = heat_map_data(flat).groupby("panel", sort=False)["layer"].nunique()
    assert panels.to_dict() == {"outside of blocks (1 of 2)": 40, "outside of blocks (2 of 2)": 10}


def test_ranking_has_the_top_of_each_format(records: RunRecords) -> None:
    data = ranking_data(records.sweep, top=3)
    assert data["format"].drop_duplicates().tolist() == [
        "fp16", "int8", "int8_dynamic", "w8a16", "w4a16",
    ]  # fmt: skip
    assert data.groupby("format")["rank"].max().max() == 3


def test_ranges_are_bounded_by_percentiles_and_extremes(records: RunRecords) -> None:
    data = ranges_data(records.ranges, records.kinds)
    assert not data["implicit"].any()
    assert (data["band_low"] >= data["min"]).all() and (data["band_high"] <= data["max"]).all()
    assert (data["core_high"] <= data["band_high"]).all()
    assert data["label"].is_unique


def test_ranges_of_a_layer_with_two_tensors_have_two_labels(records: RunRecords) -> None:
    twice = (records.ranges[0], replace(records.ranges[0], tensor="other"))
    labels = ranges_data(twice, records.kinds)["label"].tolist()
    assert len(set(labels)) == 2
    assert labels[1].endswith("← other")


def test_outliers_are_channels_against_the_median(records: RunRecords) -> None:
    data = outlier_data(records.ranges, records.kinds, tensors=3, channels=2)
    assert data.groupby("tensor").size().tolist() == [2, 2, 2]
    worst = data[data["place"] == 1]
    assert worst["ratio"].is_monotonic_decreasing
    found = next(r for r in records.ranges if r.tensor == worst["tensor"].iloc[0])
    channel = int(worst["channel"].iloc[0])
    assert found.channel_absmax[channel] == max(found.channel_absmax)


def test_headroom_finds_the_overflow(records: RunRecords) -> None:
    data = headroom_data(records.ranges, records.kinds, tensors=5)
    assert data["overflows"].tolist() == [True, False, False, False, False]
    assert data["what"][0] == "inside an operator"


def test_front_has_both_splits_and_costs(records: RunRecords) -> None:
    data = front_data(
        records.front, records.deciding, records.judgements, records.engines, records.bench
    )
    found = data.groupby(["split", "cost"])["engine"].nunique().to_dict()
    assert found == {("sweep", "size"): 6, ("sweep", "time"): 6, ("verification", "size"): 7,
                     ("verification", "latency"): 7}  # fmt: skip
    plan = data[(data["role"] == "plan") & (data["cost"] == "size")].set_index("engine")
    assert plan["cost_value"].to_dict() == {"front-5": 40.0, "plan": 31.2}


def test_front_without_bench_or_judgements(records: RunRecords) -> None:
    only = front_data((), (), records.judgements, records.engines, None)
    assert set(only["cost"]) == {"size"}
    assert front_data((), (), (), (), None).empty


def test_predicted_is_beside_measured(records: RunRecords) -> None:
    front = front_table(records.front, records.deciding, records.engines, records.plan)
    data = predicted_data(front, records.judgements, records.sweep)
    plan = data[data["role"] == "plan"].set_index("engine")
    assert plan["predicted"].to_dict() == {"front-5": 0.004, "plan": 0.004}
    held_out = next(j for j in records.judgements if j.engine == "plan")
    assert plan.loc["plan", "divergence"] == held_out.divergence.value
    assert plan.loc["plan", "split"] == "verification split (held out)"


def test_a_uniform_engine_is_predicted_by_the_sum_of_its_cells(records: RunRecords) -> None:
    front = front_table((), (), ())
    data = predicted_data(front, records.judgements, records.sweep).set_index("engine")
    assert sorted(data.index) == ["int8", "int8_dynamic", "w4a16", "w8a16"]
    cells = [c.divergence.value for c in records.sweep if c.format == "int8" and c.divergence]
    assert data.loc["int8", "predicted"] == pytest.approx(sum(cells))


def test_plan_formats_have_a_place_in_the_grid(records: RunRecords) -> None:
    assert records.plan is not None
    data = plan_formats_data(records.plan)
    assert len(data) == len(records.plan.layers)
    assert data.set_index("layer")["block"][ODD_NAME] == ""


def test_stages_are_in_the_order_of_a_request(records: RunRecords) -> None:
    assert records.bench is not None
    data = stages_data(records.bench)
    assert data["stage"].drop_duplicates().tolist() == [
        "queue", "preprocess", "formation", "inference", "postprocess",
    ]  # fmt: skip
    summary = records.bench.summaries[0]
    own = data[data["engine"] == summary.engine]
    assert own["mean_ms"].sum() == pytest.approx(sum(summary.stages_ms.values()))


def test_distribution_leaves_warm_up_out_and_stays_small(records: RunRecords) -> None:
    assert records.bench is not None
    data = distribution_data(records.bench)
    own = data[data["engine"] == "plan"]
    kept = [x.total_ms for x in records.bench.latencies if x.engine == "plan" and not x.warmup]
    assert own["requests"].unique().tolist() == [len(kept)]
    assert own["total_ms"].iloc[-1] == max(kept) and own["total_ms"].iloc[0] == min(kept)
    many = tuple(records.bench.latencies[-7:]) * 300
    assert len(distribution_data(replace(records.bench, latencies=many))) == 7 * CURVE_POINTS


def test_conditions_are_said(records: RunRecords) -> None:
    assert records.bench is not None
    assert "16 clients" in conditions_words(records.bench)


def test_every_figure_has_a_title_and_its_conditions(specs: dict[str, dict[str, Any]]) -> None:
    for name, spec in specs.items():
        title = spec["title"]
        assert title["text"], name
        assert title["subtitle"], name


def test_a_run_without_records_has_no_figure() -> None:
    assert figures_of(RunRecords("empty")) == {}


def test_figures_say_why_they_are_empty(records: RunRecords) -> None:
    none_ok = [cell for cell in records.sweep if cell.status != "ok"]
    empty = front_table((), (), ())
    for chart in (
        draw_heat_map(none_ok),
        draw_ranking(none_ok),
        draw_ranges((), {}),
        draw_front(front_data((), (), (), ())),
        draw_predicted(predicted_data(empty, ())),
    ):
        assert spec_of(chart)["mark"]["type"] == "text"


def test_figures_are_saved_without_a_browser(records: RunRecords, tmp_path: Path) -> None:
    small = RunRecords("small", plan=records.plan, bench=records.bench)
    written = save_figures(small, tmp_path / "figures")
    names = {path.name for path in written}
    assert {"plan_formats.png", "plan_formats.svg", "stages.png", "distribution.svg"} <= names
    for path in written:
        start = path.read_bytes()[:8]
        assert start.startswith(b"\x89PNG" if path.suffix == ".png" else b"<svg")
    assert re.search(r"<b>|</script", (tmp_path / "figures/plan_formats.svg").read_text()) is None


def test_constant_ranges_can_be_drawn() -> None:
    layers = made_layers(0)
    flat = tuple(
        replace(r, min=0.0, max=0.0, absmax=0.0, percentiles={}, fp16_headroom=np.inf,
                channel_absmax=(0.0,) * 4)
        for r in made_ranges(layers)
    )  # fmt: skip
    figures = figures_of(RunRecords("flat", layers=layers, ranges=flat))
    assert set(figures) == {"ranges", "outliers", "headroom"}
    for figure in figures.values():
        spec_of(figure.chart)
