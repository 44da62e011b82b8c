"""Why a layer suffers in a format: causes with their evidence, from ranges, weights and cells.

Pure: nothing is run. A cause is named where a number stands out, and only for a cell that is in
trouble: its divergence is several times that of the usual cell of its kind and format, its local
error is large, or it is invalid. Amplification is named where nothing of the layer's own stands
out. A cell in trouble for which nothing stands out at all gets no cause.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from qbench.backends import BACKENDS
from qbench.formats import FORMATS, Granularity
from qbench.graph.lint import FP16_MAX
from qbench.records import (
    Cause,
    CauseName,
    Kind,
    Layer,
    Status,
    SweepRecord,
    TensorRange,
    WeightFacts,
)

#: A divergence of so many times the median of its format is trouble.
TROUBLE = 3.0
#: A local error above this many dB is no trouble by itself, by bits of what is rounded.
GOOD_DB: Mapping[int, float] = {8: 32.0, 4: 17.0}
#: Largest channel over the median channel: normal activations stay below 4.
CHANNEL_RATIO = 6.0
#: Squared error of clipping over the squared signal: it alone holds the SQNR at 30 dB.
CLIPPED_SHARE = 1e-3
#: Peak of a block over that of a normal distribution, by bits of the weight.
PEAK_RATIO: Mapping[int, float] = {8: 4.0, 4: 1.5}
#: Divergence for the same local error, over the median of the format.
AMPLIFIED = 10.0
#: A local error so many dB above the median still is a usual one.
NEAR_DB = 2.0
#: Cells that make a median.
_FEWEST = 3
#: Elements of a block, and columns of a weight that are looked at.
_BLOCK, _COLUMNS = 128, 1024


@dataclass(frozen=True, slots=True)
class Clipping:
    """What a clip cuts off a tensor.

    Attributes:
        clip: The clipping magnitude.
        share: Share of elements beyond it.
        error: Squared error of cutting over the sum of squares.
    """

    clip: float
    share: float
    error: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """What causes are looked for in.

    Attributes:
        layers: The layers of the model.
        ranges: What calibration saw, by tensor.
        weights: What the weights look like, by layer.
        clipping: What the clips in use cut off, by tensor.
    """

    layers: Sequence[Layer]
    ranges: Mapping[str, TensorRange]
    weights: Mapping[str, WeightFacts] = field(default_factory=dict)
    clipping: Mapping[str, Clipping] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Usual:
    """Medians over the cells of one kind and format."""

    divergence: float
    sqnr_db: float
    amplification: float


def find_causes(records: Iterable[SweepRecord], evidence: Evidence) -> tuple[Cause, ...]:
    """Return the causes of every cell in trouble, the strongest of a cell first.

    Args:
        records: The plain cells of a sweep.
        evidence: What they are looked for in.
    """
    cells = [record for record in records if record.format != "fp32"]  # which takes nothing away
    layers = {layer.name: layer for layer in evidence.layers}
    alike = {(record.kind, record.format) for record in cells}
    usual = {pair: _usual_of(cells, pair) for pair in alike}
    found: list[Cause] = []
    for record in cells:
        layer = layers.get(record.layer)
        if layer is not None:
            middle = usual[record.kind, record.format]
            own = sorted(_own_causes(record, layer, evidence, middle), key=lambda c: -c.strength)
            found += own or _amplified(record, middle)
    return tuple(found)


def weight_facts(layer: str, weight: npt.NDArray[np.float32]) -> WeightFacts:
    """Return what a weight W [K, N] looks like.

    The typical peak is the 99th percentile of the largest of ``b`` normal magnitudes:
    ``Φ⁻¹((1 + 0.99^(1/b)) / 2)``.
    """
    k, n = weight.shape
    block = next((b for b in range(min(_BLOCK, k), 0, -1) if k % b == 0), k)
    if block < 8:
        block = k
    some = weight[:, :: max(1, n // _COLUMNS)]
    blocks = some.astype(np.float64).reshape(k // block, block, -1)
    rms = np.sqrt(np.square(blocks).mean(axis=1))
    top = np.abs(blocks).max(axis=1)
    peaks = top[rms > 0] / rms[rms > 0]
    centred = blocks - blocks.mean()
    variance = float(np.square(centred).mean())
    fourth = float((np.square(np.square(centred))).mean())
    return WeightFacts(
        layer=layer,
        absmax=float(np.abs(weight).max()),
        kurtosis=fourth / variance**2 - 3 if variance > 0 else 0.0,
        peak=float(np.quantile(peaks, 0.99)) if peaks.size else 0.0,
        typical_peak=statistics.NormalDist().inv_cdf((1 + 0.99 ** (1 / block)) / 2),
    )


def _usual_of(cells: Sequence[SweepRecord], pair: tuple[Kind, str]) -> _Usual | None:
    """Return the medians of a kind in a format; ``None`` where too few cells make none."""
    own = [
        (record.divergence.value, record.sqnr_db)
        for record in cells
        if (record.kind, record.format) == pair
        and record.status is Status.OK
        and record.divergence is not None
        and record.sqnr_db is not None
    ]
    if len(own) < _FEWEST:
        return None
    divergence, sqnr = np.array(own, dtype=np.float64).T
    amplified = divergence * 10 ** (sqnr / 10)
    return _Usual(*(float(np.median(values)) for values in (divergence, sqnr, amplified)))


def _own_causes(
    record: SweepRecord, layer: Layer, evidence: Evidence, usual: _Usual | None
) -> Iterator[Cause]:
    form = FORMATS[record.format]
    over_half = BACKENDS[record.backend].high_precision == "fp16"
    if form.name == "fp16" or (over_half and record.status is Status.INVALID):
        yield from _overflow(record, layer, evidence)
        return
    if record.status is not Status.OK or not _in_trouble(record, usual):
        return
    tensors = {edge.tensor for edge in layer.edges} - {layer.weight}
    ranges = [evidence.ranges[name] for name in sorted(tensors) if name in evidence.ranges]
    per_tensor = form.activation_granularity is Granularity.PER_TENSOR
    if per_tensor:
        yield from _channels(record, ranges)
        if not form.dynamic:
            yield from _clipped(record, evidence, tensors)
    if layer.kind in (Kind.LINEAR, Kind.CONV, Kind.EMBEDDING):
        yield from _weights(record, evidence)


def _in_trouble(record: SweepRecord, usual: _Usual | None) -> bool:
    form = FORMATS[record.format]
    bits = min(form.weight_bits, form.activation_bits)
    if record.sqnr_db is not None and record.sqnr_db < GOOD_DB.get(bits, 0.0):
        return True
    if usual is None or record.divergence is None:
        return False
    return record.divergence.value > TROUBLE * usual.divergence > 0


def _overflow(record: SweepRecord, layer: Layer, evidence: Evidence) -> Iterator[Cause]:
    """Find fp16 tensors beyond 65504: of the layer's edges, outputs and what it computes."""
    names = {edge.tensor for edge in layer.edges} | {use.output for use in layer.occurrences}
    own = [
        seen
        for seen in evidence.ranges.values()
        if (seen.layer == layer.name or seen.tensor in names) and seen.fp16_headroom < 1
    ]
    weight = evidence.weights.get(layer.name)
    if weight is not None and weight.absmax > FP16_MAX:
        words = f"its weight reaches {weight.absmax:.4g}, and fp16 ends at 65504"
        yield _cause(record, CauseName.FP16_OVERFLOW, words, weight.absmax / FP16_MAX)
    if own:
        worst = max(own, key=lambda seen: seen.absmax)
        what = "a value inside it" if worst.implicit else f"{worst.tensor!r}"
        words = f"{what} reaches {worst.absmax:.4g}, and fp16 ends at 65504"
        yield _cause(record, CauseName.FP16_OVERFLOW, words, worst.absmax / FP16_MAX)


def _channels(record: SweepRecord, ranges: Sequence[TensorRange]) -> Iterator[Cause]:
    for seen in ranges:
        channels = np.asarray(seen.channel_absmax, dtype=np.float64)
        used = channels[channels > 0]
        if used.size < 2:
            continue
        median = float(np.median(used))
        ratio = float(used.max()) / median
        if ratio >= CHANNEL_RATIO:
            many = int((used > CHANNEL_RATIO * median).sum())
            words = (
                f"the largest of {channels.size} input channels reaches {used.max():.3g}, the "
                f"median one {median:.3g}: {ratio:.0f} times; {many} stand out"
            )
            yield _cause(record, CauseName.OUTLIER_CHANNELS, words, ratio / CHANNEL_RATIO)


def _clipped(record: SweepRecord, evidence: Evidence, tensors: Iterable[str]) -> Iterator[Cause]:
    for name in sorted(tensors):
        cut, seen = evidence.clipping.get(name), evidence.ranges.get(name)
        if cut is not None and seen is not None and cut.error >= CLIPPED_SHARE:
            words = (
                f"it clips at {cut.clip:.3g} and its input reaches {seen.absmax:.3g}: "
                f"{cut.share:.2g} of the elements are cut, {cut.error:.2g} of their power"
            )
            yield _cause(record, CauseName.CLIPPED_RANGE, words, cut.error / CLIPPED_SHARE)


def _weights(record: SweepRecord, evidence: Evidence) -> Iterator[Cause]:
    facts = evidence.weights.get(record.layer)
    limit = PEAK_RATIO.get(FORMATS[record.format].weight_bits)
    if facts is None or limit is None:
        return
    ratio = facts.peak / facts.typical_peak
    if ratio >= limit:
        words = (
            f"the peak of its blocks is {facts.peak:.1f} times their root mean square, "
            f"{facts.typical_peak:.1f} is typical; excess kurtosis {facts.kurtosis:.3g}"
        )
        yield _cause(record, CauseName.WEIGHT_OUTLIERS, words, ratio / limit)


def _amplified(record: SweepRecord, usual: _Usual | None) -> list[Cause]:
    """Find cells whose own error is usual and whose divergence is large for it."""
    if usual is None or record.sqnr_db is None or record.divergence is None:
        return []
    amplification = record.divergence.value * 10 ** (record.sqnr_db / 10)
    large = record.divergence.value > TROUBLE * usual.divergence
    if not large or record.sqnr_db < usual.sqnr_db - NEAR_DB or usual.amplification <= 0:
        return []
    ratio = amplification / usual.amplification
    if ratio >= AMPLIFIED:
        words = (
            f"its own error is no larger than usual ({record.sqnr_db:.1f} dB, the median is "
            f"{usual.sqnr_db:.1f}) and diverges {ratio:.0f} times as much as elsewhere"
        )
        return [_cause(record, CauseName.AMPLIFICATION, words, ratio / AMPLIFIED)]
    return []


def _cause(record: SweepRecord, name: CauseName, words: str, strength: float) -> Cause:
    return Cause(record.layer, record.format, name, words, strength)
