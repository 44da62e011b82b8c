"""The answer that a user declares for the time in which nothing can compute one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from qbench.errors import ConfigError, unknown_name
from qbench.serving.server.contract import Contract, Tensor
from qbench.serving.server.terms import kind_of


def read_default(path: Path, contract: Contract) -> dict[str, np.ndarray]:
    """Return the declared answer in a file: one row of every output, by name.

    Raises:
        ConfigError: If the file cannot be read, or what it holds is no answer of this engine.
    """
    try:
        content = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--default-answer: {path} cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"--default-answer: {path} is no JSON: {error}") from None
    return make_default(content, contract)


def make_default(content: Any, contract: Contract) -> dict[str, np.ndarray]:
    """Return a declared answer: arrays of one row by output, which nobody can change.

    A dimension that is free in the graph has size 1 here where it follows the request's length:
    it is repeated to that length.

    Raises:
        ConfigError: With the first thing that is wrong, in words.
    """
    if not isinstance(content, dict):
        raise _wrong(f"it must be an object of one row by output, got {kind_of(content)}")
    known = {tensor.name: tensor for tensor in contract.outputs}
    for name in content:
        if name not in known:
            raise _wrong(unknown_name("output", name, known))
    missing = [name for name in known if name not in content]
    if missing:
        raise _wrong(f"output {missing[0]!r} is missing; it takes a row of each: {list(known)}")
    return {name: _row(content[name], tensor, contract) for name, tensor in known.items()}


def fill_default(
    row: Mapping[str, np.ndarray], contract: Contract, length: int
) -> dict[str, np.ndarray]:
    """Return a declared answer for a request of ``length`` tokens (0 where it has no length)."""
    found = dict(row)
    for name, axes in (contract.sequence_axes or {}).items():
        for axis in axes:
            found[name] = np.repeat(found[name], max(length, 1), axis)
    return found


def _row(given: Any, tensor: Tensor, contract: Contract) -> np.ndarray:
    follows = (contract.sequence_axes or {}).get(tensor.name, ())
    wanted: list[int] = []
    for axis, size in enumerate(tensor.dims):
        if size is None and axis not in follows:
            raise _wrong(
                f"output {tensor.name!r} has a free dimension that does not follow the length of "
                "the request: no row of it can be declared"
            )
        wanted.append(1 if axis in follows else size or 0)
    try:
        array = np.array(given)
    except (ValueError, OverflowError):
        raise _wrong(f"output {tensor.name!r} is ragged") from None
    _check(array, tensor, wanted)
    with np.errstate(over="ignore"):
        row = array.astype(tensor.dtype)
    if row.dtype.kind == "f" and not np.isfinite(row).all():
        raise _wrong(f"output {tensor.name!r} holds a number that {tensor.datatype} cannot hold")
    row.flags.writeable = False
    return row


def _check(array: np.ndarray, tensor: Tensor, wanted: Sequence[int]) -> None:
    """Refuse a row of another shape, or of values that its type cannot hold."""
    if list(array.shape) != list(wanted):
        raise _wrong(
            f"output {tensor.name!r} has shape {list(array.shape)}; a row of it has {list(wanted)}"
        )
    kind = np.dtype(tensor.dtype).kind
    if array.dtype.kind not in {"b": "b", "f": "fiu"}.get(kind, "iu"):
        raise _wrong(f"output {tensor.name!r} must hold values of {tensor.datatype} alone")
    if kind in "iu":
        info = np.iinfo(tensor.dtype)
        if array.size and not info.min <= int(array.min()) <= int(array.max()) <= info.max:
            raise _wrong(f"output {tensor.name!r} holds a value out of {tensor.datatype}")


def _wrong(words: str) -> ConfigError:
    return ConfigError(f"--default-answer: {words}")
