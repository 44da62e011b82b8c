"""The page that Prometheus reads."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qbench.gate import require
from qbench.serving.gates import BreakerState
from qbench.serving.request import STAGES, Answer
from qbench.serving.service import Service

if TYPE_CHECKING:
    from prometheus_client import Metric

_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_OUTCOMES = (
    *("accepted", "answered", "refused", "shed", "displaced", "cancelled", "failed", "hung"),
    *("closed", "fallback", "fallback_failed", "default", "refused_by_breaker"),
    *("reruns", "replaced_lanes"),
)
_CHANGES = tuple(f"breaker:{state}" for state in BreakerState)
_ANSWERING = ("infer", "text")
_FAILED = ("429", "500", "503", "504")
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Handled:
    """Requests for answers so far.

    Attributes:
        answered: Those that got theirs.
        failed: Those that were turned away for load or time, or failed in the engine.
        last_s: When the last one was answered, seconds since 1970; 0 before the first.
    """

    answered: int
    failed: int
    last_s: float


class Metrics:
    """Counts of the HTTP face, and the service's own counts as they are when the page is read."""

    def __init__(self, model: str) -> None:
        """Begin at zero; ``model`` is the label of all."""
        prometheus = require("prometheus_client")
        self._model = model
        self._service: Service | None = None
        self._registry = prometheus.CollectorRegistry()
        self._render = prometheus.generate_latest
        self._last_s = 0.0
        self._requests: Counter[tuple[str, str]] = Counter()
        self._rejections: Counter[str] = Counter()
        self._durations: dict[str, _Histogram] = {}
        self._stages = _Histogram(_BOUNDS_S, len(STAGES))
        self._batches = _Histogram(_BATCHES)
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
        self._requests[endpoint, str(code)] += 1
        durations = self._durations.get(endpoint)
        if durations is None:
            durations = self._durations[endpoint] = _Histogram(_BOUNDS_S)
        durations.observe((seconds,))

    def rejected(self, reason: str) -> None:
        """Count a request that got no answer."""
        self._rejections[reason] += 1

    def answered(self, answers: Iterable[Answer]) -> None:
        """Count rows that were answered."""
        self._last_s = time.time()
        for answer in answers:
            if answer.times is not None:
                self._batches.observe((answer.batch_size,))
                self._stages.observe(answer.times.stages_s)

    def handled(self) -> Handled:
        """Return how many requests for answers there were."""
        counts: Counter[str] = Counter()
        for (endpoint, code), count in self._requests.items():
            if endpoint in _ANSWERING:
                counts[code] += count
        failed = sum(counts[code] for code in _FAILED)
        return Handled(counts["200"], failed, self._last_s)

    def page(self) -> bytes:
        """Return the page."""
        return bytes(self._render(self._registry))

    def describe(self) -> list[Metric]:
        """Name no metric ahead: which there are depends on the service."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all counts as metrics; ``prometheus_client`` calls this."""
        yield from self._of_http()
        if self._service is not None:
            yield from self._of_service(self._service)

    def _of_http(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        model = self._model
        words = ("qbench_http_requests", "Requests over HTTP.")
        requests = CounterMetricFamily(*words, labels=["model", "endpoint", "code"])
        for (endpoint, code), count in self._requests.items():
            requests.add_metric([model, endpoint, code], count)
        words = ("qbench_rejections", "Requests without an answer, by why.")
        rejections = CounterMetricFamily(*words, labels=["model", "reason"])
        for reason, count in self._rejections.items():
            rejections.add_metric([model, reason], count)
        words = ("qbench_request_seconds", "From a request's headers to its answer.")
        durations = HistogramMetricFamily(*words, labels=["model", "endpoint"])
        for endpoint, histogram in self._durations.items():
            durations.add_metric([model, endpoint], *histogram.told()[0])
        words = ("qbench_stage_seconds", "Time of answered rows by stage.")
        stages = HistogramMetricFamily(*words, labels=["model", "stage"])
        for stage, told in zip(STAGES, self._stages.told(), strict=True):
            stages.add_metric([model, stage], *told)
        words = ("qbench_batch_size", "Size of the batch that an answered row was in.")
        batches = HistogramMetricFamily(*words, labels=["model"])
        batches.add_metric([model], *self._batches.told()[0])
        yield from (requests, rejections, durations, stages, batches)

    def _of_service(self, service: Service) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats, model = service.stats(), self._model
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


class _Histogram:
    """Observations, sorted into buckets when they are asked for or many of them wait.

    NOTE: one at a time, as ``prometheus_client`` does it, they cost each answer as much as its
    parsing. For one thread.
    """

    _MOST_WAITING = 4096

    def __init__(self, bounds: Sequence[float], series: int = 1) -> None:
        """Take the upper bounds of the buckets and the number of values observed at a time."""
        self._bounds = np.asarray(bounds, np.float64)
        self._counts = np.zeros((series, len(bounds) + 1), np.int64)
        self._sums = np.zeros(series)
        self._waiting: list[Sequence[float]] = []

    def observe(self, values: Sequence[float]) -> None:
        """Take one value of each series."""
        self._waiting.append(values)
        if len(self._waiting) >= self._MOST_WAITING:
            self._sort()

    def _sort(self) -> None:
        if not self._waiting:
            return
        values = np.maximum(np.asarray(self._waiting, np.float64), 0.0)
        self._waiting.clear()
        places = self._bounds.searchsorted(values)
        for series, column in enumerate(places.T):
            self._counts[series] += np.bincount(column, minlength=self._counts.shape[1])
        self._sums += values.sum(axis=0)

    def told(self) -> list[tuple[list[tuple[str, float]], float]]:
        """Return each series' buckets, counts up to each bound, and its sum."""
        self._sort()
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return [
            (list(zip(names, (float(n) for n in np.cumsum(counts)), strict=True)), float(total))
            for counts, total in zip(self._counts, self._sums, strict=True)
        ]
