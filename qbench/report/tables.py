"""Tables of what a run learned about its layers: DataFrames from records, one row a thing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd

from qbench.formats import FORMATS
from qbench.records import (
    Estimate,
    Kind,
    Layers,
    Plan,
    RestoredView,
    Status,
    SweepRecord,
    TensorRange,
    Unlayered,
    to_dict,
)
from qbench.report.multiplicity import cell_p_values
from qbench.report.ranks import rank_intervals, ranks_by_divergence
from qbench.report.samples import cells_by_format, divergence_samples
from qbench.report.wording import split_block

#: Columns of each table, in their order; an empty table has them too.
LAYER_COLUMNS = (
    "layer", "kind", "block", "part", "nodes", "uses", "weight", "weight_shape", "weight_bytes",
    "parameters", "edges", "tie",
)  # fmt: skip
SWEEP_COLUMNS = (
    "layer", "kind", "format", "status", "rank", "rank_low", "rank_high",
    "divergence", "divergence_low", "divergence_high", "metric", "drop", "drop_low", "drop_high",
    "resolvable", "p", "p_holm", "p_bh", "interaction", "interaction_low", "interaction_high", "n",
    "effort",
    "flip_rate", "sqnr_db", "cosine", "latency_delta_ms",
    "latency_delta_low_ms", "latency_delta_high_ms", "weight_bytes", "backend", "executed_on",
    "emulated", "reason", "remedy", "wall_s",
)  # fmt: skip
RANGE_COLUMNS = (
    "layer", "kind", "tensor", "implicit", "count", "min", "max", "absmax", "mean", "std",
    "kurtosis", "p99", "p99.9", "p99.99", "p99.999", "channels", "channel_median",
    "outlier_ratio", "fp16_headroom", "non_finite",
)  # fmt: skip
PLAN_COLUMNS = ("layer", "kind", "format", "divergence", "reason", "clips", "alternatives")


def layers_table(layers: Layers) -> pd.DataFrame:
    """Return one row a layer, in topological order."""
    return _frame((_layer_row(layer) for layer in layers.layers), LAYER_COLUMNS)


def _layer_row(layer: Any) -> dict[str, Any]:
    block, part = split_block(layer.name)
    return {
        "layer": layer.name,
        "kind": str(layer.kind),
        "block": block,
        "part": part,
        "nodes": len(layer.nodes),
        "uses": len(layer.occurrences),
        "weight": layer.weight,
        "weight_shape": "×".join(map(str, layer.weight_shape)),
        "weight_bytes": layer.weight_bytes,
        "parameters": layer.parameters,
        "edges": ", ".join(dict.fromkeys(edge.tensor for edge in layer.edges)),
        "tie": layer.tie,
    }


def unlayered_table(layers: Layers) -> pd.DataFrame:
    """Return one row for each reason why nodes are in no layer, with counts and operators."""
    columns = ("reason", "nodes", "operators")
    grouped: dict[str, list[Unlayered]] = {}
    for item in layers.unlayered:
        grouped.setdefault(item.reason, []).append(item)
    rows = (
        {"reason": reason, "nodes": len(items), "operators": _operator_counts(items)}
        for reason, items in sorted(grouped.items(), key=lambda pair: -len(pair[1]))
    )
    return _frame(rows, columns)


def _operator_counts(items: Sequence[Unlayered]) -> str:
    counts = pd.Series([item.op for item in items]).value_counts()
    return ", ".join(f"{count} {op}" for op, count in counts.items())


def ranges_table(ranges: Iterable[TensorRange], kinds: Mapping[str, str]) -> pd.DataFrame:
    """Return one row a tensor.

    Args:
        ranges: What calibration saw.
        kinds: Kind of each layer by its name.

    Returns:
        ``channel_median`` is the median over channels of their largest magnitude and
        ``outlier_ratio`` the largest magnitude divided by it.
    """
    return _frame((_range_row(item, kinds) for item in ranges), RANGE_COLUMNS)


def _range_row(item: TensorRange, kinds: Mapping[str, str]) -> dict[str, Any]:
    row = {f.name: getattr(item, f.name) for f in fields(item)}
    channels = np.asarray(row.pop("channel_absmax"), dtype=np.float64)
    percentiles = row.pop("percentiles")
    median = float(np.median(channels)) if channels.size else np.nan
    row |= {f"p{name}": value for name, value in percentiles.items()}
    row |= {
        "kind": kinds.get(item.layer, ""),
        "channels": channels.size,
        "channel_median": median,
        "outlier_ratio": item.absmax / median if median > 0 else np.nan,
    }
    return row


def sweep_table(
    records: Sequence[SweepRecord],
    metric: str | None = None,
    restored: RestoredView | None = None,
) -> pd.DataFrame:
    """Return one row a cell, with ranks by divergence within each format.

    Args:
        records: Cells of the sweep.
        metric: Metric whose drop is shown; the first of the records where ``None``.
        restored: The view with all layers low and one restored, for the column ``interaction``.

    Returns:
        ``n`` and ``effort`` say on how many samples a cell was measured: the divergence of one that
        a race stopped is an estimate from these, and it has no drop.
        ``p`` is the raw p-value of the drop; ``p_holm`` and ``p_bh`` are adjusted over all cells.
    """
    shown = metric or primary_metric(records)
    frame = _frame((_cell_row(record, shown) for record in records), SWEEP_COLUMNS)
    for name, values in cell_p_values(records, shown).items():
        frame[name] = values
    _write_interactions(frame, records, restored)
    for ranked in cells_by_format(records).values():
        _write_ranks(frame, records, ranked)
    return frame


def primary_metric(records: Iterable[SweepRecord]) -> str | None:
    """Return the first metric that a record has a drop for, or ``None``."""
    return next((name for record in records for name in record.drops), None)


def _cell_row(record: SweepRecord, metric: str | None) -> dict[str, Any]:
    drop = record.drops.get(metric) if metric else None
    row = {name: getattr(record, name) for name in ("layer", "format", "n", "effort",
           "flip_rate", "sqnr_db", "cosine", "weight_bytes", "backend", "executed_on", "emulated",
           "reason", "remedy", "wall_s")}  # fmt: skip
    row |= {"kind": str(record.kind), "status": str(record.status), "metric": metric or ""}
    row |= estimate_columns("divergence", record.divergence)
    row |= estimate_columns("drop", drop)
    row |= estimate_columns("latency_delta", record.latency_delta_ms, unit="_ms")
    row["resolvable"] = drop.resolvable if drop is not None else None
    return row


def estimate_columns(name: str, value: Estimate | None, unit: str = "") -> dict[str, float | None]:
    """Return the columns ``name``, ``name_low`` and ``name_high`` of one estimate."""
    keys = (f"{name}{unit}", f"{name}_low{unit}", f"{name}_high{unit}")
    numbers = (None,) * 3 if value is None else (value.value, value.low, value.high)
    return dict(zip(keys, numbers, strict=True))


def _write_interactions(
    frame: pd.DataFrame, records: Sequence[SweepRecord], view: RestoredView | None
) -> None:
    known = {(r.layer, r.format): r.interaction for r in view.records} if view else {}
    rows = [estimate_columns("interaction", known.get((r.layer, r.format))) for r in records]
    for name in estimate_columns("interaction", None):
        frame[name] = np.array([row[name] for row in rows], dtype=np.float64)


def _write_ranks(
    frame: pd.DataFrame, records: Sequence[SweepRecord], ranked: Sequence[int]
) -> None:
    means = np.array([_mean_divergence(records[index]) for index in ranked])
    frame.loc[ranked, "rank"] = ranks_by_divergence(means)
    samples = divergence_samples([records[index] for index in ranked])
    if samples is not None:
        frame.loc[ranked, "rank_low"], frame.loc[ranked, "rank_high"] = rank_intervals(samples)


def _mean_divergence(record: SweepRecord) -> float:
    return record.divergence.value if record.divergence is not None else np.nan


def measured_formats(records: Iterable[SweepRecord]) -> list[str]:
    """Return the formats that have at least one ``ok`` cell, in the order of ``FORMATS``."""
    ok = {record.format for record in records if record.status is Status.OK}
    return [name for name in FORMATS if name in ok] + sorted(ok - set(FORMATS))


def ranking_format(records: Iterable[SweepRecord]) -> str | None:
    """Return the format by which layers are ranked unless another is asked for.

    It is the format of quantized weights and activations with most ``ok`` cells (the first of
    ``FORMATS`` among equals), or the same among all formats where there is no such cell.
    """
    counts: dict[str, int] = {}
    for record in records:
        if record.status is Status.OK:
            counts[record.format] = counts.get(record.format, 0) + 1
    if not counts:
        return None
    names = [name for name in FORMATS if name in counts] + [n for n in counts if n not in FORMATS]
    quantized = [name for name in names if name in FORMATS and FORMATS[name].activation_bits < 16]
    return max(quantized or names, key=lambda name: counts[name])


def most_sensitive(
    records: Sequence[SweepRecord], format: str | None = None, top: int = 10
) -> pd.DataFrame:
    """Return the ``top`` layers by divergence in one format, with the other formats beside it.

    Returns:
        The columns of ``sweep_table`` that matter here, and one column with the divergence of
        each other measured format.
    """
    chosen = format or ranking_format(records)
    frame = sweep_table(records)
    columns = ["rank", "rank_low", "rank_high", "layer", "kind", "divergence", "divergence_low",
               "divergence_high", "drop", "drop_low", "drop_high", "resolvable", "n",
               "effort"]  # fmt: skip
    ranked = frame[(frame["format"] == chosen) & frame["rank"].notna()]
    best = ranked.sort_values("rank").head(top)[columns].reset_index(drop=True)
    for other in measured_formats(records):
        if other != chosen:
            values = frame[frame["format"] == other].set_index("layer")["divergence"]
            best[other] = best["layer"].map(values)
    best.attrs["format"] = chosen
    return best


def plan_table(plan: Plan) -> pd.DataFrame:
    """Return one row a layer of the plan, with its evidence and its reason."""
    rows = (
        {
            "layer": layer.name,
            "kind": str(layer.kind),
            "format": layer.format,
            "divergence": layer.divergence,
            "reason": layer.reason,
            "clips": to_dict(layer.clips),
            "alternatives": to_dict(layer.alternatives),
        }
        for layer in plan.layers
    )
    return _frame(rows, PLAN_COLUMNS)


def plan_counts(plan: Plan) -> pd.DataFrame:
    """Return the number of layers by kind (rows) and format (columns)."""
    frame = plan_table(plan)
    counts = pd.crosstab(frame["kind"], frame["format"])
    ordered = [name for name in FORMATS if name in counts.columns]
    kinds = [str(kind) for kind in Kind if kind in counts.index]
    return counts.loc[kinds, ordered].reset_index().rename_axis(columns=None)


def _frame(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Return rows as a frame with exactly ``columns``; what a row lacks is missing."""
    frame = pd.DataFrame(list(rows)).reindex(columns=list(columns))
    numeric = [c for c in columns if frame[c].map(_is_number_or_missing).all() and len(frame)]
    return frame.astype({name: float for name in numeric if frame[name].dtype == object})


def _is_number_or_missing(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
