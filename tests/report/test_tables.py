from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qbench.records import Layers, Status
from qbench.report.figures_sweep import heat_map_data
from qbench.report.presentation import shown_sensitive, shown_sweep
from qbench.report.ranks import half_agreement, rank_intervals, ranks_by_divergence
from qbench.report.run_records import RunRecords
from qbench.report.samples import is_partial
from qbench.report.tables import (
    LAYER_COLUMNS,
    RANGE_COLUMNS,
    SWEEP_COLUMNS,
    layers_table,
    most_sensitive,
    plan_counts,
    plan_table,
    ranges_table,
    ranking_format,
    sweep_table,
    unlayered_table,
)
from qbench.report.uncovered import uncovered_words
from qbench.testing.runs import ODD_NAME


def test_layers_table_keeps_topological_order(records: RunRecords) -> None:
    frame = layers_table(records.layers)
    assert tuple(frame.columns) == LAYER_COLUMNS
    assert frame["layer"].tolist() == [layer.name for layer in records.layers.layers]
    query = frame.set_index("layer").loc["encoder.layer.0.attention.self.query"]
    assert (query["block"], query["part"]) == ("encoder.layer.0", "attention.self.query")
    assert query["weight_shape"] == "384×384"


def test_unlayered_table_counts_by_reason(records: RunRecords) -> None:
    frame = unlayered_table(records.layers)
    assert frame["nodes"].tolist() == [9, 1]
    assert frame["operators"].tolist() == ["9 Reshape", "1 ReduceSum"]


def test_ranges_table_finds_outlier_ratio(records: RunRecords) -> None:
    frame = ranges_table(records.ranges, records.kinds)
    first = records.ranges[0]
    channels = np.array(first.channel_absmax)
    assert frame["outlier_ratio"][0] == pytest.approx(first.absmax / np.median(channels))
    assert frame["p99.9"][0] == first.percentiles["99.9"]
    assert frame["implicit"].tolist().count(True) == 1
    assert np.isnan(frame["outlier_ratio"].iloc[-1]), "it has no channels"


def test_sweep_table_has_interval_and_rank_of_each_cell(records: RunRecords) -> None:
    frame = sweep_table(records.sweep)
    assert tuple(frame.columns) == SWEEP_COLUMNS
    assert len(frame) == len(records.sweep)
    for name, group in frame[frame["status"] == "ok"].groupby("format"):
        by_rank = group.sort_values("rank")
        assert by_rank["rank"].tolist() == list(range(1, len(group) + 1)), name
        assert by_rank["divergence"].is_monotonic_decreasing
        assert (group["rank_low"] <= group["rank"]).all()
        assert (group["rank"] <= group["rank_high"]).all()
    without = frame[frame["status"] != "ok"]
    assert without[["divergence", "drop", "rank"]].isna().all().all()
    assert (without["reason"] != "").all()


def test_sweep_table_says_what_is_noise(records: RunRecords) -> None:
    frame = sweep_table(records.sweep)
    ok = frame[frame["status"] == "ok"]
    holds_zero = (ok["drop_low"] <= 0) & (ok["drop_high"] >= 0)
    assert holds_zero.any() and not holds_zero.all()
    assert (ok["resolvable"].astype(bool) == ~holds_zero).all()


def test_ranks_without_samples_have_no_interval(records: RunRecords) -> None:
    bare = [replace(cell, samples={}) for cell in records.sweep]
    frame = sweep_table(bare)
    assert frame["rank"].notna().any()
    assert frame["rank_low"].isna().all()
    assert half_agreement(bare) == {}


def test_rank_interval_is_wide_only_where_samples_disagree() -> None:
    rng = np.random.default_rng(1)
    samples = np.stack([rng.normal(9, 1, 80), rng.normal(3, 2, 80), rng.normal(3.05, 2, 80)])
    low, high = rank_intervals(samples)
    assert ranks_by_divergence(samples.mean(axis=1))[0] == 1
    assert (low[0], high[0]) == (1, 1)
    assert (low[1], high[1]) == (2, 3)


def test_half_agreement_is_high_for_real_differences(records: RunRecords) -> None:
    agreement = half_agreement(records.sweep)
    assert list(agreement)[0] == "fp16"
    assert 0.5 < agreement["fp16"].value <= 1


def test_empty_tables_keep_their_columns() -> None:
    assert tuple(layers_table(Layers((), ())).columns) == LAYER_COLUMNS
    assert tuple(ranges_table((), {}).columns) == RANGE_COLUMNS
    assert tuple(sweep_table(()).columns) == SWEEP_COLUMNS


def test_most_sensitive_ranks_by_the_quantized_format(records: RunRecords) -> None:
    assert ranking_format(records.sweep) == "int8"
    frame = most_sensitive(records.sweep, top=4)
    assert frame.attrs["format"] == "int8"
    assert frame["rank"].tolist() == [1, 2, 3, 4]
    assert {"fp16", "w4a16"} <= set(frame.columns)
    cell = next(c for c in records.sweep if c.layer == frame["layer"][0] and c.format == "fp16")
    assert cell.divergence is not None
    assert frame["fp16"][0] == cell.divergence.value


def test_ranking_format_without_quantized_cells(records: RunRecords) -> None:
    half = [cell for cell in records.sweep if cell.format == "fp16"]
    assert ranking_format(half) == "fp16"
    assert ranking_format([cell for cell in half if cell.status is not Status.OK]) is None


def test_plan_tables(records: RunRecords) -> None:
    assert records.plan is not None
    frame = plan_table(records.plan)
    assert ODD_NAME in frame["layer"].tolist()
    counts = plan_counts(records.plan).set_index("kind")
    assert counts.to_numpy().sum() == len(records.plan.layers)
    assert counts.index[0] == "linear"


def raced(records: RunRecords) -> RunRecords:
    """Return the records as a race leaves them: every other cell stopped on 4 to 16 samples."""
    cells = []
    for index, cell in enumerate(records.sweep):
        if cell.status is Status.OK and index % 2:
            n = 4 if index % 4 == 1 else 16
            cell = replace(cell, n=n, effort=f"stopped after {n} of 24 samples: harmless")
            cell = replace(cell, drops={}, p_values={}, samples={"sub_pool_1": (0.1,) * 4})
        cells.append(cell)
    left = [["encoder.layer.0.output.dense", "w4a16"]]
    facts = {**records.facts, "sweep": {"effort": "some", "not_reached": left}}
    return replace(records, sweep=tuple(cells), facts=facts)


def test_what_a_part_of_the_samples_gave_is_never_told_as_of_all(records: RunRecords) -> None:
    run = raced(records)
    shown = shown_sensitive(run.sweep, top=40)
    part = {c.layer for c in run.sweep if c.format == "int8" and is_partial(c)}
    assert "≈ is estimated from a part of the samples (n = 4 to 16)" in shown.caption
    assert "n = 24 sweep samples" in shown.caption
    for rank, layer, divergence, drop, *_ in shown.rows:
        assert divergence.startswith("≈") == (layer in part)
        assert (drop == "–") == (layer in part)
        assert rank.isdigit()
    only = shown_sensitive([c for c in run.sweep if is_partial(c)], "int8")
    assert "sweep samples" not in only.caption
    rows = {(row[0], row[2]): row for row in shown_sweep(run.sweep).rows}
    for cell in filter(is_partial, run.sweep):
        row = rows[cell.layer, cell.format]
        assert row[4].startswith("≈") and cell.effort in row and row[6] == "–"
    frame = sweep_table(run.sweep)
    assert frame.loc[frame["effort"] != "full", "drop"].isna().all()
    data = heat_map_data(run.sweep)
    assert (data.loc[data["effort"] != "full", "sign"] == "≈").all()


def test_agreement_of_halves_is_of_cells_measured_on_all_samples(records: RunRecords) -> None:
    run = raced(records)
    whole = [c for c in run.sweep if not is_partial(c)]
    assert half_agreement(run.sweep) == half_agreement(whole) != {}


def test_what_a_sweep_left_out_is_said(records: RunRecords) -> None:
    words = uncovered_words(raced(records))
    assert any("stopped on a part of the samples (n = 4 to 16)" in w for w in words)
    assert any("1 cells were not reached" in w and "0.output.dense in w4a16" in w for w in words)
    assert not any("not reached" in w for w in uncovered_words(records))


def test_a_run_without_any_drop_calls_none_beyond_noise(records: RunRecords) -> None:
    bare = [replace(cell, drops={}, p_values={}) for cell in records.sweep]
    assert set(heat_map_data(bare)["resolved_text"]) == {"no drop measured"}
