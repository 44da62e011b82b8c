"""Any server of the Open Inference Protocol under the user's load: rates, latencies, SLA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from qbench import judging
from qbench.progress import Listener, Silence
from qbench.records import Estimate
from qbench.serving.closedload import drive_closed
from qbench.serving.load import ClosedLoop
from qbench.serving.rate import RateFound, RateTrial, Sla, search_rates
from qbench.serving.remote import HttpTarget, OipExchange, read_inputs
from qbench.sla import arrivals_for, least_rate, try_rates
from qbench.workbench import Workbench

_WARMUP_S = 0.5
_MOST_TRIALS = 24
_START = 0.7


@dataclass(frozen=True, slots=True)
class ServerRun:
    """What a server gave under load.

    Attributes:
        url: Address of the model.
        clients: Clients of the closed loop.
        rate: Answers a second in it.
        p50_ms: Median latency in it, with its interval.
        p95_ms: 95th percentile, likewise.
        p99_ms: 99th percentile, likewise.
        statuses: Its requests by what became of them.
        search: The highest rate that keeps the SLA; ``None`` where none was named.
    """

    url: str
    clients: int
    rate: float
    p50_ms: Estimate
    p95_ms: Estimate
    p99_ms: Estimate
    statuses: Mapping[str, int]
    search: RateFound | None


def measure_server(work: Workbench, url: str, listener: Listener | None = None) -> ServerRun:
    """Load a server with a run's verification texts: in a closed loop, and within the SLA.

    Args:
        work: The workbench of the run that names model, texts, load and SLA.
        url: Address of the model there: ``http://HOST:PORT/v2/models/NAME``.
        listener: Hears of progress.

    Raises:
        InputError: If there is no such model, or it reads other inputs.
        MeasurementError: If it answers nothing.
    """
    listener, how = listener or Silence(), work.config.bench
    datatypes = read_inputs(url, [one.name for one in work.model.inputs])
    requests = _requests(work)
    with ExitStack() as stack:
        exchange = stack.enter_context(closing(OipExchange(url, datatypes=datatypes)))
        target = stack.enter_context(closing(HttpTarget(exchange, max(how.clients, 256))))
        listener.stage("benchmark: closed loop")
        load = ClosedLoop(how.clients, how.rounds * how.seconds, _WARMUP_S)
        closed = drive_closed(target, requests, load)
        found = None
        if how.sla_ms is not None:
            listener.stage("benchmark: highest rate within the SLA")
            start = _START * closed.goodput_rps
            sla = Sla(how.sla_ms, how.sla_share)
            tried = try_rates(target, requests, arrivals_for(how), (sla, how))
            seeds: dict[float, int] = {}

            def measure(rate: float) -> RateTrial:
                seeds[rate] = seeds.get(rate, -1) + 1
                return tried(rate, seeds[rate])

            (found,) = search_rates(
                {"server": measure},
                start,
                tolerance=how.rate_tolerance,
                least=least_rate(start, how.trial_s),
                most_trials=_MOST_TRIALS,
                on_trial=lambda name, trial: listener.step(f"{trial.rate:.3g}/s"),
            )
    p50, p95, p99 = (closed.percentile(percent) for percent in (50, 95, 99))
    return ServerRun(
        url, how.clients, closed.goodput_rps, p50, p95, p99, dict(closed.statuses), found
    )


def _requests(work: Workbench) -> Sequence[Mapping[str, Any]]:
    """Return each verification text as all that the graph reads, one row each."""
    encode, pad = judging.encoder(work), judging.padder(work)
    encoded = encode(list(work.task("verification").texts))
    return [{name: rows[0].tolist() for name, rows in pad([one]).items()} for one in encoded]
