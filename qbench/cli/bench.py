"""``qbench bench``: engines under load in the batcher, and the verdict under the user's load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qbench.cli.answers import Answer, answering
from qbench.cli.options import NOTHING, number_or_nothing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from qbench.config import BenchConfig
    from qbench.records import BenchRun
    from qbench.serving.baseline import Difference
    from qbench.serving.rate import RateFound
    from qbench.serving.verdict import ServingVerdict
    from qbench.workbench import Workbench

_OPTIONS = {
    "clients": "bench.clients",
    "rounds": "bench.rounds",
    "seconds": "bench.seconds",
    "token_budget": "bench.token_budget",
    "max_wait_ms": "bench.max_wait_ms",
    "fixed_size": "bench.fixed_size",
    "sla_ms": "bench.sla_ms",
    "arrivals": "bench.arrivals",
    "trace": "bench.trace",
    "trial_seconds": "bench.trial_s",
    "price_per_hour": "bench.price_per_hour",
}
_TAKEN_BACK = ("fixed_size", "sla_ms", "price_per_hour")


@click.command(
    "bench",
    epilog="""\b
Examples:
  qbench bench results/demo
  qbench bench results/demo --clients 50 --rounds 10
  qbench bench results/demo/plan.yaml --sla-ms 50 --price-per-hour 0.34
  qbench bench results/demo --sla-ms 80 --arrivals trace --trace arrivals.txt
  qbench bench results/demo --save-baseline baseline.json
  qbench bench results/demo --against baseline.json
  qbench bench results/demo --sla-ms 50 --url http://localhost:8000/v2/models/demo
""",
)
@click.argument("run")
@click.option("--clients", type=int, metavar="N", help="Clients of the closed loop.")
@click.option("--rounds", type=int, metavar="N", help="Most interleaved slices.")
@click.option("--seconds", type=float, metavar="S", help="Measured seconds of a slice.")
@click.option("--token-budget", type=int, metavar="N", help="Padded tokens of a batch.")
@click.option("--max-wait-ms", type=float, metavar="MS", help="Longest wait for a fuller batch.")
@click.option(
    "--fixed-size",
    callback=number_or_nothing,
    metavar="N",
    help="Batches of N in order of arrival, to compare, or none.",
)
@click.option(
    "--sla-ms",
    callback=number_or_nothing,
    metavar="MS",
    help="Search the highest rate at which 99 % of requests are answered within MS, or none.",
)
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "constant", "bursts", "trace"]),
    help="How requests arrive in that search (poisson).",
)
@click.option("--trace", metavar="FILE", help="Recorded arrivals, one time in seconds a line.")
@click.option(
    "--trial-seconds", type=float, metavar="S", help="Measured seconds of one rate, or more."
)
@click.option(
    "--price-per-hour",
    callback=number_or_nothing,
    metavar="P",
    help="Price of this machine in any currency, or none.",
)
@click.option("--again", is_flag=True, help="Search rates again, though nothing changed.")
@click.option(
    "--url",
    metavar="URL",
    help="Load this server instead: http://HOST:PORT/v2/models/NAME (Triton, qbench serve, …).",
)
@click.option("--save-baseline", metavar="FILE", help="Write the numbers and their conditions.")
@click.option("--against", metavar="FILE", help="Compare with a baseline of equal conditions.")
@answering()
def command(
    run: str,
    again: bool,
    url: str | None,
    save_baseline: str | None,
    against: str | None,
    **options: Any,
) -> Answer:
    """Measure engines under load in the batcher, and say what they carry.

    RUN is the folder of a run whose engine was built, or the plan in it. Reference and engines
    are served in turns within one run, to clients that send the verification split's texts.
    With --sla-ms an open loop then searches the highest rate at which reference and engine keep
    it, and the verdict says whether the engine carries more. The run remembers --sla-ms (none
    forgets it); later calls search again only where plan, load, limits, machine or versions
    changed, or with --again. A search that was stopped goes on with the same command.

    With --url a server of the Open Inference Protocol v2 is loaded in their place, by the same
    clients and within the same SLA; it says what that server carries, and gives no verdict.
    """
    from qbench.cli.bars import ProgressBars
    from qbench.cli.reopening import reopened
    from qbench.pipeline import bench
    from qbench.serving.baseline import check_alike, check_writable, read_baseline
    from qbench.sla import known_search, verdict_under_load

    if url is not None:
        return _bench_server(run, url, options, (again, save_baseline, against))
    before = None if against is None else read_baseline(Path(against))
    if save_baseline is not None:
        check_writable(Path(save_baseline))
    with reopened(_run_of(run), _given(options)) as work:
        how = work.config.bench
        _check_search(how, options)
        if before is not None:
            check_alike(before, _conditions(work))
        if again:
            work.run.write_run({"serving_for": None})
        reused = how.sla_ms is not None and known_search(work) is not None
        with ProgressBars() as bars:
            measured = bench(work, bars)
    verdict = None if how.sla_ms is None else verdict_under_load(work)
    changes = _compare(work, measured, before, save_baseline)
    return _answer(work, verdict, changes, reused)


def _bench_server(run: str, url: str, options: Mapping[str, Any], others: Sequence[Any]) -> Answer:
    """Load a server with the run's texts."""
    from qbench.cli.bars import ProgressBars
    from qbench.cli.reopening import reopened
    from qbench.errors import InputError
    from qbench.remote import measure_server

    if any(others):
        raise InputError("--url: got --again or a baseline too; those belong to the run's engines")
    with reopened(_run_of(run), _given(options)) as work, ProgressBars() as bars:
        _check_search(work.config.bench, options)
        measured = measure_server(work, url, bars)

    def show(console: Console) -> None:
        console.print(f"{measured.clients} clients: {measured.rate:.4g} answers/s", markup=False)
        for name in ("p50", "p95", "p99"):
            found = getattr(measured, f"{name}_ms")
            words = f"{found.value:.3g} ms [{found.low:.3g}, {found.high:.3g}]"
            console.print(f"  {name.upper()} {words}", markup=False)
        became = ", ".join(f"{count} {status}" for status, count in measured.statuses.items())
        console.print(f"  requests: {became}", markup=False)
        if measured.search is not None:
            _show_found(console, measured.search)

    return Answer({"run": str(work.run.path), "server": measured}, show)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given, by the names that the configuration has for them."""
    given = {
        _OPTIONS[key]: None if value == NOTHING and key in _TAKEN_BACK else value
        for key, value in options.items()
        if value is not None
    }
    if options["trace"] is not None:
        given.setdefault("bench.arrivals", "trace")
        given["bench.trace"] = str(Path(options["trace"]).resolve())
    return given


def _check_search(how: BenchConfig, options: Mapping[str, Any]) -> None:
    """Refuse a search that could not be made, before anything is measured.

    Raises:
        InputError: If there is no SLA to search for, or the trace cannot be read.
    """
    from qbench.errors import InputError
    from qbench.sla import arrivals_for

    searched = ("arrivals", "trace", "trial_seconds", "price_per_hour")
    if how.sla_ms is not None:
        arrivals_for(how)(1.0)
    elif any(options[name] not in (None, NOTHING) for name in searched):
        raise InputError(
            "--arrivals, --trace, --trial-seconds and --price-per-hour belong to the search of a "
            "rate, which needs --sla-ms MS: the latency that 99 % of requests must keep"
        )


def _run_of(given: str) -> str:
    """Return the run's folder for a folder or a plan that lies in one."""
    path = Path(given)
    return str(path.parent) if path.name == "plan.yaml" and path.is_file() else given


def _facts() -> dict[str, Any]:
    from qbench.provenance import installed_versions, this_machine

    return {"versions": installed_versions(), "machine": this_machine()}


def _conditions(work: Workbench) -> dict[str, Any]:
    """Return the conditions of a baseline that are known before anything is measured."""
    from qbench.records import to_dict

    how = work.config.bench
    named = ("clients", "token_budget", "max_wait_ms", "fixed_size", "queue")
    chosen = {name: getattr(how, name) for name in named}
    return {**to_dict(_facts()), "model_sha256": work.model.sha256, **chosen}


def _compare(
    work: Workbench, measured: BenchRun, before: Any, save_to: str | None
) -> tuple[Difference, ...]:
    """Write this benchmark as a baseline where asked for, and compare it with another one."""
    from qbench.serving.baseline import baseline_of, compare, write_baseline

    now = baseline_of(measured, _facts())
    if save_to is not None:
        write_baseline(Path(save_to), now)
    return () if before is None else compare(before, now)


def _answer(
    work: Workbench, verdict: ServingVerdict | None, changes: tuple[Difference, ...], reused: bool
) -> Answer:
    from qbench.cli.outcome import outcome_of

    outcome = outcome_of(work)
    content = {
        **outcome.content,
        "serving": verdict,
        "serving_reused": reused,
        "against": [
            {"engine": one.engine, "number": one.number, "before": one.before, "now": one.now,
             "ratio": one.ratio}
            for one in changes
        ],
    }  # fmt: skip

    def show(console: Console) -> None:
        if outcome.show is not None:
            outcome.show(console)
        if verdict is not None:
            _show_verdict(console, verdict)
            if reused:
                words = "rates of the last search: nothing changed since; --again searches again"
                console.print(f"  {words}", markup=False)
        for one in changes:
            console.print(
                f"against the baseline: {one.engine} {one.number} {one.before:.4g} -> "
                f"{one.now:.4g} ({one.ratio:.2f}x)",
                markup=False,
            )

    return Answer(content, show, outcome.verdict)


def _show_verdict(console: Console, verdict: ServingVerdict) -> None:
    console.print(f"under load: {verdict.words}", markup=False)
    for found in verdict.searches:
        _show_found(console, found, verdict.cost_per_million.get(found.name))
    late = [trial.generator_late for found in verdict.searches for trial in found.trials]
    if any(late):
        console.print(
            f"  the load generator was late by a tenth of the SLA or more in {sum(late)} of "
            f"{len(late)} trials; that counts against the engine",
            markup=False,
        )


def _show_found(console: Console, found: RateFound, cost: float | None = None) -> None:
    held = found.held
    price = "" if cost is None else f", {cost:.4g} a million requests"
    tail = ""
    if held is not None and held.p99_ms is not None:
        tail = f", P99 there {held.p99_ms.value:.3g} ms"
    fails = "" if found.above is None else f"; fails at {found.above:.4g}"
    least = "at least " if found.above is None else ""
    console.print(
        f"  {found.name}: {least}{found.rate:.4g} requests/s within the SLA{tail}{price}{fails}",
        markup=False,
    )
