"""What serving gave: every request, and statistics of each engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qbench.records.measurements import Estimate


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
        formation_ms: Time in which its batch was padded; 0 in old records, where it counted
            as queue.
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
    formation_ms: float = 0.0


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
        stages_ms: Mean milliseconds by stage: queue, preprocess, formation, inference,
            postprocess.
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
