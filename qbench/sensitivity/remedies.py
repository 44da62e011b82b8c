"""Remedies: which cells get one, how its numbers are found, and which one is better.

The numbers of SmoothQuant (G. Xiao et al., 2023) and AWQ (J. Lin et al., 2024) are searched by the
local error at the layer's output, on rows of the calibration split. A search only proposes: what
a remedy gives is measured as any cell is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from qbench.lowering.awq import clip_blocks, dequantized
from qbench.lowering.linear import per_channel_int8
from qbench.records import Estimate, Kind, Status, SweepRecord, Treatment
from qbench.records.packed import pack, unpack
from qbench.remedies import REMEDIES
from qbench.statistics import mean_interval

Floats = npt.NDArray[np.float32]

#: Exponents that the searches try.
SMOOTH_ALPHAS = tuple(round(0.05 * step, 2) for step in range(5, 21))
AWQ_ALPHAS = tuple(round(0.05 * step, 2) for step in range(21))
#: Outputs of a layer that a search looks at.
_MOST_OUTPUTS = 512
#: Channels below this share of the largest count as this much.
_FLOOR = 1e-5


class Activation(Protocol):
    """What calibration saw of the tensor that enters a layer; K channels."""

    @property
    def rows(self) -> Floats:
        """A few rows, shape [rows, K]."""

    @property
    def absmax(self) -> Floats:
        """Largest magnitude a channel, shape [K]."""

    @property
    def mean_abs(self) -> Floats:
        """Mean magnitude a channel, shape [K]."""

    @property
    def mean_square(self) -> Floats:
        """Mean square a channel, shape [K]."""


def cells_to_treat(
    records: Iterable[SweepRecord], count: int, kept: Collection[str] = ()
) -> list[SweepRecord]:
    """Return the cells that get remedies: of each format that has some, the worst ``count``.

    Layers in ``kept``, which a plan leaves in high precision, come before all others; then the
    most divergent. Only linear layers count. The worst cell of each format comes first, then the
    second of each: where time is short, no format is left out.

    Args:
        records: The plain cells of a sweep.
        count: Cells of each format.
        kept: Names of layers.
    """
    by_format: dict[str, list[SweepRecord]] = {}
    for record in records:
        offered = any(record.format in formats for formats in REMEDIES.values())
        usable = record.status is Status.OK and record.divergence is not None
        if offered and usable and record.kind is Kind.LINEAR:
            by_format.setdefault(record.format, []).append(record)
    ordered = [
        sorted(found, key=lambda r: (r.layer not in kept, -_divergence(r)))[:count]
        for found in by_format.values()
    ]
    return [found[place] for place in range(count) for found in ordered if place < len(found)]


def smoothing_scale(activation: Floats, weight: Floats, alpha: float) -> Floats:
    """Return SmoothQuant's scale ``activation^α / weight^(1 − α)``, shape [K].

    Args:
        activation: Largest magnitude of each channel of the activation, shape [K].
        weight: Largest magnitude of each row of W, shape [K].
        alpha: How much of the difficulty goes over to the weight, in [0, 1].
    """
    return _levelled(_floored(activation) ** alpha / _floored(weight) ** (1 - alpha))


def awq_scale(activation: Floats, alpha: float) -> Floats:
    """Return AWQ's scale ``activation^α``, shape [K].

    Args:
        activation: Mean magnitude of each channel of the activation, shape [K].
        alpha: How much the large channels are protected, in [0, 1].
    """
    return _levelled(_floored(activation) ** alpha)


def find_smoothquant(
    seen: Activation, weight: Floats, tensor: str, siblings: Floats | None = None
) -> Treatment:
    """Return SmoothQuant for a layer in int8, its α found by the local error.

    Args:
        seen: The activation.
        weight: W, shape [K, N].
        tensor: Name of the activation's tensor.
        siblings: Largest magnitude of each row of the weights of all layers that read the
            tensor, shape [K]: layers that share it can then share one scale.
    """
    rows = np.abs(weight).max(axis=1) if siblings is None else siblings
    part = _some_outputs(weight)
    exact = seen.rows @ part

    def tried(alpha: float) -> tuple[float, Treatment]:
        packed = pack(smoothing_scale(seen.absmax, rows, alpha))
        scale = unpack(packed)
        clip = float(np.float32((seen.absmax / scale).max())) or 1.0
        treatment = Treatment(f"smoothquant:{alpha:g}", {tensor: clip}, {"scale": packed})
        got = _int8_rows(seen.rows / scale, clip) @ _int8_weight(part * scale[:, None])
        return _squared(got - exact), treatment

    return _least(tried, SMOOTH_ALPHAS)


def find_awq(seen: Activation, weight: Floats, bits: int, block: int) -> Treatment:
    """Return AWQ for a layer in blocks of ``bits`` bits: α by the local error, then clipping.

    Clipped blocks are taken where they lower the local error further.

    Args:
        seen: The activation.
        weight: W, shape [K, N].
        bits: Bits of an element.
        block: Elements along K that share a scale: what the layer's own search chose.
    """
    part = _some_outputs(weight)
    exact = seen.rows @ part

    def error_of(scaled: Floats, scale: Floats) -> float:
        got = (seen.rows / scale) @ dequantized(scaled, bits, block)
        return _squared(got - exact)

    def tried(alpha: float) -> tuple[float, Treatment]:
        if alpha == 0:
            return error_of(part, np.ones(len(part), np.float32)), Treatment("awq:0", block=block)
        packed = pack(awq_scale(seen.mean_abs, alpha))
        scale = unpack(packed)
        treatment = Treatment(f"awq:{alpha:g}", {}, {"scale": packed}, block)
        return error_of(part * scale[:, None], scale), treatment

    best = _least(tried, AWQ_ALPHAS)
    scale = unpack(best.vectors["scale"]) if best.vectors else np.ones(len(part), np.float32)
    importance = seen.mean_square / np.square(scale)
    packed = pack(importance / (importance.max() or 1.0))
    scaled = part * scale[:, None]
    clipped = clip_blocks(scaled, unpack(packed), bits, block)
    if best.vectors and error_of(clipped, scale) >= error_of(scaled, scale):
        return best
    return replace(
        best, variant=f"{best.variant},clip", vectors={**best.vectors, "importance": packed}
    )


def better_by(plain: SweepRecord, other: SweepRecord, seed: int = 0) -> Estimate | None:
    """Return by how much a remedy lowers the mean divergence, with its interval.

    The difference is paired by sample: on all samples where both have them, else on those of the
    largest look that both had. Where they share none the two intervals are taken apart, which asks
    for more.

    Returns:
        The difference (> 0: the remedy diverges less); ``None`` where a divergence is missing.
    """
    if plain.divergence is None or other.divergence is None:
        return None
    shared = [n for n in plain.samples if n in other.samples and n.startswith("sub_pool")]
    for name in ("divergence", *sorted(shared, reverse=True)):
        before = np.array(plain.samples.get(name, ()))
        after = np.array(other.samples.get(name, ()))
        if before.shape == after.shape and before.size > 1:
            return mean_interval(before - after, seed=seed)
    first, second = plain.divergence, other.divergence
    return Estimate(
        first.value - second.value,
        first.low - second.high,
        first.high - second.low,
        min(first.n, second.n),
        method="intervals",
    )


def best_variant(plain: SweepRecord, tried: Iterable[SweepRecord], seed: int = 0) -> SweepRecord:
    """Return the record of the best remedy of a cell, or the plain one.

    A remedy counts where it ended ``ok`` on all samples and is better by an interval that excludes
    zero (or the plain cell did not end ``ok``); of those the least divergent is taken.
    """
    best = plain
    for record in tried:
        if record.status is not Status.OK or record.divergence is None or record.effort != "full":
            continue
        gain = better_by(plain, record, seed)
        saves = plain.status is not Status.OK or (gain is not None and gain.low > 0)
        if saves and (best is plain or _divergence(record) < _divergence(best)):
            best = record
    return best


def with_best_variants(
    plain: Sequence[SweepRecord], tried: Sequence[SweepRecord], seed: int = 0
) -> tuple[SweepRecord, ...]:
    """Return the cells of a sweep, each with its best remedy in its place where one is better."""
    by_cell: dict[tuple[str, str], list[SweepRecord]] = {}
    for record in tried:
        by_cell.setdefault((record.layer, record.format), []).append(record)
    return tuple(best_variant(r, by_cell.get((r.layer, r.format), ()), seed) for r in plain)


def treatments_of(
    formats: Mapping[str, str], records: Iterable[SweepRecord]
) -> dict[str, Treatment]:
    """Return the remedy of each layer whose chosen cell has one, by layer."""
    return {
        r.layer: r.treatment
        for r in records
        if r.treatment is not None and formats.get(r.layer) == r.format
    }


def _least(tried: Callable[[float], tuple[float, Treatment]], alphas: Sequence[float]) -> Treatment:
    found = [tried(alpha) for alpha in alphas]
    return min(found, key=lambda pair: pair[0])[1]


def _divergence(record: SweepRecord) -> float:
    return record.divergence.value if record.divergence is not None else 0.0


def _floored(values: Floats) -> npt.NDArray[np.float64]:
    """Return positive numbers: channels that were never used count as the least that matters."""
    wide = values.astype(np.float64)
    top = float(wide.max()) or 1.0
    return np.maximum(wide, top * _FLOOR)


def _levelled(scale: npt.NDArray[np.float64]) -> Floats:
    """Return a scale whose largest and smallest number are each other's inverse."""
    level = float(np.sqrt(scale.max() * scale.min()))
    levelled: Floats = (scale / level).astype(np.float32)
    return levelled


def _some_outputs(weight: Floats) -> Floats:
    if weight.shape[1] <= _MOST_OUTPUTS:
        return weight
    picked = np.linspace(0, weight.shape[1] - 1, _MOST_OUTPUTS).astype(int)
    return weight[:, picked]


def _int8_rows(rows: Floats, clip: float) -> Floats:
    step = np.float32(clip / 127)
    quantized: Floats = np.clip(np.rint(rows / step), -128, 127) * step
    return quantized


def _int8_weight(weight: Floats) -> Floats:
    integers, scale = per_channel_int8(weight)
    wide: Floats = integers.astype(np.float32) * scale
    return wide


def _squared(values: Floats) -> float:
    return float(np.square(values, dtype=np.float64).sum())
