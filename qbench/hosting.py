"""From what a user gave to a server that can begin: contract, samples, service, limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qbench.errors import ConfigError, InputError, ModelError
from qbench.gate import require
from qbench.runtime.presence import check_present
from qbench.servable import Servable, tokenizer_cutting_at
from qbench.serving.bench import Engine, Workload, cores
from qbench.serving.cost import BatchMemory
from qbench.serving.gates import BreakerRules
from qbench.serving.opening import Opened, ServeSettings, open_service
from qbench.serving.request import Encoded, Run, named_rows
from qbench.serving.service import Gates, Service
from qbench.tasks import Tokenizer

if TYPE_CHECKING:
    from qbench.serving.server.contract import Contract
    from qbench.serving.server.host import Host
    from qbench.serving.server.transport import TransportLimits
    from qbench.serving.server.wire import RequestLimits

#: What the server is made of; all of it comes with the extra ``serve``.
PARTS = ("uvicorn", "httptools", "starlette", "orjson", "prometheus_client")
_LENGTHS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_MOST_SAMPLES = 64
_MOST_ROWS = 16  # of a batch whose rows have no tokens to count
_NEVER = BreakerRules(refused_share=1.0, failed_share=1.0)


@dataclass(frozen=True, slots=True)
class HostOptions:
    """How to serve over HTTP.

    Attributes:
        settings: Lanes, queue and batches.
        requests: What a request may be.
        transport: What a connection may do.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        name: Name of the model; by default that of run or file.
        longest: Longest request in tokens; by default the tokenizer's, or found by trying.
        tokenizer: Tokenizer in place of the run's.
        fallback: A cheaper engine that answers while this one cannot keep up.
        default_answer: JSON file of an answer, one row by output, that is given where neither
            this engine nor the fallback can answer.
        breaker_p99_ms: Latency from which on the fallback answers, or the default.
        texts: Texts that are like those to come, for the calibrations at start.
        body_timeout_s: Longest time until a body is here.
        drain_s: Longest time in which what was taken is answered after a signal.
    """

    settings: ServeSettings
    requests: RequestLimits
    transport: TransportLimits
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    longest: int | None = None
    tokenizer: Tokenizer | None = None
    fallback: Servable | None = None
    default_answer: Path | None = None
    breaker_p99_ms: float | None = None
    texts: tuple[str, ...] = ()
    body_timeout_s: float = 30.0
    drain_s: float = 30.0


@dataclass(slots=True)
class Hosting:
    """A server that can begin.

    Attributes:
        host: The server.
        name: Name of the model.
        contract: What the engine takes and gives.
        opened: What was chosen for the service, once it is ready.
    """

    host: Host
    name: str
    contract: Contract
    opened: Opened | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def prepare_host(servable: Servable, options: HostOptions) -> Hosting:
    """Return a server for an engine; it listens, and what is wrong with the engine was said.

    Raises:
        MissingDependencyError: If the extra ``serve`` is not installed.
        InputError: If the engine cannot be served, the fallback does not fit, or the address
            is taken.
    """
    for part in PARTS:
        require(part)
    from qbench.serving.server.face import Face
    from qbench.serving.server.host import Host, listen
    from qbench.serving.server.metrics import Metrics

    _check_backend(servable)
    engine, contract = describe(servable, options)
    tokenizer = _tokenizer(servable, options, contract)
    settings = fitting_settings(options.settings, contract)
    gates = _gates(options, contract, settings)
    workload = _workload(servable, options, contract, tokenizer)
    name = options.name or servable.name
    face = Face(
        name,
        contract,
        options.requests,
        Metrics(name),
        options.body_timeout_s,
        settings.max_wait_ms,
    )
    bound = listen(options.host, options.port)

    def open_it() -> Service:
        hosting.opened = open_service(engine, workload, settings, gates, _known_memory(contract))
        return hosting.opened.service

    host = Host(face, bound, open_it, options.transport, options.drain_s)
    hosting = Hosting(host, name, contract, None, servable.facts)
    return hosting


def describe(servable: Servable, options: HostOptions | None = None) -> tuple[Engine, Contract]:
    """Return an engine and what it takes and gives.

    Raises:
        ModelError: If it cannot be loaded, has no batch dimension or does not run.
        ConfigError: If the longest request that was asked for is more than it takes.
    """
    from qbench.serving.server.bounds import index_bounds
    from qbench.serving.server.trying import find_contract

    bounds = index_bounds(servable.graph())
    engine = servable.engine()
    assert engine.open_session is not None
    try:
        session = engine.open_session(1)
    except RuntimeError as error:
        raise ModelError(f"ONNX Runtime cannot load {str(servable.path)!r}: {error}") from error
    asked = options.longest if options is not None else None
    tokenizer = (options.tokenizer if options is not None else None) or servable.tokenizer
    contract = find_contract(
        session,
        bounds,
        longest=asked or servable.longest,
        pad_id=0 if tokenizer is None else tokenizer.pad_id,
        source=str(servable.path),
    )
    if asked is not None and contract.longest is not None and contract.longest < asked:
        raise ConfigError(
            f"--max-length is {asked}; {servable.path} runs on at most {contract.longest} tokens"
        )
    return replace(engine, inputs=session.inputs), contract


def fitting_settings(settings: ServeSettings, contract: Contract) -> ServeSettings:
    """Return settings under which requests share batches only as the engine allows."""
    from qbench.serving.server.contract import Merging

    settings = replace(settings, pad_id=contract.pad_id)
    if contract.merging is Merging.PADDED:
        return settings
    lanes = settings.lanes or max(cores() // (settings.threads_per_lane or 1), 1)
    settings = replace(settings, lanes=lanes, max_padding=0.0)
    if contract.merging is Merging.ALONE:
        return replace(settings, max_batch=1, token_budget=1, fixed_size=None)
    first = contract.inputs[0].dims
    if contract.longest is None:  # rows of one size: a batch is so many rows
        rows = settings.max_batch or _MOST_ROWS
        size = (first[0] or 1) if first else 1
        return replace(settings, max_batch=rows, token_budget=rows * size)
    return settings


def _known_memory(contract: Contract) -> BatchMemory | None:
    """Return a memory model where none is measured: it would need batches of many tokens.

    Rows of one size, and rows that run alone, are bounded by their number instead.
    """
    from qbench.serving.server.contract import Merging

    bounded = contract.longest is None or contract.merging is Merging.ALONE
    return BatchMemory(0.0, 0.0, 0.0) if bounded else None


def _check_backend(servable: Servable) -> None:
    if not servable.backend.name.startswith("ort-"):
        raise ModelError(
            f"{servable.path} is for {servable.backend.name}, which is not served here; "
            "qbench export-triton writes a model repository for it"
        )
    check_present(servable.backend)


def _tokenizer(servable: Servable, options: HostOptions, contract: Contract) -> Tokenizer | None:
    """Return the tokenizer; where long texts are refused it cuts one token later."""
    found = options.tokenizer or servable.tokenizer
    longest = contract.longest or contract.fixed_length
    if found is None or longest is None:
        return found
    return tokenizer_cutting_at(found, longest + (not options.requests.truncate))


def _workload(
    servable: Servable, options: HostOptions, contract: Contract, tokenizer: Tokenizer | None
) -> Workload:
    from qbench.serving.server.texts import Text, text_encoder

    encode = text_encoder(tokenizer, contract)
    samples: list[Encoded] = []
    for text in options.texts:
        try:
            samples += encode([Text(text)])
        except InputError as error:
            raise InputError(f"--texts: {error}: {text[:80]!r}") from error
    samples = _spread(samples) or _made(servable, contract)
    return Workload(samples, contract.pad, encode, named_rows)


def _made(servable: Servable, contract: Contract) -> list[Encoded]:
    """Return random requests of the lengths that the run saw, or of usual ones."""
    from qbench.serving.server.contract import Merging

    if contract.longest is None:
        return [contract.sample(contract.fixed_length or 1, seed) for seed in range(4)]
    if contract.merging is Merging.ALONE:  # sizes between may not run, as of images
        return [contract.sample(length) for length in (contract.shortest, contract.longest)]
    known = [length for length in servable.lengths if length <= contract.longest]
    usual = [length for length in _LENGTHS if length <= contract.longest] or [contract.longest]
    lengths = _spread(sorted(known)) or usual
    return [contract.sample(length, seed) for seed, length in enumerate(lengths)]


def _spread(items: list[Any]) -> list[Any]:
    """Return at most 64 of the items, evenly spread."""
    if len(items) <= _MOST_SAMPLES:
        return items
    places = np.linspace(0, len(items) - 1, _MOST_SAMPLES).astype(int)
    return [items[place] for place in places]


def _gates(options: HostOptions, contract: Contract, settings: ServeSettings) -> Gates:
    """Return the gates; where nothing answers instead the breaker stays closed: it would refuse."""
    from qbench.serving.server.defaults import read_default

    given = options.default_answer
    if options.fallback is None and given is None:
        if options.breaker_p99_ms is not None:
            raise ConfigError(
                "--breaker-p99-ms needs what answers instead: --fallback ENGINE or "
                "--default-answer FILE.json"
            )
        return Gates(_NEVER)
    return Gates(
        BreakerRules(p99_ms=options.breaker_p99_ms),
        fallback=() if options.fallback is None else _fallback(options, contract, settings),
        default=None if given is None else read_default(given, contract),
    )


def _fallback(options: HostOptions, contract: Contract, settings: ServeSettings) -> list[Run]:
    """Return lanes of the fallback, which takes and gives what the engine does."""
    assert options.fallback is not None
    _check_backend(options.fallback)
    engine, other = describe(options.fallback, options)
    for what in ("inputs", "outputs"):
        mine = [(t.name, t.dtype, t.dims) for t in getattr(contract, what)]
        its = [(t.name, t.dtype, t.dims) for t in getattr(other, what)]
        if sorted(mine, key=str) != sorted(its, key=str):
            raise ModelError(f"--fallback: its {what} are {its}; needed are those served: {mine}")
    return [engine.open_lane(1) for _ in range(settings.lanes or 1)]
