"""One cell of the sweep: lower, run, compare, judge. A failure is a record, not an exception."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qbench.backends import Backend, applicability
from qbench.errors import MeasurementError, QbenchError
from qbench.lowering import Refusal, lowering_for
from qbench.records import Estimate, Layer, Status, SweepRecord, TensorRange
from qbench.sensitivity.replay import ChangedSegments, Replay
from qbench.statistics import mean_interval, median_interval, paired_drop
from qbench.tasks.base import Array, Scores, Task
from qbench.tasks.outputs import collapsed

#: Batches on which the local error and the paired latency of a cell are taken.
_LOCAL_BATCHES = 6

FP16_MAX = 65504.0


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
    """

    replay: Replay
    task: Task
    reference: Reference
    backend: Backend
    clips: Mapping[str, float]
    ranges: Mapping[str, TensorRange]
    seed: int = 0


def measure_cell(bench: Bench, layer: Layer, format_name: str) -> SweepRecord:
    """Measure one (layer, format) on the sweep split and return its record."""
    started = time.perf_counter()
    base = SweepRecord(
        layer.name,
        layer.kind,
        format_name,
        Status.OK,
        backend=bench.backend.name,
        executed_on=bench.backend.name,
        emulated=format_name in bench.backend.emulated,
    )
    refusal = refuse(bench, layer, format_name)
    if refusal is not None:
        return replace(base, status=refusal.status, reason=refusal.reason, remedy=refusal.remedy)
    try:
        record = _measure(bench, layer, base)
    except (QbenchError, ValueError, KeyError, ArithmeticError) as error:
        record = replace(
            base,
            status=Status.FAILED,
            reason=f"{type(error).__name__}: {error}"[:500],
            remedy="exclude the layer or the format; the other cells go on",
        )
    return replace(record, wall_s=time.perf_counter() - started)


def refuse(bench: Bench, layer: Layer, format_name: str) -> Refusal | None:
    """Return why a cell cannot be measured, or ``None``."""
    status, reason = applicability(layer.kind, format_name, bench.backend)
    if status is not Status.OK:
        return Refusal(status, reason)
    if format_name == bench.backend.high_precision:
        return Refusal(Status.NOT_APPLICABLE, f"{format_name} is the high precision: no change")
    refusal = lowering_for(format_name).requires(bench.replay.model, layer)
    if refusal is not None:
        return refusal
    if format_name == "fp16":
        return _overflow(bench, layer)
    if format_name == "int8":
        missing = [e.tensor for e in layer.edges if e.tensor not in bench.clips]
        if missing:
            return Refusal(
                Status.FAILED,
                f"no range of {', '.join(missing)}: calibration never saw it",
                "calibrate on data that reaches the layer",
            )
    return None


def _overflow(bench: Bench, layer: Layer) -> Refusal | None:
    """Judge fp16 from the ranges: ONNX Runtime on CPU computes it in fp32 and never overflows."""
    for seen in bench.ranges.values():
        own = seen.layer == layer.name or seen.tensor in {u.output for u in layer.occurrences}
        if own and seen.absmax > FP16_MAX:
            what = "an intermediate inside it" if seen.implicit else "its tensor"
            return Refusal(
                Status.INVALID,
                f"fp16 overflows: {what} {seen.tensor!r} reaches {seen.absmax:.6g}, beyond 65504",
                "keep the layer in fp32",
            )
    return None


def _measure(bench: Bench, layer: Layer, base: SweepRecord) -> SweepRecord:
    lowering = lowering_for(base.format)
    clips = bench.clips

    changed = bench.replay.change(layer, lambda model, own: lowering.apply(model, own, clips))
    try:
        wrong = [w for m in changed.models.values() if (w := lowering.ensures(m, layer))]
        if wrong:
            raise MeasurementError(f"the lowering did not take: {wrong[0]}")
        outputs = bench.replay.run_changed(changed)
        latency = _paired_latency(bench.replay, changed)
        bad = _first_non_finite(outputs)
        sqnr_db, cosine = _local_error(bench, layer, base.format)
    finally:
        changed.close()
    record = replace(
        base,
        latency_delta_ms=latency,
        weight_bytes=changed.change.weight_bytes,
        reason=changed.change.remark,
        sqnr_db=sqnr_db,
        cosine=cosine,
    )
    if bad:
        return replace(
            record, status=Status.INVALID, reason=bad, remedy="keep the layer in high precision"
        )
    return judge_cell(bench, record, outputs)


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
        samples=samples,
        reason="; ".join(text for text in (record.reason, said or "") if text),
    )


def _floats(values: Array) -> tuple[float, ...]:
    return tuple(float(v) for v in np.asarray(values, dtype=np.float64).ravel())


def _first_non_finite(outputs: Array) -> str:
    if np.isfinite(outputs).all():
        return ""
    rows = np.argwhere(~np.isfinite(outputs.reshape(len(outputs), -1)).all(axis=1)).ravel()
    return f"outputs are not finite for {len(rows)} of {len(outputs)} items, item {rows[0]} first"


def _paired_latency(replay: Replay, changed: ChangedSegments) -> Estimate:
    """Return the change of the changed segments' time a batch, from interleaved pairs."""
    deltas: list[float] = []
    for batch in local_batches(replay.batches):
        delta = 0.0
        for index, session in changed.sessions.items():
            pair = [min(_timed(replay, index, batch, s) for _ in range(2)) for s in (session, None)]
            delta += pair[0] - pair[1]
        deltas.append(delta * 1e3)
    return median_interval(deltas)


def _timed(replay: Replay, index: int, batch: int, session: object) -> float:
    started = time.perf_counter()
    replay.run_segment(index, batch, session)  # type: ignore[arg-type]
    return time.perf_counter() - started


def local_batches(batches: Sequence[object]) -> list[int]:
    """Return the batches on which local numbers are taken: evenly spread over the lengths."""
    count = min(_LOCAL_BATCHES, len(batches))
    return sorted({int(i) for i in np.linspace(0, len(batches) - 1, count)})


def _local_error(bench: Bench, layer: Layer, format_name: str) -> tuple[float | None, float | None]:
    """Return SQNR (dB) and cosine at the layer's outputs on the local batches."""
    lowering, clips = lowering_for(format_name), bench.clips
    replay = bench.replay
    tapped = replay.change(layer, lambda m, own: lowering.apply(m, own, clips), taps=True)
    signal = noise = dot = other = 0.0
    try:
        for index, session in tapped.sessions.items():
            with replay.open_tapped(index, layer) as plain:
                for batch in local_batches(replay.batches):
                    before = replay.run_segment(index, batch, plain)
                    after = replay.run_segment(index, batch, session)
                    for use in layer.occurrences:
                        if use.output not in before or use.output not in after:
                            continue
                        a = before[use.output].astype(np.float64).ravel()
                        b = after[use.output].astype(np.float64).ravel()
                        signal, noise = signal + a @ a, noise + (a - b) @ (a - b)
                        dot, other = dot + a @ b, other + b @ b
    finally:
        tapped.close()
    return _decibels(signal, noise), _cosine(dot, signal, other)


def _decibels(signal: float, noise: float) -> float | None:
    if signal <= 0 or not np.isfinite(noise):
        return None
    return float(10 * np.log10(signal / noise)) if noise > 0 else 300.0


def _cosine(dot: float, signal: float, other: float) -> float | None:
    if signal <= 0 or other <= 0:
        return None
    return float(dot / np.sqrt(signal * other))
