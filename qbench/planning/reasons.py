"""Why each layer takes its format, in words, and the plan's layers with their evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qbench.planning.costs import Offer, Option
from qbench.planning.problem import Objective, cost_of
from qbench.records import Layers, PlanLayer, Treatment

_LESS = {"balanced": "time and bytes", "latency": "seconds", "bytes": "bytes"}
_LESS["divergence"] = "time and bytes"
_CHEAPER = {"balanced": "faster", "latency": "faster", "bytes": "smaller", "divergence": "faster"}
_UNIT = {"balanced": "seconds", "latency": "seconds", "bytes": "bytes", "divergence": "seconds"}


def explain(offer: Offer, formats: Mapping[str, str], objective: Objective) -> dict[str, str]:
    """Return the reason for each layer's format.

    Ranks are among all layers that were offered the same format, the most divergent first.

    Args:
        offer: What the layers could have taken.
        formats: What they take.
        objective: What the plan minimises.
    """
    ranks = _ranks(offer)
    objective = "balanced" if objective == "divergence" else objective
    tied = {layer: tie for tie, names in offer.ties.items() for layer in names}
    reasons = {}
    for layer, form in formats.items():
        if form == offer.high_precision:
            reason = _why_kept(offer, layer, objective, ranks)
        else:
            reason = _why_lowered(offer, layer, form, objective, ranks)
        if layer in tied:
            reason += f"; one format with all that share {tied[layer]}"
        reasons[layer] = reason
    return reasons


def plan_layers(
    layers: Layers,
    offer: Offer,
    formats: Mapping[str, str],
    *,
    clips: Mapping[str, Mapping[str, float]],
    objective: Objective,
) -> tuple[PlanLayer, ...]:
    """Return every layer of a plan in topological order, with reason, evidence and clips.

    Args:
        layers: The layers of the model.
        offer: What they could have taken.
        formats: What they take.
        clips: Clipping magnitude of each edge tensor by layer; kept for every layer that has
            them, so that a plan edited by hand can quantize it. Divergences are rounded to four
            significant digits; the sweep keeps them whole.
        objective: What the plan minimises.
    """
    reasons = explain(offer, formats, objective)
    rows = []
    for layer in layers.layers:
        form = formats[layer.name]
        chosen = offer.option(layer.name, form)
        rows.append(
            PlanLayer(
                name=layer.name,
                kind=layer.kind,
                format=form,
                reason=reasons[layer.name],
                divergence=None if chosen is None else _legible(chosen.divergence),
                clips=dict(clips.get(layer.name, {})),
                alternatives={
                    o.format: _legible(o.divergence)
                    for o in offer.options[layer.name]
                    if o.format not in (form, offer.high_precision)
                },
            )
        )
    return tuple(rows)


def with_treatment(row: PlanLayer, treatment: Treatment | None) -> PlanLayer:
    """Return a layer of a plan with its remedy, which its reason then names."""
    if treatment is None:
        return row
    words = f"{row.reason}; with {treatment.variant}, which diverges less than without"
    return replace(row, treatment=treatment, reason=words)


def _told(option: Option) -> str:
    """Return a divergence in words; one from a part of the samples says so."""
    value = f"{option.divergence:.2g}"
    return f"≈ {value} (estimated from {option.part} samples)" if option.part else value


def _legible(divergence: float) -> float:
    return float(f"{divergence:.4g}")


def ordinal(rank: int) -> str:
    """Return a rank in words: largest, 2nd largest, 11th largest."""
    if rank == 1:
        return "largest"
    special = {1: "st", 2: "nd", 3: "rd"}
    ending = "th" if 10 <= rank % 100 <= 20 else special.get(rank % 10, "th")
    return f"{rank}{ending} largest"


def _ranks(offer: Offer) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (rank, of how many) of each (layer, format) by divergence, the largest first."""
    by_format: dict[str, list[tuple[float, str]]] = {}
    for layer, choices in offer.options.items():
        for o in choices:
            by_format.setdefault(o.format, []).append((o.divergence, layer))
    ranks = {}
    for form, cells in by_format.items():
        ordered = sorted(cells, key=lambda cell: -cell[0])
        for rank, (_, layer) in enumerate(ordered, start=1):
            ranks[layer, form] = (rank, len(ordered))
    return ranks


def _why_lowered(
    offer: Offer,
    layer: str,
    form: str,
    objective: Objective,
    ranks: Mapping[tuple[str, str], tuple[int, int]],
) -> str:
    chosen = offer.option(layer, form)
    if chosen is None:
        return f"{form}: set without a measurement"
    rank, total = ranks[layer, form]
    cheaper = [
        o for o in offer.options[layer] if cost_of(o, objective) < cost_of(chosen, objective)
    ]
    what = f"least {_LESS[objective]} within the divergence budget"
    if cheaper:
        other = min(cheaper, key=lambda o: cost_of(o, objective))
        what = (
            f"within the divergence budget; {other.format} takes fewer {_UNIT[objective]} and "
            f"diverges by {_told(other)}"
        )
    return f"{form}: {what}; divergence {_told(chosen)} (rank {rank} of {total})"


def _why_kept(
    offer: Offer,
    layer: str,
    objective: Objective,
    ranks: Mapping[tuple[str, str], tuple[int, int]],
) -> str:
    kept = offer.high_precision
    others = [o for o in offer.options[layer] if o.format != kept]
    if not others:
        refused = [r for r in offer.not_offered if r.layer == layer]
        if not refused:
            return f"{kept}: kept, no other format was measured"
        first = refused[0]
        return f"{kept}: kept, no other format is offered; {first.format}: {first.reason}"
    own = offer.option(layer, kept)
    floor = 0.0 if own is None else cost_of(own, objective)
    cheaper = [o for o in others if cost_of(o, objective) < floor]
    if not cheaper:
        tried = ", ".join(o.format for o in others)
        return f"{kept}: kept, none of {tried} is {_CHEAPER[objective]} here"
    least = min(cheaper, key=lambda o: o.divergence)
    rank, _ = ranks[layer, least.format]
    return f"{kept}: kept, its divergence as {least.format} {_told(least)} is the {ordinal(rank)}"
