"""Noise, the restored view and the audit of proxies: tables and words of a report."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from qbench.records import Noise, ProxyAudit, RestoredView
from qbench.report.presentation import Column, Shown, est, num, show, text
from qbench.report.tables import estimate_columns
from qbench.report.wording import estimate, interval, listed, number, share

_PROXY_NAMES = {
    "local_noise": "local noise (−SQNR)",
    "weight_mse": "weight MSE",
    "gradient": "gradient² × layer error",
    "divergence_half": "divergence, other half of samples",
}
_REFERENCE = "reference"


def floor_value(noise: Noise | None) -> float | None:
    """Return the reference's noise floor: its divergence in the worst other composition."""
    floors = [f.divergence.value for f in noise.floors if f.what == _REFERENCE] if noise else []
    return max(floors, default=None)


def noise_table(noise: Noise) -> pd.DataFrame:
    """Return one row a graph and composition."""
    rows = [
        {
            "what": floor.what,
            "composition": floor.composition,
            **estimate_columns("divergence", floor.divergence),
            "flip_rate": floor.flip_rate,
            **estimate_columns("from_reference", floor.from_reference),
        }
        for floor in noise.floors
    ]
    ends = ("", "_low", "_high")
    columns = ["what", "composition", *(f"divergence{end}" for end in ends), "flip_rate"]
    columns += [f"from_reference{end}" for end in ends]
    return pd.DataFrame(rows, columns=columns)


def shown_noise(noise: Noise) -> Shown:
    """Return what unchanged graphs give in other batch compositions."""
    spec = [
        (Column("graph", right=False), text("what")),
        (Column("batched as", right=False), text("composition")),
        (Column("divergence from itself"), num("divergence")),
        (Column("answers changed"), lambda row: share(row.flip_rate)),
        (Column("divergence from the reference [95 %]"), est("from_reference")),
    ]
    caption = "Nothing is changed here but who shares a batch with whom: the noise floor"
    return show(noise_table(noise), spec, caption)


def shown_spread(noise: Noise) -> Shown:
    """Return cells over draws of the calibration split."""
    rows = tuple(
        (
            item.layer,
            item.format,
            number(item.divergence),
            interval(item.low, item.high, 3),
            number(item.high / item.low if item.low > 0 else None),
        )
        for item in noise.calibration
    )
    columns = (
        Column("layer", right=False),
        Column("format", right=False),
        Column("divergence"),
        Column("lowest and highest over draws"),
        Column("highest ÷ lowest"),
    )
    draws = len(noise.calibration[0].draws) if noise.calibration else 0
    caption = f"The same cells with clips from {draws} halves of the calibration split"
    return Shown(caption, columns, rows)


def shown_calls(noise: Noise) -> Shown:
    """Return every layer that at least one half of the samples would call sensitive."""
    told = [c for c in noise.calls if c.sensitive or "second draw" in c.reason]
    rows = tuple(
        (c.format, c.layer, "sensitive" if c.sensitive else "not called", c.reason) for c in told
    )
    columns = tuple(
        Column(heading, right=False, wrap=heading == "why")
        for heading in ("format", "layer", "said", "why")
    )
    marked = tuple(i for i, c in enumerate(told) if c.sensitive)
    return Shown("Layers that a half of the sweep split calls sensitive", columns, rows, marked)


def call_words(noise: Noise | None, formats: Iterable[str] | None = None) -> list[str]:
    """Say which layers both halves of the sweep split call sensitive, format by format."""
    if noise is None or not noise.calls:
        return []
    measured = list(dict.fromkeys(call.format for call in noise.calls))
    words = []
    for name in measured if formats is None else [f for f in formats if f in measured]:
        own = [call for call in noise.calls if call.format == name]
        called = [call.layer for call in own if call.sensitive]
        one_half = sum("second draw" in call.reason for call in own)
        said = listed(called, most=12) if called else "none"
        rest = f"; {one_half} more by one half only" if one_half else ""
        if partly := sum(not call.ranks for call in own):
            rest += f"; {partly} stopped before all samples and are not called either way"
        words.append(f"Sensitive in {name} by both halves of the sweep split: {said}{rest}.")
    words.append("No layer is called sensitive that the second draw does not call so.")
    return words


def floor_words(noise: Noise | None) -> str:
    """Say what the noise floor is, and how much of the divergence batch-mates alone bring."""
    floor = floor_value(noise)
    if noise is None or floor is None:
        return ""
    worst = max(f.flip_rate for f in noise.floors if f.what == _REFERENCE)
    words = (
        f"Noise floor: the reference in other batches diverges from itself by {number(floor)} at "
        f"most and changes {share(worst)} of its answers."
    )
    for what in dict.fromkeys(f.what for f in noise.floors if f.what != _REFERENCE):
        own = [f for f in noise.floors if f.what == what]
        moved = max(f.divergence.value for f in own)
        apart = [f.from_reference.value for f in own if f.from_reference is not None]
        flips = max(f.flip_rate for f in own)
        words += (
            f" An engine all in {what} diverges from itself by up to {number(moved)} and changes "
            f"up to {share(flips)} of its answers"
        )
        if apart:
            ends = interval(min(apart), max(apart))
            words += f"; its divergence from the reference is {ends} over compositions"
        words += "."
    return words


# --- all low, one restored ------------------------------------------------------------------------


def restored_table(view: RestoredView) -> pd.DataFrame:
    """Return one row a restored layer, the largest interaction first."""
    rows = [
        {
            "layer": record.layer,
            "kind": record.kind,
            "format": record.format,
            "n": record.divergence.n,
            **estimate_columns("single", record.single),
            **estimate_columns("gain", record.gain),
            **estimate_columns("interaction", record.interaction),
            "resolvable": record.interaction.resolvable if record.interaction else None,
            **estimate_columns("divergence", record.divergence),
            "flip_rate": record.flip_rate,
        }
        for record in view.records
    ]
    names = ("single", "gain", "interaction", "divergence")
    columns = ["layer", "kind", "format", "n"]
    columns += [f"{name}{end}" for name in names[:3] for end in ("", "_low", "_high")]
    columns += ["resolvable", "divergence", "divergence_low", "divergence_high", "flip_rate"]
    frame = pd.DataFrame(rows, columns=columns)
    order = frame["interaction"].astype(float).abs().sort_values(ascending=False, kind="stable")
    return frame.loc[order.index].reset_index(drop=True)


def shown_restored(view: RestoredView) -> Shown:
    """Return both views of each layer."""
    spec = [
        (Column("layer", right=False), text("layer")),
        (Column("alone low: divergence [95 %]"), est("single")),
        (Column("restored: divergence won [95 %]"), est("gain")),
        (Column("interaction [95 %]"), est("interaction")),
        (Column("interaction is", right=False), _interaction_is),
    ]
    caption = (
        f"{len(view.records)} layers in {view.format}: each alone low, and each restored while "
        f"the others are low (divergence with all {view.lowered} low: {estimate(view.all_low)})"
    )
    return show(restored_table(view), spec, caption)


def _interaction_is(row: object) -> str:
    resolvable = getattr(row, "resolvable", None)
    if resolvable is None or pd.isna(resolvable):
        return "–"
    if not resolvable:
        return "noise"
    value = float(getattr(row, "interaction", 0.0))
    return "cheaper in company" if value > 0 else "dearer in company"


def restored_words(view: RestoredView) -> str:
    """Say whether single-layer divergences add up to that of the all-low engine."""
    singles = [r.single.value for r in view.records if r.single is not None]
    beyond = sum(1 for r in view.records if r.interaction is not None and r.interaction.resolvable)
    words = (
        f"With all {view.lowered} layers in {view.format} the divergence is "
        f"{estimate(view.all_low)}"
    )
    if len(singles) == view.lowered:
        words += f", where the single layers' add up to {number(sum(singles))}"
    known = sum(r.interaction is not None for r in view.records)
    words += f". The interaction is beyond noise for {beyond} of {known} layers."
    return " ".join([words, *(f"{remark[:1].upper()}{remark[1:]}." for remark in view.remarks)])


# --- proxies --------------------------------------------------------------------------------------


def audit_table(audit: ProxyAudit) -> pd.DataFrame:
    """Return one row a proxy and format."""
    rows = [
        {
            "proxy": score.proxy,
            "format": score.format,
            "cells": score.with_divergence.n,
            **estimate_columns("with_divergence", score.with_divergence),
            "resolvable": score.with_drop.n if score.with_drop is not None else 0,
            **estimate_columns("with_drop", score.with_drop),
            "alone": score.alone,
            "reason": score.reason,
        }
        for score in audit.scores
    ]
    columns = ["proxy", "format", "cells"]
    columns += [f"with_divergence{end}" for end in ("", "_low", "_high")] + ["resolvable"]
    columns += [f"with_drop{end}" for end in ("", "_low", "_high")] + ["alone", "reason"]
    return pd.DataFrame(rows, columns=columns)


def shown_audit(audit: ProxyAudit) -> Shown:
    """Return how well each proxy orders the cells."""
    frame = audit_table(audit)
    spec = [
        (Column("proxy", right=False), lambda row: _PROXY_NAMES.get(row.proxy, row.proxy)),
        (Column("format", right=False), text("format")),
        (Column("cells"), text("cells")),
        (Column("ρ with divergence [95 %]"), est("with_divergence")),
        (Column("resolvable drops"), text("resolvable")),
        (Column(f"ρ with drop of {audit.metric or 'metric'} [95 %]"), est("with_drop")),
        (Column("alone", right=False), lambda row: "yes" if row.alone else "no"),
        (Column("why", right=False, wrap=True), text("reason")),
    ]
    caption = "Rank correlation of each proxy with what was measured, over the cells of the sweep"
    marked = [index for index, alone in enumerate(frame["alone"]) if alone]
    return show(frame, spec, caption, marked)


def audit_words(audit: ProxyAudit) -> list[str]:
    """Say which proxies may be used alone, and why others are missing."""
    words = []
    for proxy in dict.fromkeys(score.proxy for score in audit.scores):
        if proxy == "divergence_half":
            continue
        own = [score for score in audit.scores if score.proxy == proxy]
        good = [score.format for score in own if score.alone]
        name = _PROXY_NAMES.get(proxy, proxy)
        where = "over all formats" if "all" in good else f"within {listed(good)}" if good else ""
        if "all" in good and len(good) < len(own):
            inside = [f for f in good if f != "all"]
            where += f", and within {listed(inside) if inside else 'no single one'}"
        said = f"may be used alone {where}" if where else "may not be used alone"
        words.append(f"{name[:1].upper()}{name[1:]} {said}.")
    if audit.partial:
        words.append(
            f"The divergence of {audit.partial:,} of {len(audit.cells):,} cells is an estimate "
            "from a part of the samples, where the race stopped; the last rows are of the others "
            "alone. An audit of what was measured in full needs a sweep with --no-race."
        )
    words += [f"{_PROXY_NAMES.get(p, p)}: skipped: {why}." for p, why in audit.skipped.items()]
    words.append(
        f"A proxy may be used alone where the whole interval of its ρ lies above "
        f"{audit.threshold:g}; the last rows show what the measurement itself reaches at half its "
        "samples."
    )
    return words
