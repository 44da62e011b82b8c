"""What a validation error of pydantic means, in words that help a person.

A message has the dotted key, what was given, near misses, and what is allowed there.
"""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, Literal

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from qbench.errors import did_you_mean


def explain(error: ValidationError, root: type[BaseModel], origin: str) -> str:
    """Return one message for everything that is wrong, each with what is allowed instead.

    Args:
        error: What pydantic found.
        root: The class that was validated.
        origin: Where the values come from: a file, or "command line".
    """
    lines: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        key, message = _explain_one(detail, root)
        lines.setdefault(key, message)
    told = [f"{key}: {message}" if key else message for key, message in lines.items()]
    if len(told) == 1:
        return f"{origin}: {told[0]}"
    return f"{origin}: {len(told)} problems\n" + "\n".join(f"  {line}" for line in told)


def _explain_one(detail: ErrorDetails, root: type[BaseModel]) -> tuple[str, str]:
    """Return the dotted key of an error of pydantic, and our words for it."""
    section, key, annotation = _locate(detail["loc"], root)
    kind = detail["type"]
    if kind == "extra_forbidden":
        name = str(detail["loc"][-1])
        where = key or "a configuration"
        return f"{key}.{name}".lstrip("."), (
            f"unknown key{did_you_mean(name, section.model_fields)}; "
            f"allowed in {where}: {', '.join(section.model_fields)}"
        )
    if kind == "missing":
        return key, f"is missing; give {_allowed(annotation)}"
    if kind == "value_error":
        return key, str(detail["ctx"]["error"]).removeprefix("max_drop: ")
    given = detail["input"]
    near = _near_choice(given, annotation)
    return key, f"got {_show(given)}{near}; allowed: {_allowed(annotation)}{_hint(given)}"


def _locate(loc: tuple[int | str, ...], root: type[BaseModel]) -> tuple[type[BaseModel], str, Any]:
    """Return the section that holds an error's place, the dotted key, and what is allowed there."""
    section = root
    keys: list[str] = []
    annotation: Any = root
    for part in loc:
        field = section.model_fields.get(str(part)) if _model_of(annotation) is section else None
        if field is None:
            break
        keys.append(str(part))
        annotation = field.rebuild_annotation()
        section = _model_of(annotation) or section
    return section, ".".join(keys), annotation


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for option in (annotation, *typing.get_args(annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


_PLAIN = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}


def _allowed(annotation: Any) -> str:
    """Return in words what an annotation allows."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        limits = [words for limit in args[1:] for words in _limits(limit)]
        return " ".join([_allowed(args[0]), *limits])
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else _allowed(arg) for arg in args)
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin is tuple:
        return f"a list of which each is {_allowed(args[0])}"
    if origin is dict:
        return f"a mapping from ({_allowed(args[0])}) to {_allowed(args[1])}"
    model = _model_of(annotation)
    if model is not None:
        return f"a mapping of {', '.join(model.model_fields)}"
    return _PLAIN.get(annotation, str(annotation))


def _limits(limit: Any) -> list[str]:
    if isinstance(limit, annotated_types.Ge):
        return [f"≥ {limit.ge}"]
    if isinstance(limit, annotated_types.Gt):
        return [f"> {limit.gt}"]
    if isinstance(limit, annotated_types.Le):
        return [f"≤ {limit.le}"]
    if isinstance(limit, annotated_types.MinLen):
        return ["that is not empty"]
    if pattern := getattr(limit, "pattern", None):
        return [f"that matches {pattern}"]
    return [words for inner in getattr(limit, "metadata", ()) for words in _limits(inner)]


def _near_choice(given: Any, annotation: Any) -> str:
    choices = [c for c in _choices(annotation) if isinstance(c, str)]
    return did_you_mean(given, choices) if isinstance(given, str) and choices else ""


def _choices(annotation: Any) -> tuple[Any, ...]:
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return args
    return tuple(choice for arg in args for choice in _choices(arg))


def _show(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    names = {str: "text", bool: "true or false", dict: "mapping", int: "integer", float: "number"}
    return f"{value!r} ({names.get(type(value), type(value).__name__)})"


def _hint(given: Any) -> str:
    if not isinstance(given, str):
        return ""
    try:
        float(given)
    except ValueError:
        return ""
    return "; write it without quotes, and an exponent with a dot: 1.0e-3"
