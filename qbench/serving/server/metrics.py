"""The page that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from qbench.gate import require
from qbench.serving.gates import BreakerState
from qbench.serving.request import Answer
from qbench.serving.service import Service

if TYPE_CHECKING:
    from prometheus_client import Metric

STAGES = ("queue", "preprocess", "formation", "inference", "postprocess")
_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_OUTCOMES = (
    *("accepted", "answered", "refused", "shed", "displaced", "cancelled", "failed", "hung"),
    *("closed", "fallback", "default", "reruns", "replaced_lanes"),
)
_CHANGES = tuple(f"breaker:{state}" for state in BreakerState)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counts of the HTTP face, and the service's own counts as they are when the page is read."""

    def __init__(self, model: str) -> None:
        """Begin at zero; ``model`` is the label of all."""
        prometheus = require("prometheus_client")
        prometheus.disable_created_metrics()  # a second series for each, which nobody reads
        self._model = model
        self._service: Service | None = None
        self._registry = prometheus.CollectorRegistry()
        self._render = prometheus.generate_latest
        make = {"registry": self._registry}
        self._requests = prometheus.Counter(
            "qbench_http_requests", "Requests over HTTP.", ["model", "endpoint", "code"], **make
        )
        self._rejections = prometheus.Counter(
            "qbench_rejections", "Requests without an answer, by why.", ["model", "reason"], **make
        )
        self._duration = prometheus.Histogram(
            "qbench_request_seconds",
            "From a request's headers to its answer.",
            ["model", "endpoint"],
            buckets=_BOUNDS_S,
            **make,
        )
        self._stage = prometheus.Histogram(
            "qbench_stage_seconds",
            "Time of answered rows by stage.",
            ["model", "stage"],
            buckets=_BOUNDS_S,
            **make,
        )
        self._batch = prometheus.Histogram(
            "qbench_batch_size",
            "Size of the batch that an answered row was in.",
            ["model"],
            buckets=_BATCHES,
            **make,
        )
        self._stages = [self._stage.labels(model, stage) for stage in STAGES]
        self._batches = self._batch.labels(model)
        self._registry.register(self)

    @property
    def content_type(self) -> str:
        """The type of the page."""
        return str(require("prometheus_client").CONTENT_TYPE_LATEST)

    def attach(self, service: Service) -> None:
        """Show this service's counts from now on."""
        self._service = service

    def requested(self, endpoint: str, code: int, seconds: float) -> None:
        """Count a request over HTTP."""
        self._requests.labels(self._model, endpoint, str(code)).inc()
        self._duration.labels(self._model, endpoint).observe(seconds)

    def rejected(self, reason: str) -> None:
        """Count a request that got no answer."""
        self._rejections.labels(self._model, reason).inc()

    def answered(self, answers: Iterable[Answer]) -> None:
        """Count rows that were answered."""
        for answer in answers:
            if answer.times is None:
                continue
            self._batches.observe(answer.batch_size)
            for stage, seconds in zip(self._stages, answer.times.stages_s, strict=True):
                stage.observe(max(seconds, 0.0))

    def page(self) -> bytes:
        """Return the page."""
        return bytes(self._render(self._registry))

    def describe(self) -> list[Metric]:
        """Name no metric ahead: which there are depends on the service."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the service's counts as metrics; ``prometheus_client`` calls this."""
        if self._service is None:
            return
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats, model = self._service.stats(), self._model
        counters: dict[tuple[str, str, str], Mapping[Any, float]] = {
            ("qbench_rows", "Rows by what became of them.", "outcome"): {
                **dict.fromkeys(_OUTCOMES, 0),
                **stats.counts,
            },
            ("qbench_batches", "Batches by why they went.", "reason"): stats.dispatches,
            ("qbench_batches_of_size", "Batches by their size.", "size"): stats.batch_sizes,
            ("qbench_transitions", "Changes of gates.", "change"): {
                **dict.fromkeys(_CHANGES, 0),
                **stats.transitions,
            },
            ("qbench_tokens", "Tokens computed, own and padding.", "kind"): {
                "own": stats.tokens[0],
                "padding": stats.tokens[1] - stats.tokens[0],
            },
        }
        for (name, words, label), values in counters.items():
            family = CounterMetricFamily(name, words, labels=["model", label])
            for value, count in values.items():
                family.add_metric([model, str(value)], float(count))
            yield family
        states = {state: float(stats.breaker is state) for state in BreakerState}
        breaker = GaugeMetricFamily("qbench_breaker", "Its state.", labels=["model", "state"])
        for state, on in states.items():
            breaker.add_metric([model, str(state)], on)
        yield breaker
        gauges = {
            "qbench_queue_rows": ("Rows in no batch yet.", stats.queued),
            "qbench_lanes": ("Lanes.", stats.lanes),
            "qbench_busy_lanes": ("Lanes that run a batch.", stats.busy_lanes),
            "qbench_batch_scale": ("Share of the batch limit in use.", stats.batch_scale),
        }
        if stats.memory is not None:
            gauges["qbench_memory_used_bytes"] = ("Memory in use.", stats.memory.used)
            gauges["qbench_memory_limit_bytes"] = ("Memory that may be used.", stats.memory.limit)
        for name, (words, value) in gauges.items():
            gauge = GaugeMetricFamily(name, words, labels=["model"])
            gauge.add_metric([model], float(value))
            yield gauge
