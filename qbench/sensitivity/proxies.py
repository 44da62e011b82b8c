"""Proxies of sensitivity, and their audit: which of them orders layers as the measurement does.

All proxies are larger where a layer should be more sensitive:

* ``local_noise``: minus the SQNR at the layer's output, in dB.
* ``weight_mse``: mean squared rounding error of the weight, by the lowering's own rounding.
* ``gradient``: squared gradient of the model's output at the layer's output, times the layer's
  mean squared error there (first-order: the change of the output that white noise of that power
  brings).
* ``divergence_half``: divergence on one half of the samples, audited against the other half: what
  the measurement itself can reach at half its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from qbench.graph.segments import Segment, segment_model
from qbench.lowering import lowering_for
from qbench.lowering.constants import constant_of, is_constant
from qbench.lowering.edit import GraphEditor
from qbench.lowering.linear import linear_forms
from qbench.lowering.rounding import NARROW
from qbench.records import (
    Estimate,
    Kind,
    Layer,
    ProxyAudit,
    ProxyCell,
    ProxyScore,
    Status,
    SweepRecord,
    TensorRange,
)
from qbench.sensitivity.noise import halves_of
from qbench.statistics import spearman
from qbench.tasks.base import Array

LOCAL_NOISE, WEIGHT_MSE, GRADIENT = "local_noise", "weight_mse", "gradient"
OUTPUT_HALF = "divergence_half"
PROXIES = (LOCAL_NOISE, WEIGHT_MSE, GRADIENT, OUTPUT_HALF)
#: A proxy may be used alone where the whole interval of its ρ with divergence lies above it.
THRESHOLD = 0.8
#: Fewest cells that can say so.
FEWEST_CELLS = 10
ALL = "all"


def weight_mse(model: ir.Model, layer: Layer, format_name: str) -> float | None:
    """Return the mean squared rounding error of a layer's weight in a format.

    The lowering is applied to the layer alone, and the weight is read back from what it stored.

    Args:
        model: The whole graph; it is not changed.
        layer: The layer.
        format_name: The format.

    Returns:
        The error; ``None`` where the layer has no stored weight or cannot take the format.
    """
    if layer.kind not in (Kind.LINEAR, Kind.EMBEDDING) or not layer.weight:
        return None
    lowering = lowering_for(format_name)
    if lowering.requires(model, layer) is not None:
        return None
    layer = replace(layer, occurrences=layer.occurrences[:1])
    weight = _weight_of(_alone(model, layer), layer)
    if weight is None:
        return None
    if lowering.format.is_float:
        narrow = NARROW.get(format_name)
        dtype, top = (np.float32, np.inf) if narrow is None else (narrow.numpy, narrow.top)
        rounded = np.clip(weight, -top, top).astype(dtype).astype(np.float64)
    else:
        part = _alone(model, layer)
        lowering.apply(part, layer, {edge.tensor: 1.0 for edge in layer.edges})
        stored = _stored_weight(part, layer)
        if stored is None or stored.shape != weight.shape:
            return None
        rounded = stored
    return float(np.square(rounded - weight).mean())


def _alone(model: ir.Model, layer: Layer) -> ir.Model:
    """Return the nodes of a layer's first use as a graph of their own."""
    use = layer.occurrences[0]
    values = {v.name: v for node in model.graph for v in node.inputs if v is not None}
    reads = tuple(
        name
        for name in use.inputs
        if name and name in values and not is_constant(values[name]) and name != layer.weight
    )
    return segment_model(model, Segment(0, use.nodes, reads, (use.output,)))


def _weight_of(part: ir.Model, layer: Layer) -> Array | None:
    if layer.kind is Kind.EMBEDDING:
        gather = next((node for node in part.graph if node.op_type == "Gather"), None)
        table = constant_of(gather.inputs[0]) if gather is not None else None
        return None if table is None else table.astype(np.float64)
    forms = list(linear_forms(GraphEditor(part, layer.name), list(layer.occurrences)))
    return forms[0].weight.astype(np.float64) if forms else None


def _stored_weight(part: ir.Model, layer: Layer) -> Array | None:
    """Return the integers that a lowering stored, times their scales."""
    found: dict[str, Array] = {}
    for name, value in part.graph.initializers.items():
        stem = name.removeprefix(f"{layer.name}/")
        if stem in ("weight", "table", "scale") and value.const_value is not None:
            found[stem] = np.asarray(value.const_value.numpy()).astype(np.float64)
    integers, scale = found.get("weight", found.get("table")), found.get("scale")
    if integers is None or scale is None:
        return None
    if scale.ndim > 1:
        scale = np.repeat(scale, len(integers) // len(scale), axis=0)
    return np.asarray(integers * scale)


def output_power(layer: Layer, ranges: Mapping[str, TensorRange]) -> float | None:
    """Return the mean square of a layer's output as calibration saw it."""
    seen = [ranges[use.output] for use in layer.occurrences if use.output in ranges]
    if not seen:
        return None
    return sum(r.count * (r.std**2 + r.mean**2) for r in seen) / sum(r.count for r in seen)


def gradient_score(
    sqnr_db: float | None, power: float | None, squared: float | None
) -> float | None:
    """Return the gradient proxy of a cell.

    Args:
        sqnr_db: Signal to quantization noise at the layer's output.
        power: Mean square of the layer's output.
        squared: Sum over the layer's output of the squared gradient, mean a sample.
    """
    if sqnr_db is None or power is None or squared is None:
        return None
    return squared * power / 10 ** (sqnr_db / 10)


def proxy_cells(
    records: Sequence[SweepRecord],
    layers: Mapping[str, Layer],
    ranges: Mapping[str, TensorRange],
    mse: Callable[[Layer, str], float | None],
    gradients: Mapping[str, float],
) -> tuple[ProxyCell, ...]:
    """Return every measured cell with its proxies.

    Args:
        records: Cells of the sweep.
        layers: Layers by name.
        ranges: What calibration saw, by tensor.
        mse: Gives the weight's error of a layer and format (``weight_mse``).
        gradients: Squared output gradient by layer; empty where there is none.
    """
    cells = []
    for record in records:
        if record.status is not Status.OK or record.divergence is None:
            continue
        layer = layers.get(record.layer)
        if layer is None:
            continue
        power = output_power(layer, ranges)
        values = {
            LOCAL_NOISE: None if record.sqnr_db is None else -record.sqnr_db,
            WEIGHT_MSE: mse(layer, record.format),
            GRADIENT: gradient_score(record.sqnr_db, power, gradients.get(record.layer)),
        }
        drop = next(iter(record.drops.values()), None)
        cells.append(
            ProxyCell(
                record.layer,
                record.format,
                record.divergence.value,
                drop.value if drop is not None and drop.resolvable else None,
                {k: v for k, v in values.items() if v is not None and np.isfinite(v)},
            )
        )
    return tuple(cells)


def half_divergences(records: Sequence[SweepRecord]) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the divergence of each cell on the two halves of the samples."""
    found = {}
    for record in records:
        samples = np.asarray(record.samples.get("divergence", ()))
        if record.status is Status.OK and len(samples) >= 4:
            one, two = halves_of(len(samples))
            found[record.layer, record.format] = (
                float(samples[one].mean()),
                float(samples[two].mean()),
            )
    return found


def audit_proxies(
    records: Sequence[SweepRecord],
    cells: Sequence[ProxyCell],
    skipped: Mapping[str, str],
    *,
    threshold: float = THRESHOLD,
    seed: int = 0,
) -> ProxyAudit:
    """Return how well each proxy orders the cells, over all formats and within each.

    Args:
        records: Cells of the sweep, for the metric's name and the halves of the samples.
        cells: Their proxies.
        skipped: Why a proxy is missing, by its name.
        threshold: ρ above which the whole interval must lie for a proxy to be used alone.
        seed: Seed of the resamples of cells.
    """
    halves = half_divergences(records)
    formats = [ALL, *dict.fromkeys(cell.format for cell in cells)]
    scores = []
    for proxy in PROXIES:
        if proxy in skipped:
            continue
        for name in formats:
            own = [c for c in cells if name in (ALL, c.format)]
            triples = _triples(proxy, own, halves)
            if len(triples) >= 2:
                scores.append(_score(proxy, name, triples, threshold, seed))
    metric = next((m for r in records for m in r.drops), "")
    stopped = {(r.layer, r.format) for r in records if r.effort != "full"}
    partial = sum((cell.layer, cell.format) in stopped for cell in cells)
    return ProxyAudit(metric, threshold, tuple(scores), dict(skipped), tuple(cells), partial)


_Triple = tuple[float, float, float | None]


def _triples(
    proxy: str,
    cells: Sequence[ProxyCell],
    halves: Mapping[tuple[str, str], tuple[float, float]],
) -> list[_Triple]:
    """Return proxy, divergence and resolvable drop of each cell that has the proxy."""
    if proxy == OUTPUT_HALF:
        known = [(cell, halves.get((cell.layer, cell.format))) for cell in cells]
        return [(half[0], half[1], cell.drop) for cell, half in known if half is not None]
    return [(c.proxies[proxy], c.divergence, c.drop) for c in cells if proxy in c.proxies]


def _score(
    proxy: str, format_name: str, triples: Sequence[_Triple], threshold: float, seed: int
) -> ProxyScore:
    with_divergence = spearman([t[0] for t in triples], [t[1] for t in triples], seed=seed)
    resolvable = [(value, drop) for value, _, drop in triples if drop is not None]
    with_drop = None
    if len(resolvable) >= 2:
        with_drop = spearman([r[0] for r in resolvable], [r[1] for r in resolvable], seed=seed)
    alone = len(triples) >= FEWEST_CELLS and with_divergence.low > threshold
    reason = _reason(with_divergence, len(triples), alone, threshold)
    return ProxyScore(proxy, format_name, with_divergence, with_drop, alone, reason)


def _reason(rho: Estimate, cells: int, alone: bool, threshold: float) -> str:
    if cells < FEWEST_CELLS:
        return f"{cells} cells are too few to say; {FEWEST_CELLS} would do"
    if not np.isfinite(rho.value):
        return "it is the same for every cell: it orders nothing"
    if alone:
        return f"the whole interval of its correlation lies above {threshold:g}"
    if rho.high <= threshold:
        return f"the whole interval of its correlation lies below {threshold:g}"
    return f"the interval of its correlation is not above {threshold:g} as a whole"
