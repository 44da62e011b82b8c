"""Records as plain values, and back."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar, cast

T = TypeVar("T")
_SCALARS = (bool, int, float, str)


def to_dict(record: Any) -> Any:
    """Return a record as plain dictionaries, lists and scalars, ready for JSON or YAML."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: to_dict(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, Mapping):
        return {str(key): to_dict(value) for key, value in record.items()}
    if isinstance(record, StrEnum):
        return str(record)
    if isinstance(record, (tuple, list)):
        return [to_dict(item) for item in record]
    return record


def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
    """Return a record of class ``cls`` from what ``to_dict`` gave; unknown keys are ignored.

    Raises:
        TypeError: If a field without a default is missing.
    """
    hints = _hints(cast(Any, cls))
    return cls(
        **{
            key: value if hints[key] in _SCALARS else _revive(hints[key], value)
            for key, value in data.items()
            if key in hints
        }
    )


@functools.cache
def _hints(cls: type[Any]) -> Mapping[str, Any]:
    """Return the type of each field; cached, for a benchmark has a record a request."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _revive(hint: Any, value: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if value is None:
        return None
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        return _revive(inner[0], value) if len(inner) == 1 else value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_dict(hint, value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    if origin is tuple:
        inner_hint = args[0] if args else Any
        return tuple(_revive(inner_hint, item) for item in value)
    if origin is not None and isinstance(value, Mapping):
        key_hint, value_hint = args if args else (Any, Any)
        return {_revive_key(key_hint, k): _revive(value_hint, v) for k, v in value.items()}
    return value


def _revive_key(hint: Any, key: Any) -> Any:
    return int(key) if hint is int else key
