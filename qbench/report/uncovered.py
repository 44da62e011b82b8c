"""What a run did not cover, in words: a result says where it ends."""

from __future__ import annotations

import pandas as pd

from qbench.records import Layers, Status
from qbench.report.presentation import Column, Shown, show, span, text
from qbench.report.run_records import RunRecords
from qbench.report.samples import is_partial
from qbench.report.tables import unlayered_table
from qbench.report.wording import listed

_PARTS = {
    "run": "What ran, and on what",
    "layers": "Layers",
    "ranges": "Ranges",
    "sweep": "The sweep",
    "noise": "The noise floor",
    "restored": "The view with all layers low and one restored",
    "audit": "The audit of proxies",
    "plan": "The plan",
    "front": "The measured front",
    "engines": "Engines",
    "verification": "Verification on held-out samples",
    "bench": "The benchmark under load",
}


def uncovered_words(run: RunRecords) -> list[str]:
    """Return one sentence for each thing that the run did not measure."""
    words = [f"{_PARTS[part]}: {reason}" for part, reason in run.missing.items()]
    words += [f"Noise: {remark}." for remark in (run.noise.remarks if run.noise else ())]
    return [*words, *effort_words(run), *_cell_words(run), *_engine_words(run), *_place_words(run)]


def effort_words(run: RunRecords) -> list[str]:
    """Say which cells were measured on a part of the samples only, and which not at all."""
    fine = [record for record in run.sweep if record.status is Status.OK]
    partial = pd.Series([record.n for record in fine if is_partial(record)])
    words = []
    if len(partial):
        words.append(
            f"{len(partial):,} of {len(fine):,} cells were stopped on a part of the samples (n = "
            f"{span(partial)}): their divergence is an estimate, and they have no drop. --no-race "
            "measures every cell in full."
        )
    left = (run.facts.get("sweep") or {}).get("not_reached") or ()
    if left:
        named = listed([f"{layer} in {name}" for layer, name in left], most=3)
        words.append(
            f"{len(left):,} cells were not reached before the time budget ended: {named}. A plan "
            "uses only what was measured; the same command again goes on with them."
        )
    return words


def _cell_words(run: RunRecords) -> list[str]:
    counts = {status: sum(cell.status is status for cell in run.sweep) for status in Status}
    words = []
    for status, meaning in (
        (Status.NOT_YET, "make sense and are not offered by this version"),
        (Status.INVALID, "gave non-finite numbers or leave the range of their format"),
        (Status.FAILED, "did not lower, load or run"),
    ):
        if counts[status]:
            words.append(f"{counts[status]:,} cells of the sweep {meaning}.")
    if run.layers.unlayered:
        words.append(
            f"{len(run.layers.unlayered):,} nodes are in no layer and keep high precision."
        )
    return words


def _engine_words(run: RunRecords) -> list[str]:
    words = []
    for report in run.engines:
        if report.fallbacks:
            names = listed([fallback.layer for fallback in report.fallbacks], most=3)
            words.append(
                f"The engine {report.name} did not realise what was asked for in "
                f"{len(report.fallbacks):,} layers: {names}."
            )
    return words


def _place_words(run: RunRecords) -> list[str]:
    words = []
    emulated = sorted({cell.format for cell in run.sweep if cell.emulated})
    if emulated:
        words.append(
            f"{listed(emulated)} is emulated here: its rounding is real, its speed is not measured."
        )
    if run.bench is not None:
        words.append(
            "Latency and throughput hold for the machine, threads, lengths and load named under "
            "Provenance and Conditions; they say nothing about another machine."
        )
    return words


def shown_unlayered(layers: Layers) -> Shown:
    """Return why nodes are in no layer."""
    spec = [
        (Column("nodes"), text("nodes")),
        (Column("operators", right=False), text("operators")),
        (Column("reason", right=False), text("reason")),
    ]
    return show(unlayered_table(layers), spec, f"{len(layers.unlayered):,} nodes in no layer")
