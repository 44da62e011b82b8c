"""One cell of the sweep: lower, run, compare, judge. A failure is a record, not an exception."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from qbench.backends import Backend, Variant, applicability
from qbench.errors import MeasurementError
from qbench.graph.intermediates import nodes_by_name
from qbench.lowering import Lowering, Refusal, lowering_for, unusable_clips
from qbench.lowering.fp32 import why_wide
from qbench.lowering.overflow import overflow_of
from qbench.lowering.treated import treated
from qbench.records import Estimate, Layer, Status, SweepRecord, TensorRange, Treatment
from qbench.sensitivity.diagnosis import find_non_finite
from qbench.sensitivity.multiplicity import p_values
from qbench.sensitivity.regained import Truth, measure_regained, regained_words
from qbench.sensitivity.replay import Replay
from qbench.sensitivity.timing import paired_latency, spread_batches
from qbench.statistics import mean_interval, paired_drop
from qbench.tasks.base import Array, Scores, Task
from qbench.tasks.outputs import collapsed

#: Batches on which the local error of a cell is taken.
_LOCAL_BATCHES = 6
#: SQNR of an output that did not change.
_MOST_DB = 300.0


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference on the sweep split.

    Attributes:
        outputs: Outputs of all items, shape [items, …].
        scores: What the task says of them.
    """

    outputs: Array
    scores: Scores


@dataclass(frozen=True, slots=True)
class Bench:
    """What every cell of one sweep shares.

    Attributes:
        replay: The cut graph with its reference activations.
        task: The task on the sweep split.
        reference: The reference's outputs and scores.
        backend: Backend whose lowering is applied.
        clips: Clipping magnitude of each edge tensor.
        ranges: What calibration saw, by tensor.
        seed: Seed of the resamples.
        family: Number of p-values that will be adjusted together.
        refusals: What ``refuse`` has said of untreated cells; it is asked several times of each.
        timing: Replay of the batches that times are measured on; ``None`` where those of
            ``replay`` serve.
        truth: The model in fp32, where that is not what the reference is in.
    """

    replay: Replay
    task: Task
    reference: Reference
    backend: Backend
    clips: Mapping[str, float]
    ranges: Mapping[str, TensorRange]
    seed: int = 0
    family: int = 1
    refusals: dict[tuple[str, str], Refusal | None] = field(
        default_factory=dict, compare=False, repr=False
    )
    timing: Replay | None = None
    truth: Truth = field(default_factory=Truth, compare=False, repr=False)

    def close(self) -> None:
        """Free the sessions and the kept activations."""
        if self.timing is not None:
            self.timing.close()
        self.replay.close()


def measure_cell(
    bench: Bench,
    layer: Layer,
    format_name: str,
    outputs_only: bool = False,
    treatment: Treatment | None = None,
) -> SweepRecord:
    """Measure one (layer, format) on the sweep split and return its record.

    Args:
        bench: What the cells share.
        layer: The layer.
        format_name: The format.
        outputs_only: Whether latency and local error are left out; a race knows them already.
        treatment: A remedy that changes the lowering; ``None`` for the plain one.
    """
    started = time.perf_counter()
    base = replace(base_record(bench, layer, format_name), treatment=treatment)
    refusal = refuse(bench, layer, format_name, treatment)
    if refusal is not None:
        return replace(base, status=refusal.status, reason=refusal.reason, remedy=refusal.remedy)
    try:
        record = _measure(bench, layer, base, outputs_only)
    except Exception as error:  # whatever one cell runs into is its record: the others go on
        record = replace(
            base,
            status=Status.FAILED,
            reason=f"{type(error).__name__}: {error}"[:500],
            remedy="exclude the layer or the format; the other cells go on",
        )
    return replace(record, wall_s=time.perf_counter() - started)


def base_record(bench: Bench, layer: Layer, format_name: str) -> SweepRecord:
    """Return the record of a cell of which nothing was measured yet."""
    return SweepRecord(
        layer.name,
        layer.kind,
        format_name,
        Status.OK,
        backend=bench.backend.name,
        executed_on=bench.backend.executed_on,
        emulated=bench.backend.emulates(layer.kind, format_name),
    )


def refuse(
    bench: Bench, layer: Layer, format_name: str, treatment: Treatment | None = None
) -> Refusal | None:
    """Return why a cell cannot be measured, or ``None``."""
    if treatment is not None:
        return _refuse(bench, layer, format_name, treatment)
    key = (layer.name, format_name)
    if key not in bench.refusals:
        bench.refusals[key] = _refuse(bench, layer, format_name, None)
    return bench.refusals[key]


def _refuse(
    bench: Bench, layer: Layer, format_name: str, treatment: Treatment | None
) -> Refusal | None:
    status, reason = applicability(layer.kind, format_name, bench.backend)
    if status is not Status.OK:
        return Refusal(status, reason)
    if bench.backend.variant is Variant.ISLANDS:
        kept = _refuse_kept(bench, layer, format_name)
        if kept is not None:
            return kept
    if format_name == bench.backend.high_precision:
        return Refusal(Status.NOT_APPLICABLE, f"{format_name} is the high precision: no change")
    lowering = treated(lowering_for(format_name, backend=bench.backend), treatment)
    refusal = lowering.requires(bench.replay.model, layer)
    if refusal is not None:
        return refusal
    if format_name == "fp16" and (words := _overflow(bench, layer)):
        return Refusal(Status.INVALID, words, "keep the layer in fp32")
    if lowering_for(format_name, backend=bench.backend).format.needs_range:
        unusable = unusable_clips(layer, bench.clips)
        if unusable:
            return Refusal(
                Status.FAILED,
                "; ".join(f"{tensor!r} {why}" for tensor, why in unusable.items()),
                "calibrate on data that reaches the layer",
            )
    return None


def _refuse_kept(bench: Bench, layer: Layer, format_name: str) -> Refusal | None:
    """Return why a layer that fp16 cannot hold takes no other format, or ``None``.

    What is quantized would be rescaled to fp16, and so overflow as well.
    """
    words = why_wide(nodes_by_name(bench.replay.model.graph), layer)
    if not words:
        return None
    if format_name == "fp32":
        return Refusal(Status.NOT_APPLICABLE, f"the layer is kept in fp32 as it is: {words}")
    return Refusal(Status.INVALID, words, "none is needed: the layer is kept in fp32")


def _overflow(bench: Bench, layer: Layer) -> str:
    """Judge fp16 from the ranges: ONNX Runtime on CPU computes it in fp32 and never overflows."""
    return overflow_of(nodes_by_name(bench.replay.model.graph), layer, bench.ranges)


def _measure(bench: Bench, layer: Layer, base: SweepRecord, outputs_only: bool) -> SweepRecord:
    lowering = treated(lowering_for(base.format, backend=bench.backend), base.treatment)
    clips = bench.clips

    changed = bench.replay.change(layer, lambda model, own: lowering.apply(model, own, clips))
    try:
        wrong = [w for m in changed.models.values() if (w := lowering.ensures(m, layer))]
        if wrong:
            raise MeasurementError(f"the lowering did not take: {wrong[0]}")
        if not changed.change.changed:
            raise MeasurementError("the lowering changed nothing: the graph holds no such node")
        outputs = bench.replay.run_changed(changed)
        bad = find_non_finite(bench.replay, changed, outputs)
        if bad:
            remedy = "keep the layer in high precision"
            return replace(base, status=Status.INVALID, reason=bad, remedy=remedy)
        latency = None if outputs_only else paired_latency(bench.timing or bench.replay, changed)
    finally:
        changed.close()
    local = (None, None) if outputs_only else _local_error(bench, layer, lowering)
    record = replace(
        base,
        latency_delta_ms=latency,
        weight_bytes=changed.change.weight_bytes,
        block=changed.change.block,
        reason=changed.change.remark,
        sqnr_db=local[0],
        cosine=local[1],
    )
    return _with_regained(bench, judge_cell(bench, record, outputs), outputs)


def _with_regained(bench: Bench, record: SweepRecord, outputs: Array) -> SweepRecord:
    """Add what a layer in fp32 gives back of what the reference in fp16 lost."""
    if record.format != "fp32":
        return record
    truth = bench.truth.outputs(bench.replay)
    found = measure_regained(bench.task, truth, bench.reference.outputs, outputs, bench.seed)
    words = (record.reason, regained_words(found))
    return replace(record, regained=found, reason="; ".join(text for text in words if text))


def judge_cell(bench: Bench, record: SweepRecord, outputs: Array) -> SweepRecord:
    """Add what the task says of a cell's outputs to its record."""
    reference = bench.reference
    divergence = bench.task.divergence(reference.outputs, outputs)
    scores = bench.task.score(outputs, reference.outputs)
    drops: dict[str, Estimate] = {}
    samples = {"divergence": _floats(divergence)}
    for metric in bench.task.metrics:
        before, after = reference.scores.payloads[metric.name], scores.payloads[metric.name]
        drops[metric.name] = paired_drop(metric, before, after, seed=bench.seed)
        if after.ndim == 1 or after.shape[1] == 1:
            samples[metric.name] = _floats(after)
    said = collapsed(outputs)
    return replace(
        record,
        n=bench.task.n,
        divergence=mean_interval(divergence, seed=bench.seed),
        drops=drops,
        flip_rate=float(np.mean(scores.answers != reference.scores.answers)),
        p_values=p_values(
            bench.task.metrics, reference.scores, scores, seed=bench.seed, family=bench.family
        ),
        samples=samples,
        reason="; ".join(text for text in (record.reason, said or "") if text),
    )


def _floats(values: Array) -> tuple[float, ...]:
    return tuple(float(v) for v in np.asarray(values, dtype=np.float64).ravel())


def _local_error(
    bench: Bench, layer: Layer, lowering: Lowering
) -> tuple[float | None, float | None]:
    """Return SQNR (dB) and cosine at the layer's outputs, over all its uses.

    NOTE: the session that gives the layer's outputs is another one than the cell's. An output in
    the middle keeps the runtime from joining the nodes around it: for 8 of 102 cells of a small
    encoder the scored outputs then move by 1e-7 and the divergence by up to 2e-5 of itself, and
    the time would be that of a graph that is never shipped.
    """
    clips, replay = bench.clips, bench.replay
    batches = spread_batches(replay.batches, _LOCAL_BATCHES)
    homes = replay.segments_of(layer)
    before = {index: replay.reference_taps(index, layer, batches) for index in homes}
    tapped = replay.change(layer, lambda m, own: lowering.apply(m, own, clips), taps=True)
    sums = np.zeros(4)
    try:
        for index, session in tapped.sessions.items():
            for batch, expected in zip(batches, before[index], strict=True):
                after = replay.run_segment(index, batch, session, tuple(expected))
                for name, value in expected.items():
                    a = value.astype(np.float64).ravel()
                    b = after[name].astype(np.float64).ravel()
                    sums += [a @ a, (a - b) @ (a - b), a @ b, b @ b]
    finally:
        tapped.close()
    signal, noise, dot, other = (float(value) for value in sums)
    return _decibels(signal, noise), _cosine(dot, signal, other)


def _decibels(signal: float, noise: float) -> float | None:
    if signal <= 0 or not np.isfinite([signal, noise]).all():
        return None
    return min(float(10 * np.log10(signal / noise)), _MOST_DB) if noise > 0 else _MOST_DB


def _cosine(dot: float, signal: float, other: float) -> float | None:
    if signal <= 0 or other <= 0 or not np.isfinite([dot, signal, other]).all():
        return None
    return float(np.clip(dot / np.sqrt(signal * other), -1.0, 1.0))
