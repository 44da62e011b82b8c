"""What each layer may become, and what it costs there: divergence, bytes, seconds, all measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from qbench.backends import Backend
from qbench.errors import InputError
from qbench.formats import format_named
from qbench.records import Estimate, Kind, Layer, Layers, Status, SweepRecord, Treatment
from qbench.statistics import bootstrap_sum, median_interval

#: What layers share one latency: kind, weight shape, format with its remedy.
CostKey = tuple[Kind, tuple[int, ...], str]


@dataclass(frozen=True, slots=True)
class Option:
    """A format that a layer may take.

    Attributes:
        format: Name of the format.
        divergence: Mean divergence of the cell (layer, format), ≥ 0.
        bytes: Bytes of the layer's weights and scales in it.
        seconds: Change of a batch's time against the high precision (below zero is faster).
        elements: Weight elements over which mean bits are counted; 0 where it holds no matrix.
        bits: Bits a weight element, scales not counted.
        part: Samples that the divergence was estimated from, where that is not all of them.
    """

    format: str
    divergence: float
    bytes: int
    seconds: float
    elements: int = 0
    bits: int = 0
    part: int = 0


@dataclass(frozen=True, slots=True)
class CellCost:
    """What one (layer, format) costs.

    Attributes:
        layer: Name of the layer.
        format: Name of the format.
        bytes: Bytes of its weights and scales.
        seconds: Change of a batch's time against the high precision, pooled over like layers; 0
            where the measurement does not tell it from none.
        latency_ms: The pooled latency change with its interval, milliseconds; its ``n`` is the
            number of layers pooled, or of pairs where there is one layer.
    """

    layer: str
    format: str
    bytes: int
    seconds: float
    latency_ms: Estimate


@dataclass(frozen=True, slots=True)
class NotOffered:
    """A (layer, format) that no plan will use, and why."""

    layer: str
    format: str
    reason: str


@dataclass(frozen=True, slots=True)
class Offer:
    """What a planner may choose from.

    Attributes:
        options: Options of every layer in topological order; the high precision comes first, with
            divergence 0.
        not_offered: Measured cells and missing measurements that were left out.
        ties: Layers whose weight is one storage, by the storage's name: they take one format.
        high_precision: Name of the format that layers keep.
        fused: Layers that the backend computes as one, by a name: they take one format.
        treatments: The remedy of an option whose cell did better with one than without.
        tied_bytes: Bytes of a tie's storage in a format, by tie and format, where they were
            counted on a lowered graph.
    """

    options: Mapping[str, tuple[Option, ...]]
    not_offered: tuple[NotOffered, ...]
    ties: Mapping[str, tuple[str, ...]]
    high_precision: str
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    treatments: Mapping[tuple[str, str], Treatment] = field(default_factory=dict)
    tied_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def treatments_of(self, formats: Mapping[str, str]) -> dict[str, Treatment]:
        """Return the remedy of each layer that has one in the format that it takes."""
        return {
            layer: self.treatments[layer, form]
            for layer, form in formats.items()
            if (layer, form) in self.treatments
        }

    def option(self, layer: str, format_name: str) -> Option | None:
        """Return the option of a layer with that format, if it was offered."""
        return next((o for o in self.options[layer] if o.format == format_name), None)


def pool_latency(records: Sequence[SweepRecord], layers: Layers) -> dict[CostKey, Estimate]:
    """Return the latency change (ms a batch) of each (kind, weight shape, format).

    Layers of one kind and shape do the same work, so their measured changes are pooled: the
    median with its order-statistic interval. A layer without fellows has the interval of its own
    pairs. Only cells that ended ``ok`` and were timed count.
    """
    shapes = {layer.name: layer.weight_shape for layer in layers.layers}
    pools: dict[CostKey, list[Estimate]] = defaultdict(list)
    for record in records:
        timed = record.latency_delta_ms
        usable = record.status is Status.OK and timed is not None and np.isfinite(timed.value)
        if usable and timed is not None and record.layer in shapes:
            pools[_cost_key(record, shapes)].append(timed)
    return {
        key: timed[0] if len(timed) == 1 else median_interval([item.value for item in timed])
        for key, timed in pools.items()
    }


def cell_costs(records: Sequence[SweepRecord], layers: Layers) -> list[CellCost]:
    """Return bytes and pooled seconds of each cell that ended ``ok`` and has a latency."""
    pooled = pool_latency(records, layers)
    shapes = {layer.name: layer.weight_shape for layer in layers.layers}
    costs = []
    for record in records:
        key = _cost_key(record, shapes)
        if record.status is Status.OK and key in pooled:
            latency = pooled[key]
            seconds = believed_ms(latency, record.emulated) / 1e3
            costs.append(
                CellCost(record.layer, record.format, record.weight_bytes, seconds, latency)
            )
    return costs


def _cost_key(record: SweepRecord, shapes: Mapping[str, tuple[int, ...]]) -> CostKey:
    remedy = "" if record.treatment is None else f" {record.treatment.remedy}"
    return record.kind, shapes.get(record.layer, ()), f"{record.format}{remedy}"


def believed_ms(latency: Estimate, emulated: bool) -> float:
    """Return the latency change that a planner may count on.

    A change whose interval holds zero is noise: it counts as none. An emulated format has no
    speed of its own on the backend: it never counts as faster, and costs the upper end of what
    was measured.
    """
    if emulated:
        return max(0.0, latency.high)
    return 0.0 if latency.low <= 0.0 <= latency.high else latency.value


def ties_of(layers: Layers) -> dict[str, tuple[str, ...]]:
    """Return the layers that share one weight storage, by the storage's name."""
    groups: dict[str, list[str]] = defaultdict(list)
    for layer in layers.layers:
        if layer.tie:
            groups[layer.tie].append(layer.name)
    return {tie: tuple(names) for tie, names in groups.items() if len(names) > 1}


def fused_layers(layers: Layers, backend: Backend) -> dict[str, tuple[str, ...]]:
    """Return the layers that the backend computes as one and that so take one format.

    Where it fuses siblings, those are the linear layers that read one activation: query, key and
    value of a block; gate and up.
    """
    if not backend.fuses_siblings:
        return {}
    readers: dict[str, list[str]] = defaultdict(list)
    for layer in layers.layers:
        tensors = {edge.tensor for edge in layer.edges}
        if layer.kind is Kind.LINEAR and len(tensors) == 1:
            readers[tensors.pop()].append(layer.name)
    return {f"siblings of {t}": tuple(names) for t, names in readers.items() if len(names) > 1}


def weight_elements(layer: Layer) -> int:
    """Return the number of elements of a layer's matrix; 0 for a layer that holds none."""
    held = layer.kind in (Kind.LINEAR, Kind.CONV, Kind.EMBEDDING) and layer.weight_shape
    return math.prod(layer.weight_shape) if held else 0


def best_variants(records: Sequence[SweepRecord]) -> tuple[SweepRecord, ...]:
    """Return one record of each (layer, format): of several remedies the least divergent one.

    The plain cell stays where no remedy that ended ``ok`` diverges less.
    """
    best: dict[tuple[str, str], SweepRecord] = {}
    for record in sorted(records, key=lambda r: r.treatment is not None):
        key = record.layer, record.format
        if key not in best or _divergence_of(record) < _divergence_of(best[key]):
            best[key] = record
    order = dict.fromkeys((r.layer, r.format) for r in records)
    return tuple(best[key] for key in order)


def _divergence_of(record: SweepRecord) -> float:
    known = record.status is Status.OK and record.divergence is not None
    return record.divergence.value if known and record.divergence is not None else math.inf


def make_offer(records: Sequence[SweepRecord], layers: Layers, backend: Backend) -> Offer:
    """Return what each layer may become, from the cells of a sweep.

    The high precision is offered always. Another format is offered where its cell ended ``ok`` on
    this backend and both its divergence and a latency of its (kind, weight shape) were measured:
    there are no constants to fall back on.

    Raises:
        InputError: If a record is of a layer that the model does not have, or none is of this
            backend.
    """
    names = layers.by_name()
    measured_for = sorted({record.backend for record in records})
    if measured_for and backend.name not in measured_for:
        raise InputError(
            f"the sweep was measured for {' and '.join(measured_for)}, and the plan is for "
            f"{backend.name}; records of one backend make no plan for another: sweep for "
            f"{backend.name}, or plan for {measured_for[0]}"
        )
    strangers = sorted({record.layer for record in records} - names.keys())
    if strangers:
        raise InputError(
            f"the sweep has {len(strangers)} layers that this model does not have, "
            f"{strangers[0]!r} first: sweep this model, or plan the one that was swept"
        )
    records = best_variants(records)
    costs = {(cost.layer, cost.format): cost for cost in cell_costs(records, layers)}
    cells: dict[str, dict[str, SweepRecord]] = {name: {} for name in names}
    for record in records:
        cells[record.layer][record.format] = record
    options: dict[str, tuple[Option, ...]] = {}
    refused: list[NotOffered] = []
    for name, layer in names.items():
        offered = [_kept(layer, cells[name].get(backend.high_precision), backend)]
        for form, record in cells[name].items():
            if form == backend.high_precision:
                continue
            cost = costs.get((name, form))
            reason = _why_not(record, cost, backend)
            if reason or cost is None or record.divergence is None:
                refused.append(NotOffered(name, form, reason))
                continue
            divergence = max(0.0, record.divergence.value)
            elements, bits = weight_elements(layer), format_named(form).weight_bits
            part = 0 if record.effort == "full" else record.n
            offered.append(Option(form, divergence, cost.bytes, cost.seconds, elements, bits, part))
        options[name] = tuple(offered)
    return Offer(
        options,
        tuple(refused),
        ties_of(layers),
        backend.high_precision,
        fused_layers(layers, backend),
        {(r.layer, r.format): r.treatment for r in records if r.treatment is not None},
    )


def sum_divergence(
    formats: Mapping[str, str], records: Sequence[SweepRecord], *, seed: int = 0
) -> Estimate | None:
    """Return the summed divergence of a choice of formats, with a bootstrap over shared samples.

    Args:
        formats: Format of each layer.
        records: The sweep, with per-sample divergences.
        seed: Seed of the resamples.

    Returns:
        The sum, or ``None`` where cells were measured on different samples or kept none.
    """
    chosen = [
        record.samples.get("divergence", ())
        for record in best_variants(records)
        if formats.get(record.layer) == record.format and record.divergence is not None
    ]
    if not chosen or len({len(samples) for samples in chosen}) != 1 or not chosen[0]:
        return None
    return bootstrap_sum(np.array(chosen), seed=seed)


def _kept(layer: Layer, record: SweepRecord | None, backend: Backend) -> Option:
    stored = record.weight_bytes if record and record.status is Status.OK else layer.weight_bytes
    bits = format_named(backend.high_precision).weight_bits
    return Option(backend.high_precision, 0.0, stored, 0.0, weight_elements(layer), bits)


def _why_not(record: SweepRecord, cost: CellCost | None, backend: Backend) -> str:
    """Return why a cell is no option, or ""."""
    if record.backend != backend.name:
        return f"it was measured for {record.backend}, and the plan is for {backend.name}"
    if record.status is not Status.OK:
        return f"its cell is {record.status}: {record.reason or 'no reason was recorded'}"
    if record.divergence is None or not np.isfinite(record.divergence.value):
        return "its divergence was not measured"
    if cost is None:
        return f"no latency was measured for {record.format} on {record.kind} of this shape"
    return ""
