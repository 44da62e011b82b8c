"""Frozen records: what each stage of the pipeline gives to the next one and to the run folder."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar


class Kind(StrEnum):
    """What a layer is."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    CONV = "conv"
    LAYERNORM = "layernorm"
    SOFTMAX = "softmax"
    ATTENTION_SCORES = "attention_scores"
    ATTENTION_CONTEXT = "attention_context"
    KV = "kv"
    ACTIVATION = "activation"
    RESIDUAL_ADD = "residual_add"


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
class Edge:
    """A tensor edge that carries a format: input ``index`` of node ``node`` reads ``tensor``."""

    node: str
    index: int
    tensor: str


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One use of a layer in the graph.

    Attributes:
        op: Canonical operator (``MatMul``, ``Gemm``, ``Gather``, ``Conv``, ``LayerNormalization``,
            ``RMSNormalization``, ``Softmax``, ``Gelu``, ``Add``, ``Identity`` for ``kv``, or the
            operator's own name). A decomposed pattern has the operator that it spells out.
        nodes: Names of the nodes that compute it, in topological order.
        inputs: Tensors that the canonical operator reads, in its order; absent ones are "".
        output: The tensor that it gives; the local error is measured there.
        attributes: Attributes of the canonical operator.
        edges: Tensor edges that carry the layer's format.
    """

    op: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    output: str
    edges: tuple[Edge, ...] = ()
    attributes: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layer:
    """A named group of graph nodes that takes one format.

    Attributes:
        name: Unique name, a module path where the graph tells one.
        kind: What it is.
        occurrences: Its uses; more than one where a model shares a layer.
        module: Module path from the exporter, or "".
        weight: Name of the weight initializer, or "".
        weight_shape: Shape of the weight as stored.
        weight_bytes: Bytes of the weight as stored.
        parameters: Number of weight and bias elements.
        tie: Name shared by layers whose weight is one storage, or "".
    """

    name: str
    kind: Kind
    occurrences: tuple[Occurrence, ...]
    module: str = ""
    weight: str = ""
    weight_shape: tuple[int, ...] = ()
    weight_bytes: int = 0
    parameters: int = 0
    tie: str = ""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes of the layer."""
        return tuple(node for use in self.occurrences for node in use.nodes)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All tensor edges that carry the layer's format."""
        return tuple(edge for use in self.occurrences for edge in use.edges)


@dataclass(frozen=True, slots=True)
class Unlayered:
    """A node that belongs to no layer, and why."""

    node: str
    op: str
    reason: str


@dataclass(frozen=True, slots=True)
class Layers:
    """Every layer of a graph in topological order, and every node that is in none."""

    layers: tuple[Layer, ...]
    unlayered: tuple[Unlayered, ...]

    def by_name(self) -> dict[str, Layer]:
        """Return the layers by name."""
        return {layer.name: layer for layer in self.layers}


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


@dataclass(frozen=True, slots=True)
class Fallback:
    """A layer that did not get the format it was asked to take, and why."""

    layer: str
    asked: str
    realised: str
    reason: str


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


@dataclass(frozen=True, slots=True)
class RequestLatency:
    """One request of a benchmark; times in milliseconds, raw and never edited.

    Attributes:
        engine: Name of the engine that served it.
        round: Index of the interleaved slice that it belongs to.
        start_s: When it was sent, seconds after the benchmark began.
        queue_ms: Time in the queue until its batch was formed.
        preprocess_ms: Time of tokenization.
        inference_ms: Time of its batch in the runtime.
        postprocess_ms: Time from the end of inference until the answer was handed over.
        total_ms: From sending to answer.
        batch_size: Requests in its batch.
        tokens: Its own tokens.
        padded_tokens: Tokens of its batch with padding.
        warmup: Whether it is warm-up and is left out of statistics.
    """

    engine: str
    round: int
    start_s: float
    queue_ms: float
    preprocess_ms: float
    inference_ms: float
    postprocess_ms: float
    total_ms: float
    batch_size: int
    tokens: int
    padded_tokens: int
    warmup: bool = False


@dataclass(frozen=True, slots=True)
class BenchSummary:
    """Statistics of one engine derived from raw latencies.

    Attributes:
        engine: Name of the engine.
        requests: Requests measured (warm-up left out).
        throughput_rps: Requests a second: median over slices, with its interval over slices.
        speedup: Paired throughput ratio to the reference over slices, with interval.
        p50_ms: Median latency.
        p95_ms: 95th percentile of latency.
        p99_ms: 99th percentile of latency.
        stages_ms: Mean milliseconds by stage: queue, preprocess, inference, postprocess.
        batch_sizes: Count of requests by the size of the batch that served them.
        cpu_ms_per_request: CPU time of the process a request.
        rejected: Requests that were refused because the queue was full.
    """

    engine: str
    requests: int
    throughput_rps: Estimate
    speedup: Estimate
    p50_ms: float
    p95_ms: float
    p99_ms: float
    stages_ms: Mapping[str, float]
    batch_sizes: Mapping[int, int]
    cpu_ms_per_request: float
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One interleaved benchmark: raw latencies, summaries and the conditions.

    Attributes:
        conditions: Model, machine, lengths, threads, clients, warm-up, batch limits.
        latencies: Every request.
        summaries: Statistics by engine, the reference first.
    """

    conditions: Mapping[str, Any]
    latencies: tuple[RequestLatency, ...]
    summaries: tuple[BenchSummary, ...]


@dataclass(frozen=True, slots=True)
class PlanLayer:
    """One layer of a plan.

    Attributes:
        name: Name of the layer.
        kind: Kind of the layer.
        format: The format it takes.
        reason: Why it takes it.
        divergence: Divergence of the cell (layer, format) in the sweep; 0 for high precision.
        clips: Clipping magnitude of each edge tensor, for formats that need a range.
        alternatives: Divergence of the other formats that the sweep measured.
    """

    name: str
    kind: Kind
    format: str
    reason: str = ""
    divergence: float | None = None
    clips: Mapping[str, float] = field(default_factory=dict)
    alternatives: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """Layer → format for one backend: the contract between measurement and engine.

    Attributes:
        version: Version of the plan's schema.
        backend: Backend it is for.
        model_source: Where the model came from.
        model_sha256: Hash of the graph and weights that it is for.
        layers: Every layer of the model, in topological order.
        session_options: Session configuration entries of the backend.
        constraints: What was asked: metric, max_drop, objective.
        predicted: What the planner expects: divergence, bytes, seconds.
        measured: What the built engine gave on the sweep split.
        verified: What it gave on the verification split, or ``None`` before.
        history: What was tried, in order.
    """

    version: int
    backend: str
    model_source: str
    model_sha256: str
    layers: tuple[PlanLayer, ...]
    session_options: Mapping[str, str] = field(default_factory=dict)
    constraints: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] | None = None
    verified: Mapping[str, Any] | None = None
    history: tuple[Mapping[str, Any], ...] = ()

    def formats(self) -> dict[str, str]:
        """Return the format of each layer by name."""
        return {layer.name: layer.format for layer in self.layers}


T = TypeVar("T")


def to_dict(record: Any) -> Any:
    """Return a record as plain dictionaries, lists and scalars, ready for JSON or YAML."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: to_dict(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, Mapping):
        return {str(key): to_dict(value) for key, value in record.items()}
    if isinstance(record, StrEnum):
        return str(record)
    if isinstance(record, (tuple, list)):
        return [to_dict(item) for item in record]
    return record


def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
    """Return a record of class ``cls`` from what ``to_dict`` gave; unknown keys are ignored.

    Raises:
        TypeError: If a field without a default is missing.
    """
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{key: _revive(hints[key], value) for key, value in data.items() if key in names})


def _revive(hint: Any, value: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if value is None:
        return None
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        return _revive(inner[0], value) if len(inner) == 1 else value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_dict(hint, value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    if origin is tuple:
        inner_hint = args[0] if args else Any
        return tuple(_revive(inner_hint, item) for item in value)
    if origin is not None and isinstance(value, Mapping):
        key_hint, value_hint = args if args else (Any, Any)
        return {_revive_key(key_hint, k): _revive(value_hint, v) for k, v in value.items()}
    return value


def _revive_key(hint: Any, key: Any) -> Any:
    return int(key) if hint is int else key
