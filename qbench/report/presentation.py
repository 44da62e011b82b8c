"""Tables as a person reads them: headings with units, numbers with their intervals, all text.

The page and the console write the same tables; this is what they share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from qbench.formats import FORMATS
from qbench.records import BenchRun, Plan, SweepRecord
from qbench.report.comparison import Comparison, bench_table, engines_table
from qbench.report.tables import (
    measured_formats,
    most_sensitive,
    plan_counts,
    plan_table,
    sweep_table,
)
from qbench.report.wording import (
    interval,
    megabytes,
    number,
    share,
)

DASH = "–"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a shown table.

    Attributes:
        heading: What it holds, with its unit.
        right: Whether it is aligned to the right, as numbers are.
        wrap: Whether its texts are long and may break.
        whole: Whether its texts never break on a console.
    """

    heading: str
    right: bool = True
    wrap: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Shown:
    """A table as text.

    Attributes:
        caption: What it shows, and under which conditions.
        columns: Its columns.
        rows: Its cells, row by row.
        marked: Indices of rows to set apart.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: tuple[int, ...] = ()


#: What stands for the verdict of an engine that lowers nothing, by its role.
_IDLE = {"reference": DASH, "plan": "nothing lowered"}

Writer = Callable[[Any], str]
_Spec = Sequence[tuple[Column, Writer]]


def show(frame: pd.DataFrame, spec: _Spec, caption: str = "", marked: Sequence[int] = ()) -> Shown:
    """Return a frame as text: ``spec`` has for each column how a row (a tuple) writes it."""
    rows = tuple(tuple(write(row) for _, write in spec) for row in frame.itertuples(index=False))
    return Shown(caption, tuple(column for column, _ in spec), rows, tuple(marked))


def text(name: str) -> Writer:
    """Return a writer of the attribute ``name`` as it is."""
    return lambda row: plain(getattr(row, name))


def num(name: str, digits: int = 3) -> Writer:
    """Return a writer of the number ``name``."""
    return lambda row: number(float_of(getattr(row, name)), digits)


def est(name: str, unit: str = "", digits: int = 2) -> Writer:
    """Return a writer of the number ``name`` with its interval."""

    def write(row: Any) -> str:
        value = float_of(getattr(row, f"{name}{unit}"))
        if value is None:
            return DASH
        low, high = (float_of(getattr(row, f"{name}_{end}{unit}")) for end in ("low", "high"))
        if low is None or high is None:
            return f"{value:.0f}" if name == "rank" else number(value, digits)
        if name == "rank":
            return f"{value:.0f} [{low:.0f}, {high:.0f}]"
        return f"{number(value, digits)} {interval(low, high)}"

    return write


def float_of(value: Any) -> float | None:
    """Return a number, or ``None`` where it is missing."""
    return None if value is None or pd.isna(value) else float(value)


def plain(value: Any) -> str:
    """Return a value or its counts as a table shows them."""
    if isinstance(value, Mapping):
        return ", ".join(f"{count} {name}" for name, count in value.items()) or DASH
    if value is None or value == "" or (isinstance(value, float) and pd.isna(value)):
        return DASH
    return f"{value:,.0f}" if isinstance(value, float) and value.is_integer() else str(value)


def shown_engines(rows: Sequence[Comparison]) -> Shown:
    """Return the engines side by side, the plan's row marked."""
    frame = engines_table(rows)
    judged = [row.judgement for row in rows if row.judgement is not None]
    metric = judged[0].metric if judged else "metric"
    idle = {row.engine for row in rows if row.lowers_nothing}
    spec: list[tuple[Column, Writer]] = [
        (Column("engine", right=False, whole=True), _engine),
        (Column(metric), num("value", 4)),
        (Column("drop [95 %]"), lambda row: DASH if row.engine in idle else est("drop")(row)),
        (
            Column("verdict", right=False),
            lambda row: _IDLE[row.role] if row.engine in idle else verdict_text(row),
        ),
        (Column("size, MB"), lambda row: megabytes(float_of(row.bytes))),
        (Column("req/s [95 %]"), est("throughput", "_rps")),
        (Column("speed-up"), lambda row: _times(row.speedup)),
        (Column("P50, ms"), num("p50_ms")),
        (Column("P95, ms"), num("p95_ms")),
        (Column("CPU ms/req"), num("cpu_ms_per_request")),
    ]
    caption = "Each engine against the reference."
    if judged:
        caption = (
            f"Paired drop of {metric} on n = {judged[0].n:,} {judged[0].split} samples "
            "(> 0 is worse)"
        )
        if (margin := judged[0].margin) is not None:
            caption += f"; largest drop allowed: {number(margin)}"
    plan = [index for index, row in enumerate(rows) if row.role == "plan"]
    return show(frame, spec, caption, plan)


def _times(value: Any) -> str:
    factor = float_of(value)
    return DASH if factor is None else f"{number(factor)}×"


def _engine(row: Any) -> str:
    if row.role != "reference":
        return str(row.engine)
    formats = list(row.asked) if isinstance(row.asked, Mapping) else []
    return f"{formats[0]} (reference)" if len(formats) == 1 else str(row.engine)


def verdict_text(row: Any) -> str:
    """Return the verdict of an engine in words, with the samples that would resolve it."""
    if row.role == "reference":
        return DASH
    if row.verdict == "not_resolvable":
        needed = float_of(row.n_needed)
        return "not resolvable" + ("" if needed is None else f" (n ≈ {needed:,.0f})")
    return plain(row.verdict).replace("_", " ")


def shown_sensitive(
    records: Sequence[SweepRecord],
    format: str | None = None,
    top: int = 10,
    *,
    others: bool = True,
) -> Shown:
    """Return the layers that move the answers most in one format.

    Args:
        records: Cells of the sweep.
        format: The format, or ``None`` for that of ``ranking_format``.
        top: Number of layers.
        others: Whether the divergences in the other measured formats stand beside.
    """
    frame = most_sensitive(records, format, top)
    chosen = frame.attrs["format"]
    beside = [name for name in measured_formats(records) if name != chosen and others]
    spec: list[tuple[Column, Writer]] = [
        (Column("rank [95 %]"), est("rank")),
        (Column("layer", right=False), text("layer")),
        (Column(f"{chosen}: divergence [95 %]"), _divergence),
        (Column(f"{chosen}: drop [95 %]"), _drop),
        *((Column(name), num(name, 2)) for name in beside),
    ]
    partial = frame["effort"] != "full"
    whole = frame.loc[~partial, "n"]
    caption = f"The {len(frame)} most divergent layers in {chosen}"
    if len(whole):
        caption += f", n = {int(whole.max()):,} sweep samples. ~ is noise: the interval of the drop"
        caption += " holds 0"
    if partial.any():
        caption += (
            f". ≈ is estimated from a part of the samples (n = {span(frame.loc[partial, 'n'])}): "
            "the race stopped the cell there, so it has no drop, and ranks have no interval"
        )
    if beside:
        caption += ". Right: divergence in other formats"
    return show(frame, spec, caption)


def _divergence(row: Any) -> str:
    return ("" if row.effort == "full" else "≈ ") + est("divergence")(row)


def span(counts: pd.Series[Any]) -> str:
    """Return the smallest and the largest of some counts in words, or the one that all are."""
    low, high = int(counts.min()), int(counts.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _drop(row: Any) -> str:
    return ("~ " if _resolved(row) == "noise" else "") + est("drop")(row)


def _resolved(row: Any) -> str:
    if row.resolvable is None or pd.isna(row.resolvable):
        return DASH
    return "resolved" if row.resolvable else "noise"


def agreement_words(agreement: Mapping[str, Any]) -> str:
    """Say how well two halves of the sweep split agree on the order of layers."""
    if not agreement:
        return ""
    parts = [
        f"{name} {number(value.value, 2)} {interval(value.low, value.high, 2)}"
        for name, value in agreement.items()
    ]
    return (
        "Agreement of two halves of the sweep split on the order of layers that were measured on "
        "all samples (rank correlation, 1 is the same order): " + "; ".join(parts) + "."
    )


def shown_plan_counts(plan: Plan) -> Shown:
    """Return how many layers of each kind take each format."""
    frame = plan_counts(plan)
    formats = [name for name in FORMATS if name in frame.columns]
    spec: list[tuple[Column, Writer]] = [(Column("kind", right=False), text("kind"))]
    spec += [(Column(name), _count(name)) for name in formats]
    return show(frame, spec, "Layers by kind and format")


def _count(name: str) -> Writer:
    return lambda row: f"{getattr(row, name):,}" if getattr(row, name) else DASH


def shown_plan(plan: Plan) -> Shown:
    """Return every layer of the plan with its reason."""
    spec: list[tuple[Column, Writer]] = [
        (Column("layer", right=False), text("layer")),
        (Column("kind", right=False), text("kind")),
        (Column("format", right=False), text("format")),
        (Column("divergence"), num("divergence")),
        (Column("reason", right=False, wrap=True), text("reason")),
        (
            Column("divergence in other formats", right=False, wrap=True),
            lambda row: _numbers(row.alternatives),
        ),
    ]
    return show(plan_table(plan), spec, f"All {len(plan.layers)} layers, in topological order")


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items()) or DASH


def shown_bench(bench: BenchRun) -> Shown:
    """Return the statistics of each engine under load."""
    spec: list[tuple[Column, Writer]] = [
        (Column("engine", right=False), text("engine")),
        (Column("requests"), text("requests")),
        (Column("requests/s [95 %]"), est("throughput", "_rps")),
        (Column("speed-up [95 %]"), est("speedup")),
        (Column("P50, ms [95 %]"), est("p50", "_ms")),
        (Column("P95, ms [95 %]"), est("p95", "_ms")),
        (Column("P99, ms [95 %]"), est("p99", "_ms")),
        (Column("queue, ms"), num("queue_ms")),
        (Column("preprocess, ms"), num("preprocess_ms")),
        (Column("batch formation, ms"), num("formation_ms")),
        (Column("inference, ms"), num("inference_ms")),
        (Column("postprocess, ms"), num("postprocess_ms")),
        (Column("CPU ms a request"), num("cpu_ms_per_request")),
        (Column("batch: median, largest"), _batches),
        (Column("refused"), text("rejected")),
    ]
    return show(bench_table(bench), spec, "Under load; stages are means over requests")


def _batches(row: Any) -> str:
    return f"{plain(row.batch_median)}, {plain(row.batch_largest)}"


def shown_sweep(records: Sequence[SweepRecord]) -> Shown:
    """Return every cell of the sweep that has a number, or a reason to have none."""
    frame = sweep_table(records)
    kept = frame[frame["status"] != "not_applicable"]
    spec: list[tuple[Column, Writer]] = [
        (Column("layer", right=False), text("layer")),
        (Column("kind", right=False), text("kind")),
        (Column("format", right=False), text("format")),
        (Column("status", right=False), lambda row: row.status.replace("_", " ")),
        (Column("divergence [95 %]"), _divergence),
        (Column("drop [95 %]"), est("drop")),
        (Column("drop is", right=False), _resolved),
        (Column("n"), text("n")),
        (Column("effort", right=False, wrap=True), _effort),
        (Column("answers changed"), lambda row: share(float_of(row.flip_rate))),
        (Column("SQNR, dB"), num("sqnr_db")),
        (Column("reason", right=False, wrap=True), text("reason")),
    ]
    caption = f"{len(kept):,} cells; those that mean nothing are left out"
    if (kept["effort"] != "full").any():
        caption += ". ≈ is estimated from n samples: a race stopped the cell there"
    return show(kept, spec, caption)


def _effort(row: Any) -> str:
    return str(row.effort) if row.status == "ok" else DASH


def shown_ranges(frame: pd.DataFrame) -> Shown:
    """Return what ``ranges_table`` gave."""
    plain = frame.rename(columns=lambda name: name.replace(".", "_"))
    spec: list[tuple[Column, Writer]] = [
        (Column("layer", right=False), text("layer")),
        (Column("tensor", right=False), text("tensor")),
        (Column("min"), num("min", 4)),
        (Column("max"), num("max", 4)),
        (Column("99 % of magnitudes ≤"), num("p99")),
        (Column("99.99 % ≤"), num("p99_99")),
        (Column("largest channel ÷ median"), num("outlier_ratio")),
        (Column("excess kurtosis"), num("kurtosis")),
        (Column("fp16 headroom"), num("fp16_headroom")),
        (Column("non-finite"), text("non_finite")),
    ]
    return show(plain, spec, f"{len(plain):,} tensors, calibration split")


def shown_statuses(records: Sequence[SweepRecord]) -> Shown:
    """Return how many cells have no number, by status and reason."""
    frame = sweep_table(records)
    without = frame[frame["status"] != "ok"]
    grouped = without.groupby(["status", "format", "reason"], sort=False, as_index=False)
    counts = grouped.agg(cells=("layer", "size"), remedy=("remedy", "first"))
    spec: list[tuple[Column, Writer]] = [
        (Column("status", right=False), lambda row: row.status.replace("_", " ")),
        (Column("format", right=False), text("format")),
        (Column("cells"), text("cells")),
        (Column("reason", right=False, wrap=True), text("reason")),
        (Column("what to do", right=False, wrap=True), text("remedy")),
    ]
    return show(counts, spec, f"{len(without):,} of {len(frame):,} cells have no number")
