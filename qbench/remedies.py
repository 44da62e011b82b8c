"""Remedies: other ways to lower a layer in a format, before it is given up to high precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qbench.errors import unknown_name
from qbench.records import PlanLayer, Treatment

#: Formats that each remedy is for.
REMEDIES: Mapping[str, tuple[str, ...]] = {
    "percentile": ("int8",),
    "entropy": ("int8",),
    "mse": ("int8",),
    "smoothquant": ("int8",),
    "rows": ("int8_dynamic",),
    "awq": ("w4a16", "w4a8"),
    "block": ("w4a16", "w4a8"),
}
#: Block sizes that ``block`` tries.
BLOCKS = (32, 64, 128)


def in_use(row: PlanLayer) -> Treatment | None:
    """Return the treatment of a plan's layer; ``None`` where its format is not one it is for.

    A person edits formats: a treatment of the format that was planned then does nothing.
    """
    own = row.treatment
    return own if own is not None and row.format in REMEDIES.get(own.remedy, ()) else None


def check_row(row: PlanLayer) -> str | None:
    """Return what is wrong with the treatment of a plan's layer, or ``None``."""
    own = row.treatment
    if own is None or (own.remedy in REMEDIES and in_use(row) is None):
        return None
    return check_treatment(own, row.format)


def check_treatment(treatment: Treatment, format_name: str) -> str | None:
    """Return what is wrong with a treatment of a layer in a format, or ``None``."""
    remedy = treatment.remedy
    if remedy not in REMEDIES:
        return unknown_name("remedy", remedy, REMEDIES)
    if format_name not in REMEDIES[remedy]:
        allowed = _listed(REMEDIES[remedy])
        return (
            f"treatment {treatment.variant!r} is for {allowed}, and the format is {format_name}; "
            "delete the layer's `treatment`"
        )
    wanted = {"smoothquant": ("scale",), "awq": ("scale", "importance")}.get(remedy, ())
    if wanted and treatment.vectors.keys().isdisjoint(wanted):
        return f"treatment {treatment.variant!r} has no vector `{wanted[0]}`; plan again"
    if remedy in ("block", "awq") and treatment.block is None:
        return f"treatment {treatment.variant!r} names no `block`; allowed: {_listed(BLOCKS)}"
    if treatment.block is not None and treatment.block < 1:
        return f"treatment {treatment.variant!r}: got block {treatment.block}; allowed: above 0"
    return None


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))
