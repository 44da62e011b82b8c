"""The verdict under the user's load: reference and engine searched for the rate that they carry."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from qbench import judging
from qbench.config import BenchConfig
from qbench.errors import ConfigError
from qbench.judging import PLAN, REFERENCE
from qbench.progress import Listener
from qbench.provenance import installed_versions, sha256_of_file, this_machine
from qbench.records import BenchRun, Verdict, from_dict, to_dict
from qbench.serving.arrivals import Arrivals, Process, read_trace
from qbench.serving.bench import Workload, cores
from qbench.serving.gates import BreakerRules
from qbench.serving.opening import ServeSettings, open_service
from qbench.serving.openload import OpenLoop, drive_open
from qbench.serving.rate import (
    Confirmation,
    Measure,
    RateFound,
    RateTrial,
    Sla,
    confirm,
    judge_rate,
    search_rates,
)
from qbench.serving.service import Gates, Service
from qbench.serving.targets import ServiceTarget, Target
from qbench.serving.verdict import ServingVerdict, reach_verdict, revive_verdict
from qbench.tasks.padding import can_pad
from qbench.workbench import Workbench

#: The search begins at this share of what the closed loop gave the reference.
_START = 0.7
_WARMUP_SHARE = 0.25
_MOST_TRIALS = 24
_FALL = 64.0  # below such a part of the first rate nothing queues: a lower one helps no more
_LEAST_REQUESTS = 10  # of a trial
_MOST_TIMES = 10  # the seconds of a trial, where a trace takes longer to be heard out
#: What of the load a search of rates does not depend on: the closed loop's own, and the price.
_NO_MATTER = ("clients", "rounds", "enough", "seconds", "price_per_hour", "trace")


def measure_sla(work: Workbench, closed: BenchRun, listener: Listener) -> ServingVerdict:
    """Search the highest rate that keeps the SLA, for the reference and the plan's engine.

    What an earlier search found is taken where nothing changed that it depends on. Both are served
    under the same settings and loaded in turns with the user's texts. Where the engine was not
    shown to carry more, a verified plan becomes ``no_gain``.

    Args:
        work: The workbench of a run whose engine was built.
        closed: The closed loop's benchmark: it tells where to begin.
        listener: Hears of progress.

    Raises:
        ConfigError: If no SLA was given, or the trace cannot be read.
    """
    how = work.config.bench
    if how.sla_ms is None:
        raise ConfigError("no SLA was given; name one: --sla-ms 50 (bench.sla_ms)")
    sla, arrivals_of = Sla(how.sla_ms, how.sla_share), arrivals_for(how)
    if (known := known_search(work)) is not None:
        listener.stage("benchmark: rates within the SLA are known from the last search")
        return _decide(work, known.searches, known.confirmation, sla)
    tried = _Tried(work, _START * closed.summaries[0].throughput_rps.value)
    stage = "benchmark: highest rate within the SLA"
    listener.stage(f"{stage}, going on with a search that was stopped" if tried.any else stage)
    texts = list(work.task("verification").texts)
    with ExitStack() as stack:
        measures = {
            name: tried.measure(
                name,
                try_rates(
                    ServiceTarget(stack.enter_context(_serve(work, name))),
                    texts,
                    arrivals_of,
                    (sla, how),
                ),
            )
            for name in (REFERENCE, PLAN)
        }

        def tell(name: str, trial: RateTrial) -> None:
            listener.step(f"{name} {trial.rate:.3g}/s")

        found = search_rates(
            measures,
            tried.start,
            tolerance=how.rate_tolerance,
            least=least_rate(tried.start, how.trial_s),
            most_trials=_MOST_TRIALS,
            on_trial=tell,
        )
        reference, engine = found
        confirmation = confirm(
            (reference, measures[REFERENCE]), (engine, measures[PLAN]), on_trial=tell
        )
    work.run.write_run({"serving_for": conditions_of(work), "serving_search": None})
    return _decide(work, found, confirmation, sla)


class _Tried:
    """Trials of a search as they come: written down, and taken again where it was stopped.

    Args:
        work: The workbench.
        start: Where a new search begins; one that goes on began where it did.
    """

    def __init__(self, work: Workbench, start: float) -> None:
        self._run = work.run
        now, before = conditions_of(work), work.run.read_run().get("serving_search") or {}
        if before.get("for") != now:
            before = {"for": now, "start": start, "trials": {}}
        self.start: float = before["start"]
        self._kept: dict[str, Any] = before
        self._left = {
            name: [from_dict(RateTrial, one) for one in trials]
            for name, trials in before["trials"].items()
        }

    @property
    def any(self) -> bool:
        """Whether trials were taken over."""
        return any(self._left.values())

    def measure(self, name: str, measure: Callable[[float, int], RateTrial]) -> Measure:
        """Return what tries a rate on an engine, with another seed each time that it is asked."""
        times: Counter[float] = Counter()

        def tried(rate: float) -> RateTrial:
            times[rate] += 1
            left = self._left.get(name, [])
            if left and left[0].rate == rate:
                return left.pop(0)
            trial = measure(rate, times[rate] - 1)
            self._kept["trials"].setdefault(name, []).append(to_dict(trial))
            self._run.write_run({"serving_search": self._kept})
            return trial

        return tried


def least_rate(start: float, trial_s: float) -> float:
    """Return the lowest rate to try: far below where queues form, with requests to judge by."""
    return max(start / _FALL, min(start / 2, _LEAST_REQUESTS / (4 * trial_s)))


def _decide(
    work: Workbench, found: Sequence[RateFound], confirmation: Confirmation | None, sla: Sla
) -> ServingVerdict:
    """Reach the verdict on what was found, and write it down."""
    how, (reference, engine) = work.config.bench, found
    verdict = reach_verdict(
        reference,
        engine,
        sla,
        confirmation=confirmation,
        arrivals=how.arrivals,
        price_per_hour=how.price_per_hour,
    )
    work.run.write_run({"serving": to_dict(verdict)})
    _record(work, verdict)
    return verdict


def conditions_of(work: Workbench) -> dict[str, Any]:
    """Return what a search of rates depends on: engine, load, batcher, machine and versions."""
    how = work.config.bench.model_dump(mode="json")
    kept = {key: value for key, value in how.items() if key not in _NO_MATTER}
    facts = work.run.read_run()
    is_trace = how["arrivals"] == Process.TRACE
    return {
        **kept,
        "trace_sha256": sha256_of_file(Path(how["trace"])) if is_trace else None,
        "plan_sha256": facts.get("built_plan_sha256"),
        "model_sha256": work.model.sha256,
        "machine": to_dict(this_machine()),
        "versions": to_dict(installed_versions()),
        "cores": cores(),
    }


def known_search(work: Workbench) -> ServingVerdict | None:
    """Return the last search where nothing changed since that its numbers depend on."""
    if work.run.read_run().get("serving_for") != conditions_of(work):
        return None
    return verdict_under_load(work)


def verdict_under_load(work: Workbench) -> ServingVerdict | None:
    """Return what the last search of a run came to, if there was one."""
    said = work.run.read_run().get("serving")
    return None if said is None else revive_verdict(said)


def arrivals_for(how: BenchConfig) -> Callable[[float], Arrivals]:
    """Return what makes the schedule of a rate.

    Raises:
        ConfigError: If the trace cannot be read.
    """
    process = Process(how.arrivals)
    trace: tuple[float, ...] = ()
    if process is Process.TRACE:
        if how.trace is None:
            raise ConfigError("bench.arrivals is trace, and no file was named: --trace FILE")
        try:
            trace = read_trace(Path(how.trace).read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"bench.trace: {how.trace} cannot be read: {error}") from error
    return lambda rate: Arrivals(rate, process, trace_s=trace)


def workload_of(work: Workbench) -> Workload:
    """Return the user's requests, those of the verification split, as a batcher takes them."""
    texts = list(work.task("verification").texts)
    return Workload(texts, judging.padder(work), judging.encoder(work))


def padding_of(work: Workbench) -> float:
    """Return the share of padding that a batch may have: none where the graph takes no mask."""
    return 0.2 if can_pad(work.model.inputs) else 0.0


def _serve(work: Workbench, name: str) -> Service:
    """Open an engine as the closed loop ran it: a lane of one thread for each core."""
    how = work.config.bench
    settings = ServeSettings(
        lanes=cores(),
        threads_per_lane=1,
        token_budget=how.token_budget,
        max_wait_ms=how.max_wait_ms,
        fixed_size=how.fixed_size,
        queue=how.queue,
        max_padding=padding_of(work),
        pad_id=work.tokenizer.pad_id,
    )
    # NOTE: no breaker: it would answer for the engine, and the search asks what the engine carries.
    gates = Gates(breaker=BreakerRules(refused_share=1.0, failed_share=1.0))
    return open_service(judging.serve_with(work, name), workload_of(work), settings, gates).service


def try_rates(
    target: Target,
    requests: Sequence[Any],
    arrivals_of: Callable[[float], Arrivals],
    how: tuple[Sla, BenchConfig],
) -> Callable[[float, int], RateTrial]:
    """Return what tries a rate on a server, with a seed for the arrivals."""
    sla, config = how

    def measure(rate: float, seed: int) -> RateTrial:
        arrivals = arrivals_of(rate)
        load = OpenLoop(
            arrivals,
            measure_s=trial_seconds(arrivals, config.trial_s),
            warmup_s=_WARMUP_SHARE * config.trial_s,
            drain_s=max(10 * sla.limit_ms / 1e3, 5.0),
            seed=seed,
        )
        steady = arrivals.period_s == 0
        return judge_rate(rate, drive_open(target, requests, load), sla, steady=steady)

    return measure


def trial_seconds(arrivals: Arrivals, least_s: float) -> float:
    """Return how long a rate is measured: long enough for a few requests, and whole periods.

    Half a period of bursts or of a trace would offer another rate than the one asked for. A trace
    that takes ten times as long as was asked for is not heard out.
    """
    wanted_s = max(least_s, _LEAST_REQUESTS / arrivals.rate)
    period_s = arrivals.period_s
    if not 0 < period_s <= _MOST_TIMES * wanted_s:
        return wanted_s
    return math.ceil(wanted_s / period_s) * period_s


def _record(work: Workbench, verdict: ServingVerdict) -> None:
    """Make a verified plan ``no_gain`` where speed was asked for and load shows none."""
    if not verdict.no_gain or judging.gains_by_bytes(work):
        return
    if work.run.read_run().get("verdict") == Verdict.VERIFIED:
        words = f"do not quantize: {verdict.words}"
        work.run.write_run({"verdict": str(Verdict.NO_GAIN), "verdict_words": words})
