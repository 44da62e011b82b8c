"""Baseline records: what a benchmark gave and all that it depends on; unlike ones are refused."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from qbench import storage
from qbench.errors import InputError, did_you_mean
from qbench.records import BenchRun, to_dict

#: What two benchmarks must share for their numbers to be compared.
KEYS = (
    "model_sha256",
    "versions",
    "machine",
    "cores",
    "lanes",
    "threads_per_lane",
    "clients",
    "load",
    "lengths",
    "warmup_s",
    "token_budget",
    "max_wait_ms",
    "max_padding",
    "max_batch",
    "fixed_size",
    "queue",
)
#: Numbers of an engine that are compared.
_NUMBERS = ("throughput_rps", "p50_ms", "p95_ms", "p99_ms", "cpu_ms_per_request")


class UnlikeError(InputError):
    """Two records were measured under different conditions."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A benchmark to compare later ones with.

    Attributes:
        conditions: What its numbers depend on, by the names in ``KEYS``.
        engines: Numbers by engine.
    """

    conditions: Mapping[str, Any]
    engines: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Difference:
    """One number of an engine, then and now; ``ratio`` is now over then."""

    engine: str
    number: str
    before: float
    now: float

    @property
    def ratio(self) -> float:
        """Now over then."""
        return self.now / self.before if self.before else float("inf")


def baseline_of(run: BenchRun, facts: Mapping[str, Any]) -> Baseline:
    """Return the record of a benchmark.

    Args:
        run: The benchmark.
        facts: What it does not know itself: ``versions`` and ``machine``.
    """
    known = {**to_dict(run.conditions), **to_dict(facts)}
    engines = {}
    for one in run.summaries:
        numbers = to_dict(one)
        numbers["throughput_rps"] = one.throughput_rps.value
        engines[one.engine] = {name: float(numbers[name]) for name in _NUMBERS}
    return Baseline({key: known.get(key) for key in KEYS}, engines)


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured for it.

    Raises:
        InputError: If the file cannot be written.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(f"the baseline cannot be written to {path}: {error.strerror}") from error


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Write a record to a file, whole or not at all.

    Raises:
        InputError: If the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write_json(path, {"kind": "baseline", **to_dict(baseline)})
    except OSError as error:
        raise InputError(f"the baseline cannot be written to {path}: {error.strerror}") from error


def read_baseline(path: Path) -> Baseline:
    """Return the record in a file.

    Raises:
        InputError: If there is none, or it is no baseline.
    """
    if not path.is_file():
        raise InputError(f"no baseline at {path}; qbench bench RUN --save-baseline {path} makes it")
    content = storage.read_json(path, "qbench bench --save-baseline")
    if content.get("kind") != "baseline":
        raise InputError(f"{path} holds no baseline; qbench bench RUN --save-baseline makes one")
    conditions, engines = content.get("conditions"), content.get("engines")
    if not isinstance(conditions, Mapping) or not _holds_numbers(engines):
        raise InputError(
            f"{path} is damaged: it needs conditions, and of each engine {', '.join(_NUMBERS)}; "
            "save it anew with --save-baseline"
        )
    return Baseline(conditions, engines)


def _holds_numbers(engines: Any) -> TypeGuard[Mapping[str, Mapping[str, float]]]:
    """Return whether each engine has each number that is compared."""
    return isinstance(engines, Mapping) and all(
        isinstance(numbers, Mapping)
        and all(isinstance(numbers.get(name), int | float) for name in _NUMBERS)
        for numbers in engines.values()
    )


def check_alike(before: Baseline, known: Mapping[str, Any]) -> None:
    """Refuse to compare with a baseline of other conditions.

    Args:
        before: The baseline.
        known: The conditions now, all or as many as are known before anything is measured.

    Raises:
        UnlikeError: If one of them differs, or the baseline lacks one; the message names it.
    """
    gone = [key for key in KEYS if key not in before.conditions]
    if gone:
        raise UnlikeError(f"the baseline does not tell its {gone[0]}; save a new baseline")
    told = {key: value for key, value in before.conditions.items() if key in known}
    for name, then_value, now_value in _unlike(told, known):
        raise UnlikeError(
            f"the baseline was measured under other conditions: {name} was {then_value!r} and is "
            f"{now_value!r}. Numbers of unlike runs are not compared: measure again under the "
            "baseline's conditions, or save a new baseline"
        )


def compare(before: Baseline, now: Baseline) -> tuple[Difference, ...]:
    """Return the numbers of the engines that both have, then and now.

    Raises:
        UnlikeError: If a condition differs, or no engine is in both; the message names it.
    """
    check_alike(before, now.conditions)
    shared = [name for name in before.engines if name in now.engines]
    if not shared:
        missing = next(iter(before.engines), "")
        raise UnlikeError(
            f"no engine is in both records; the baseline has {', '.join(before.engines)} and this "
            f"run has {', '.join(now.engines)}{did_you_mean(missing, now.engines)}"
        )
    return tuple(
        Difference(name, number, before.engines[name][number], now.engines[name][number])
        for name in shared
        for number in _NUMBERS
    )


def _unlike(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, then, now) of what differs, in the order of ``KEYS``."""
    for key in dict.fromkeys([*before, *now]):
        left, right = before.get(key), now.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            yield from _unlike(left, right, f"{prefix}{key}.")
        elif left != right:
            yield f"{prefix}{key}", left, right
