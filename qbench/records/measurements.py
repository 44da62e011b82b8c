"""What was measured: estimates, ranges, cells, engines and judgements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from qbench.records.layers import Kind
from qbench.records.treatments import Treatment


class Status(StrEnum):
    """How a cell of the sweep ended."""

    OK = "ok"
    INVALID = "invalid"  # ran, and gave non-finite numbers or leaves the format's range
    FAILED = "failed"  # did not lower, load or run
    NOT_APPLICABLE = "not_applicable"  # the format means nothing for this layer
    NOT_YET = "not_yet"  # meaningful, and not offered by this version


class Verdict(StrEnum):
    """How a plan or an engine ended."""

    VERIFIED = "verified"
    FAILED = "failed"
    NOT_RESOLVABLE = "not_resolvable"
    NO_GAIN = "no_gain"
    BUDGET_UNREACHABLE = "budget_unreachable"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its two-sided interval.

    Attributes:
        value: The point estimate.
        low: Lower end of the interval.
        high: Upper end of the interval.
        n: Number of samples behind it.
        level: Coverage of the interval.
        method: How the interval was found (``bootstrap``, ``rule_of_three``, …).
    """

    value: float
    low: float
    high: float
    n: int
    level: float = 0.95
    method: str = "bootstrap"

    @property
    def resolvable(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class TensorRange:
    """What calibration saw at one tensor; padded positions do not count.

    Attributes:
        tensor: Name of the tensor, or of an implicit intermediate (``implicit`` is then true).
        layer: The layer whose edge it is, else the layer that computes it, or "".
        count: Elements seen.
        min: Smallest element.
        max: Largest element.
        absmax: Largest magnitude.
        mean: Mean.
        std: Population standard deviation.
        kurtosis: Excess kurtosis (0 for a normal distribution).
        percentiles: Percentile of magnitude by its name (``"99.9"``), from the histogram.
        channel_absmax: Largest magnitude a channel (last axis); empty where it has no fixed size.
        fp16_headroom: ``65504 / absmax``; below 1 the tensor overflows in fp16.
        implicit: Whether it is an intermediate inside an operator.
        non_finite: Elements that were NaN or infinite, or, where a softmax reads them, below
            −65504, which is a mask's fill (they are in no other figure).
    """

    tensor: str
    layer: str
    count: int
    min: float
    max: float
    absmax: float
    mean: float
    std: float
    kurtosis: float
    percentiles: Mapping[str, float]
    channel_absmax: tuple[float, ...]
    fp16_headroom: float
    implicit: bool = False
    non_finite: int = 0


@dataclass(frozen=True, slots=True)
class SweepRecord:
    """One cell of the sweep: (layer, format) measured on the sweep split.

    Attributes:
        layer: Name of the layer.
        kind: Kind of the layer.
        format: Name of the format.
        status: How it ended; the numbers below are ``None`` unless ``ok``.
        reason: Why it is not ``ok``, or a remark on how it was lowered.
        remedy: What the user can do about it.
        backend: Backend whose lowering was applied.
        executed_on: Backend that ran it.
        emulated: Whether the arithmetic was emulated.
        n: Samples.
        sqnr_db: Signal to quantization noise at the layer's output, dB.
        cosine: Cosine similarity at the layer's output.
        divergence: Mean divergence a sample, ≥ 0.
        drops: Drop of each task metric (> 0 is worse) with its paired interval.
        flip_rate: Share of samples whose answer changed.
        latency_delta_ms: Paired change of the own segment's time a batch, milliseconds.
        weight_bytes: Bytes of the layer's weights and scales in this format.
        wall_s: Seconds that the cell took.
        samples: Raw per-sample numbers by name (``divergence`` and each metric), shape [n].
        p_values: Raw p-value of "no change" by metric; they are adjusted over a run's cells where
            they are shown.
        effort: How much of the samples it took: ``full``, or after how many it stopped and why.
            A cell that stopped has an estimate of the divergence from a part of the samples, on
            the scale of all, its raw numbers as ``sub_pool_1`` …, and no drop.
        treatment: The remedy that its lowering was changed by; ``None`` for the plain one.
        block: Elements of K that share a scale, where the format has blocks.
        host: Host where it was measured, where that is not the run's own.
        regained: Of fp32 beside fp16: the divergence from the model in fp32 that it takes off the
            reference's; above zero is better.
    """

    layer: str
    kind: Kind
    format: str
    status: Status
    reason: str = ""
    remedy: str = ""
    backend: str = "ort-cpu"
    executed_on: str = "ort-cpu"
    emulated: bool = False
    n: int = 0
    sqnr_db: float | None = None
    cosine: float | None = None
    divergence: Estimate | None = None
    drops: Mapping[str, Estimate] = field(default_factory=dict)
    flip_rate: float | None = None
    latency_delta_ms: Estimate | None = None
    weight_bytes: int = 0
    wall_s: float = 0.0
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    p_values: Mapping[str, float] = field(default_factory=dict)
    effort: str = "full"
    treatment: Treatment | None = None
    block: int | None = None
    host: str = ""
    regained: Estimate | None = None

    @property
    def variant(self) -> str:
        """Name of the remedy with its number, or ""."""
        return "" if self.treatment is None else self.treatment.variant


@dataclass(frozen=True, slots=True)
class Fallback:
    """A layer that did not get the format it was asked to take, and why."""

    layer: str
    asked: str
    realised: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A mask's constant that a layer takes as the least number of its format.

    Attributes:
        layer: Name of the layer.
        tensor: The tensor that carries the constant into it.
        constant: Name of the constant.
        value: Its element of largest magnitude.
        becomes: What the layer takes it as; the constant itself where it may stay.
    """

    layer: str
    tensor: str
    constant: str
    value: float
    becomes: float


@dataclass(frozen=True, slots=True)
class Serialized:
    """The serialized engine of a backend that has a builder (TensorRT).

    Attributes:
        path: Its file, relative to the run folder where it lies in one; "" where there is none.
        bytes: Its size.
        sha256: Its hash.
        builder: What made it, with its version; "" where that is not installed.
        targets: Hardware that it was built for; empty for what the builder takes itself.
        shapes: Least, best and most size of each dynamic axis that it was built for.
        network: Layers of the network that the parser read, by kind, counted.
        repeatable: Whether the same graph gives the same bytes here.
        command: The command that builds it, relative to its folder, where it was not built here.
        remark: In words: what has run and what has not.
    """

    path: str = ""
    bytes: int = 0
    sha256: str = ""
    builder: str = ""
    targets: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    network: Mapping[str, int] = field(default_factory=dict)
    repeatable: bool = False
    command: str = ""
    remark: str = ""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What a plan built.

    Attributes:
        name: Name of the engine (``plan``, ``int8``, …).
        path: The ONNX file, relative to the run folder where it lies in one.
        backend: Backend it is for.
        bytes: Size of the ONNX file and its external data.
        sha256: Hash of the ONNX file and its external data.
        asked: Number of layers asked for, by format.
        realised: Number of layers realised, by format, read back from the optimised graph.
        kernels: Operators of the runtime's optimised graph, counted.
        fallbacks: Layers whose format was not realised.
        max_abs_diff: Largest output difference from the reference in the self-test.
        self_test: What the self-test says.
        rewritten: Constants of masks that layers take as the least number of their format.
        executed_on: Backend that ran it in the self-test.
        emulated: Whether that is another backend than the one that it is for.
        casts: Casts that the runtime inserted.
        providers: Nodes of the optimised graph by the execution provider that ran them.
        serialized: The serialized engine, where the backend has a builder.
    """

    name: str
    path: str
    backend: str
    bytes: int
    sha256: str
    asked: Mapping[str, int]
    realised: Mapping[str, int]
    kernels: Mapping[str, int]
    fallbacks: tuple[Fallback, ...] = ()
    max_abs_diff: float = 0.0
    self_test: str = ""
    rewritten: tuple[Rewritten, ...] = ()
    executed_on: str = "ort-cpu"
    emulated: bool = False
    casts: int = 0
    providers: Mapping[str, int] = field(default_factory=dict)
    serialized: Serialized | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """An engine measured against the reference on one split.

    Attributes:
        engine: Name of the engine.
        split: Name of the split (``sweep`` or ``verification``).
        metric: Name of the task metric.
        reference: Value of the metric for the reference.
        value: Value of the metric for the engine.
        drop: Paired drop with its interval (> 0 is worse).
        margin: Largest drop allowed, in the metric's unit; ``None`` where none was asked.
        verdict: ``verified``, ``failed`` or ``not_resolvable``.
        n: Samples.
        n_needed: Samples that would resolve it, where it is not resolvable.
        divergence: Mean divergence with its interval.
        flip_rate: Share of samples whose answer changed.
        cosine: Mean cosine similarity between outputs of engine and reference.
        remark: In words.
        executed_on: Backend that ran the engine's graph.
        emulated: Whether that is another backend than the one that it is for.
    """

    engine: str
    split: str
    metric: str
    reference: float
    value: float
    drop: Estimate
    margin: float | None
    verdict: Verdict
    n: int
    n_needed: int | None
    divergence: Estimate
    flip_rate: float
    cosine: float
    remark: str = ""
    executed_on: str = "ort-cpu"
    emulated: bool = False
