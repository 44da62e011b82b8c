"""Causes and remedies: why cells are in trouble, and what lowering them in other ways gave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from qbench.records import Cause, Plan, Status, SweepRecord
from qbench.remedies import in_use
from qbench.report.presentation import Column, Shown, est, num, show, text
from qbench.report.tables import estimate_columns
from qbench.report.wording import counted, listed, number
from qbench.sensitivity.remedies import best_variant, better_by

CAUSE_COLUMNS = ("layer", "format", "cause", "strength", "evidence")
REMEDY_COLUMNS = (
    "layer", "format", "remedy", "status", "plain", "divergence", "divergence_low",
    "divergence_high", "gain", "gain_low", "gain_high", "better", "best", "planned", "sqnr_db",
    "sqnr_plain_db", "latency_delta_ms", "weight_bytes", "reason",
)  # fmt: skip


def causes_table(causes: Iterable[Cause]) -> pd.DataFrame:
    """Return one row a cause; the strongest cause of a cell comes first."""
    rows = [
        {
            "layer": cause.layer,
            "format": cause.format,
            "cause": str(cause.cause),
            "strength": cause.strength,
            "evidence": cause.evidence,
        }
        for cause in causes
    ]
    return pd.DataFrame(rows, columns=list(CAUSE_COLUMNS))


def remedies_table(
    plain: Sequence[SweepRecord], tried: Sequence[SweepRecord], plan: Plan | None = None
) -> pd.DataFrame:
    """Return one row a cell with a remedy, beside what the cell gave without.

    Args:
        plain: The plain cells of the sweep.
        tried: The cells with a remedy.
        plan: The plan, for the column ``planned``.

    Returns:
        ``gain`` is what the remedy takes off the mean divergence, paired by sample; ``better``
        says that its interval lies above zero, ``best`` that no other remedy of the cell is.
    """
    cells = {(r.layer, r.format): r for r in plain}
    planned = {row.name: row for row in plan.layers} if plan is not None else {}
    best = {
        cell: best_variant(record, [r for r in tried if (r.layer, r.format) == cell]).variant
        for cell, record in cells.items()
        if any((r.layer, r.format) == cell for r in tried)
    }
    rows = []
    for record in tried:
        before = cells.get((record.layer, record.format))
        row = _remedy_row(record, before)
        row["best"] = bool(record.variant) and best.get((record.layer, record.format)) == (
            record.variant
        )
        own = planned.get(record.layer)
        row["planned"] = own is not None and in_use(own) == record.treatment
        rows.append(row)
    return pd.DataFrame(rows, columns=list(REMEDY_COLUMNS))


def _remedy_row(record: SweepRecord, before: SweepRecord | None) -> dict[str, Any]:
    gain = better_by(before, record) if before is not None else None
    known = before is not None and before.divergence is not None
    timed = record.latency_delta_ms
    return {
        "layer": record.layer,
        "format": record.format,
        "remedy": record.variant,
        "status": str(record.status),
        "plain": before.divergence.value if known and before and before.divergence else None,
        **estimate_columns("divergence", record.divergence),
        **estimate_columns("gain", gain),
        "better": gain is not None and gain.low > 0,
        "sqnr_db": record.sqnr_db,
        "sqnr_plain_db": None if before is None else before.sqnr_db,
        "latency_delta_ms": None if timed is None else timed.value,
        "weight_bytes": record.weight_bytes,
        "reason": record.reason,
    }


def shown_causes(causes: Sequence[Cause]) -> Shown:
    """Return why cells are in trouble, with the evidence."""
    spec = [
        (Column("layer", right=False, whole=True), text("layer")),
        (Column("format", right=False), text("format")),
        (Column("cause", right=False, whole=True), text("cause")),
        (Column("evidence", right=False, wrap=True), text("evidence")),
    ]
    return show(causes_table(causes), spec, "Why cells are in trouble")


def shown_remedies(
    plain: Sequence[SweepRecord], tried: Sequence[SweepRecord], plan: Plan | None = None
) -> Shown:
    """Return what every remedy gave; those that are better, and the best, are set apart."""
    measured = [r for r in tried if r.status is Status.OK]
    frame = remedies_table(plain, measured, plan)
    spec = [
        (Column("layer", right=False, whole=True), text("layer")),
        (Column("format", right=False), text("format")),
        (Column("remedy", right=False, whole=True), text("remedy")),
        (Column("divergence without"), num("plain")),
        (Column("with [95 %]"), est("divergence")),
        (Column("it takes off [95 %]"), est("gain")),
        (Column("SQNR, dB"), lambda row: number(row.sqnr_db)),
        (Column("said", right=False), _said),
    ]
    marked = [i for i, row in enumerate(frame.itertuples(index=False)) if row.best]
    return show(frame, spec, "The worst cells lowered in other ways", marked)


def _said(row: Any) -> str:
    words = "best" if row.best else "better" if row.better else "no better"
    return f"{words}, in the plan" if row.planned else words


def cause_words(causes: Sequence[Cause]) -> str:
    """Say which causes were found, in one sentence; "" where none was."""
    if not causes:
        return ""
    by_name: dict[str, list[str]] = {}
    for cause in causes:
        by_name.setdefault(str(cause.cause), []).append(cause.layer)
    told = [
        f"{name}: {listed(list(dict.fromkeys(layers)), most=4)}" for name, layers in by_name.items()
    ]
    return "Why layers suffer. " + "; ".join(told) + "."


def remedy_words(
    plain: Sequence[SweepRecord], tried: Sequence[SweepRecord], plan: Plan | None = None
) -> str:
    """Say what remedies came to, in one sentence; "" where none was tried."""
    measured = [r for r in tried if r.status is Status.OK]
    if not measured:
        return ""
    frame = remedies_table(plain, measured, plan)
    cells = len(frame[["layer", "format"]].drop_duplicates())
    best = frame[frame["best"]]
    words = f"{len(measured)} remedies were tried on {cells} cells: {len(best)} do better"
    if len(best):
        row = best.assign(times=best["plain"] / best["divergence"]).nlargest(1, "times").iloc[0]
        words += (
            f", most of all {row['layer']} in {row['format']}: {row['remedy']} brings its "
            f"divergence from {number(row['plain'], 2)} to {number(row['divergence'], 2)}"
        )
    planned = [own.variant for row in plan.layers if (own := in_use(row))] if plan else []
    if planned:
        words += f". The plan uses {counted(planned)}"
    return words + "."


def strongest_causes(causes: Iterable[Cause]) -> dict[tuple[str, str], str]:
    """Return the strongest cause of each cell, by (layer, format)."""
    found: dict[tuple[str, str], Cause] = {}
    for cause in causes:
        known = found.get((cause.layer, cause.format))
        if known is None or cause.strength > known.strength:
            found[cause.layer, cause.format] = cause
    return {cell: str(cause.cause) for cell, cause in found.items()}
