"""The base of a run: its model in the backend's high precision, that cells and plans start from.

Where that is fp16, layers that fp16 cannot hold are in fp32 there, whatever a plan does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from qbench import judging
from qbench.backends import Variant
from qbench.engine.build import file_bytes, lower_graph, write_engine
from qbench.errors import PlanError
from qbench.judging import Candidate
from qbench.planning.costs import Offer, make_offer
from qbench.planning.pins import Pins
from qbench.planning.planfile import plan_sha256
from qbench.planning.wide import offer_wide
from qbench.records import Plan, SweepRecord, Treatment
from qbench.workbench import Workbench


def candidate(
    work: Workbench,
    name: str,
    formats: Mapping[str, str],
    treatments: Mapping[str, Treatment] | None = None,
) -> Candidate:
    """Return an engine to build; layers that are left out are as the base has them."""
    return Candidate(name, base_formats(work) | dict(formats), treatments or {})


def base_formats(work: Workbench) -> dict[str, str]:
    """Return the format of each layer that the base does not have in the high precision."""
    return dict.fromkeys(work.kept, "fp32")


def offer_of(work: Workbench, records: Sequence[SweepRecord]) -> Offer:
    """Return what each layer may become, from the cells of a sweep."""
    offer = make_offer(records, work.layers, work.backend)
    timed = not work.backend.stand_in
    return offer_wide(offer, records, work.layers, work.kept, timed)


def pins_on(work: Workbench, pins: Pins) -> Pins:
    """Return pins without those that keep in fp16 what fp16 cannot hold: that stays in fp32."""
    high = work.backend.high_precision
    held = {n: p for n, p in pins.kept.items() if n not in work.kept or p.format != high}
    return replace(pins, kept=held)


def lowers(work: Workbench, plan: Plan) -> bool:
    """Whether a plan gives a layer another format than the base does."""
    own = base_formats(work)
    high = work.backend.high_precision
    return any(entry.format != own.get(entry.name, high) for entry in plan.layers)


def check_kept(work: Workbench, plan: Plan, origin: str) -> None:
    """Check that a plan, which a person may have edited, keeps in fp32 what fp16 cannot hold.

    Raises:
        PlanError: If it does not; the tensor is named.
    """
    wrong = [e for e in plan.layers if e.name in work.kept and e.format != "fp32"]
    if wrong:
        first, more = wrong[0], f" (and {len(wrong) - 1} more layers)" if len(wrong) > 1 else ""
        raise PlanError(
            f"{origin}: layer {first.name!r} cannot be {first.format}{more}: "
            f"{work.kept[first.name]}; {work.backend.name} computes in fp16 around it, so write "
            "fp32"
        )


def with_reasons(work: Workbench, plan: Plan) -> Plan:
    """Return a plan that says why layers are in fp32 beside fp16, where no cell says it."""
    if work.backend.high_precision == "fp32":
        return plan
    measured = {r.layer for r in work.run.read_sweep() if r.format == "fp32" and r.n}
    rows = []
    for row in plan.layers:
        if row.format == "fp32" and row.name in work.kept:
            row = replace(row, reason=f"fp32: kept, {work.kept[row.name]}")
        elif row.format == "fp32" and row.name not in measured:
            row = replace(row, reason="fp32: asked for, and not measured", divergence=None)
        rows.append(row)
    return replace(plan, layers=tuple(rows))


def base_graph(work: Workbench) -> ir.Model:
    """Return the graph in the backend's high precision: what cells of the sweep change."""
    if work.backend.variant is Variant.ROUNDED:
        return work.model.ir
    return lower_graph(
        work.model.ir, work.layers, judging.plan_for(work, candidate(work, "base", {}), {})
    )


def base_bytes(work: Workbench) -> int:
    """Return the size of the engine in the backend's high precision, that a plan is held against.

    It is the model's own where that is what the high precision is.
    """
    if work.backend.variant is Variant.ROUNDED:
        return judging.reference_report(work).bytes
    plan = judging.plan_for(work, candidate(work, "base", {}), {})
    with tempfile.TemporaryDirectory(dir=work.run.path) as folder:
        path, _ = write_engine(work.model, work.layers, plan, plan_sha256(plan), Path(folder))
        return file_bytes(path)
