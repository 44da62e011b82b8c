"""``qbench serve``: an engine over HTTP, by the Open Inference Protocol v2."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qbench.cli.batching import Duration, batching_options
from qbench.gate import check_runtime, require

if TYPE_CHECKING:
    from qbench.hosting import Hosting, HostOptions

_MOST_TOKENS = 1 << 20
_SWITCH_S = 0.001


@click.command(
    "serve",
    epilog="""\b
Examples:
  qbench serve results/demo
  qbench serve results/demo/plan.yaml --port 0 --json
  qbench serve engines/mine --tokenizer ./tokenizer --max-length 256 --too-long truncate
  qbench serve results/demo --engine reference --fallback results/demo --breaker-p99-ms 80
  qbench serve results/demo --default-answer none.json --breaker-p99-ms 80
  curl localhost:8000/text -H 'Content-Type: application/json' -d '{"text": "hello"}'
""",
)
@click.argument("plan_or_engine")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on; 0.0.0.0 for all.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    metavar="N",
    help="Port; 0 takes a free one, which is printed.",
)
@click.option("--name", metavar="NAME", help="Name of the model; that of run or file by default.")
@click.option("--engine", metavar="NAME", help="Engine of a run: plan (default), reference, int8 …")
@click.option("--tokenizer", metavar="SPEC", help="Folder, module:callable or file.py:callable.")
@click.option("--texts", metavar="FILE", help="Texts, one a line, to calibrate lanes and batches.")
@click.option(
    "--max-length",
    type=click.IntRange(1),
    metavar="N",
    help="Longest request in tokens; the tokenizer's, or what the engine runs on, by default.",
)
@click.option(
    "--too-long",
    type=click.Choice(["refuse", "truncate"]),
    default="refuse",
    show_default=True,
    help="What becomes of longer ones.",
)
@click.option("--lanes", type=click.IntRange(1), metavar="N", help="Lanes; calibrated by default.")
@click.option("--threads-per-lane", type=click.IntRange(1), metavar="N", help="Threads of each.")
@click.option(
    "--token-budget", type=click.IntRange(1), metavar="N", help="Padded tokens of a batch."
)
@click.option(
    "--fixed-size", type=click.IntRange(1), metavar="N", help="Batches of N in order of arrival."
)
@batching_options("rows")
@click.option("--sla-ms", type=float, metavar="MS", help="P99 that batches are sized for.")
@click.option(
    "--tenant",
    "tenants",
    multiple=True,
    metavar="NAME=WEIGHT",
    help="Share of a tenant (1 by default); repeat it.",
)
@click.option("--fallback", metavar="ENGINE", help="Engine that answers where this one cannot.")
@click.option(
    "--default-answer",
    metavar="FILE",
    help="JSON: a row of each output, given where nothing can answer.",
)
@click.option("--breaker-p99-ms", type=float, metavar="MS", help="P99 from which on it does.")
@click.option(
    "--max-items",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    metavar="N",
    help="Rows of a request.",
)
@click.option(
    "--max-body",
    type=click.IntRange(1),
    default=16 << 20,
    show_default=True,
    help="Largest body.",
    metavar="BYTES",
)
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Most connections at once.",
    metavar="N",
)
@click.option(
    "--header-timeout",
    type=Duration(0.01),
    default=10.0,
    show_default=True,
    help="Longest time until headers are here.",
    metavar="S",
)
@click.option(
    "--body-timeout",
    type=Duration(0.01),
    default=30.0,
    show_default=True,
    help="Longest time until a body is here.",
    metavar="S",
)
@click.option(
    "--drain-seconds",
    type=Duration(0),
    default=30.0,
    show_default=True,
    metavar="S",
    help="Longest time to answer what was taken after SIGTERM.",
)
@click.option("--json", "as_json", is_flag=True, help="Print events, one JSON object a line.")
def command(plan_or_engine: str, as_json: bool, **options: Any) -> int:
    """Serve an engine over HTTP: Open Inference Protocol v2, texts, and metrics.

    PLAN_OR_ENGINE is the folder of a run, its plan.yaml, the folder of an engine, or an ONNX
    file. Standard output tells the address, and when the engine is warm. SIGTERM or Ctrl-C ends
    it: nothing new is taken, what was taken is answered. Exit code 1 if that took too long.
    """
    from qbench.hosting import PARTS, prepare_host
    from qbench.servable import find_servable

    check_runtime()
    for part in PARTS:
        require(part)
    # NOTE: a lane that comes back from the runtime waits so long for the thread that parses.
    sys.setswitchinterval(_SWITCH_S)
    servable = find_servable(plan_or_engine, engine=options["engine"])
    hosting = prepare_host(servable, _host_options(options))
    ended = hosting.host.run(
        lambda: _tell_address(hosting, as_json),
        lambda: _tell_ready(hosting, as_json),
        last=True,
    )
    if ended.error is not None:
        raise ended.error
    code = 0 if ended.served else 1
    words = "every request was answered" if ended.served else "requests were left unanswered"
    _tell(as_json, f"ended: {words}", event="ended", served=ended.served, exit_code=code)
    if ended.opening:
        # NOTE: an interpreter that ends while a thread is inside the runtime may abort.
        sys.stdout.flush()
        os._exit(code)
    return code


def _host_options(options: dict[str, Any]) -> HostOptions:
    from qbench.errors import ConfigError
    from qbench.hosting import HostOptions
    from qbench.servable import find_servable
    from qbench.serving.opening import ServeSettings
    from qbench.serving.server.transport import TransportLimits
    from qbench.serving.server.wire import RequestLimits
    from qbench.tasks import load_tokenizer

    given, fallback = options["tokenizer"], options["fallback"]
    longest = options["max_length"]
    if longest is not None and longest > _MOST_TOKENS:
        raise ConfigError(f"--max-length is {longest}; allowed: up to {_MOST_TOKENS} tokens")
    return HostOptions(
        ServeSettings(
            lanes=options["lanes"],
            threads_per_lane=options["threads_per_lane"],
            token_budget=options["token_budget"],
            max_wait_ms=options["max_wait_ms"],
            queue=options["queue"],
            max_batch=options["max_batch"],
            fixed_size=options["fixed_size"],
            sla_ms=_positive("--sla-ms", options["sla_ms"]),
            weights=_weights(options["tenants"]),
        ),
        RequestLimits(options["max_body"], options["max_items"], options["too_long"] == "truncate"),
        TransportLimits(options["max_connections"], header_timeout_s=options["header_timeout"]),
        options["host"],
        options["port"],
        _name(options["name"]),
        longest,
        None if given is None else load_tokenizer(given, longest),
        None if fallback is None else find_servable(fallback),
        None if options["default_answer"] is None else Path(options["default_answer"]),
        _positive("--breaker-p99-ms", options["breaker_p99_ms"]),
        _texts(options["texts"]),
        options["body_timeout"],
        options["drain_seconds"],
    )


def _positive(option: str, value: float | None) -> float | None:
    from qbench.errors import ConfigError

    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{option} is {value}; allowed: more than 0 milliseconds")
    return value


def _name(given: str | None) -> str | None:
    from qbench.errors import ConfigError

    if given is not None and not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", given):
        raise ConfigError(
            f"--name is {given!r}; allowed: letters, digits, '.', '_' and '-', no '.' in front"
        )
    return given


def _weights(tenants: tuple[str, ...]) -> dict[str, float]:
    from qbench.errors import ConfigError

    found: dict[str, float] = {}
    for text in tenants:
        name, equals, weight = text.rpartition("=")
        try:
            found[name] = float(weight)
        except ValueError:
            equals = ""
        if not equals or not 0 < found[name] < math.inf:
            raise ConfigError(f"--tenant: got {text!r}; allowed: NAME=WEIGHT, such as search=3")
    return found


def _texts(given: str | None) -> tuple[str, ...]:
    from qbench.errors import DataError

    if given is None:
        return ()
    try:
        lines = Path(given).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--texts: {given} cannot be read: {error}") from error
    found = tuple(line for line in lines if line.strip())
    if not found:
        raise DataError(f"--texts: {given} holds no text; give one a line")
    return found


def _tell_address(hosting: Hosting, as_json: bool) -> None:
    host, port = hosting.host.address
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    told = {"url": url, "host": host, "port": port, "model": hosting.name}
    _tell(as_json, f"listening on {url}, model {hosting.name}", event="listening", **told)


def _tell_ready(hosting: Hosting, as_json: bool) -> None:
    opened, contract = hosting.opened, hosting.contract
    assert opened is not None
    budget = opened.service.loop.batcher.limits.token_budget
    _tell(
        as_json,
        f"ready: {opened.lanes.lanes} lanes of {opened.lanes.threads_per_lane} threads, "
        f"{budget} tokens a batch",
        event="ready",
        longest=contract.longest,
        merging=str(contract.merging),
        **opened.describe(),
    )


def _tell(as_json: bool, words: str, **told: Any) -> None:
    try:
        click.echo(json.dumps(told, ensure_ascii=False, default=str) if as_json else words)
    except BrokenPipeError:  # who started the server has read enough: it goes on
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
