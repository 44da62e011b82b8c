"""What can be wrong with a plan, each said with what is allowed and what to do."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from qbench.backends import Backend, applicability, applicable_formats, backend_named
from qbench.errors import ConfigError, InputError, PlanError, did_you_mean, unknown_name
from qbench.formats import format_named
from qbench.planning.costs import fused_layers, ties_of
from qbench.planning.targets import check_target, missing_on
from qbench.records import Kind, Layer, Layers, Plan, PlanLayer, Status
from qbench.remedies import check_row

if TYPE_CHECKING:
    from jsonschema import ValidationError

#: Version of the plan's schema that is written.
PLAN_VERSION = 1
#: Problems listed in one message; the rest is counted.
_LISTED = 12

_TYPES = {
    "object": "a mapping",
    "array": "a list",
    "string": "text",
    "number": "a number",
    "null": "null",
}


@lru_cache(maxsize=1)
def plan_schema() -> dict[str, Any]:
    """Return the published JSON Schema (draft 2020-12) of the plan file."""
    name = f"plan-{PLAN_VERSION}.schema.json"
    text = (resources.files("qbench") / "schemas" / name).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def check_document(document: Mapping[str, Any], origin: str) -> None:
    """Check the content of a plan file against the schema.

    Raises:
        PlanError: If it does not fit; every problem is listed.
    """
    from jsonschema import Draft202012Validator

    version = document.get("version")
    if version != PLAN_VERSION or isinstance(version, bool):
        given = "no version" if version is None else f"version {version!r}"
        raise PlanError(
            f"{origin}: got a plan of {given}; this qbench reads version {PLAN_VERSION}: plan "
            "again, or use the qbench that wrote it"
        )
    errors = sorted(
        Draft202012Validator(plan_schema()).iter_errors(document),
        key=lambda e: list(map(str, e.path)),
    )
    _raise_all(origin, [line for error in errors for line in _schema_words(error, document)])


def check_plan(
    plan: Plan,
    origin: str,
    *,
    layers: Layers | None = None,
    backend: str | None = None,
    model_sha256: str | None = None,
) -> None:
    """Check that a plan can be built for a model on its backend.

    Raises:
        PlanError: If it cannot; every problem is listed.
    """
    if backend is not None and backend != plan.backend:
        raise PlanError(
            f"{origin}: the plan is for backend {plan.backend!r}, and {backend!r} was asked for; "
            "records of one backend make no plan for another: plan for that one"
        )
    if model_sha256 is not None and model_sha256 != plan.model_sha256:
        raise PlanError(
            f"{origin}: the plan is for the model with sha256 {plan.model_sha256[:12]}… "
            f"({plan.model_source or 'source unknown'}), and this one has {model_sha256[:12]}…; "
            "build it with that model, or plan this one"
        )
    try:
        where = backend_named(plan.backend)
    except InputError as error:
        raise PlanError(f"{origin}: {error}") from None
    counts = Counter(row.name for row in plan.layers)
    problems = [
        f"layer {name!r} is listed {count} times; keep one"
        for name, count in counts.items()
        if count > 1
    ]
    known = None if layers is None else layers.by_name()
    if layers is not None and known is not None:
        problems += _name_problems(counts, known)
        problems += _group_problems(plan, layers, where)
    problems += [
        f"session_options: {unknown_name('option', name, where.session_options)}"
        for name in plan.session_options
        if name not in where.session_options
    ]
    target = plan.constraints.get("hardware")
    if target:
        problems += _target_problems(str(target), where)
    for row in plan.layers:
        if missing := missing_on(target, row.format, where):
            problems.append(f"layer {row.name!r} cannot take {row.format}: {missing}")
        problems += _row_problems(row, where, None if known is None else known.get(row.name))
    _raise_all(origin, problems)


def _target_problems(target: str, backend: Backend) -> Iterator[str]:
    try:
        check_target(target, backend)
    except ConfigError as error:
        yield f"constraints, {error}"


def _name_problems(counts: Mapping[str, int], known: Mapping[str, Layer]) -> Iterator[str]:
    missing = [name for name in known if name not in counts]
    for name in counts:
        if name not in known:
            near = did_you_mean(name, missing or known)
            yield f"unknown layer {name!r}{near}; this model has {len(known)} layers"
    for name in missing:
        yield (
            f"layer {name!r} is missing; every layer is listed, so put it back with the format "
            "that it shall take"
        )


def _group_problems(plan: Plan, layers: Layers, backend: Backend) -> Iterator[str]:
    """Yield what breaks a group: layers of one storage, or that the backend computes as one."""
    rows = {row.name: row for row in plan.layers}
    groups = {f"the weight {tie!r}": names for tie, names in ties_of(layers).items()}
    for bond, names in fused_layers(layers, backend).items():
        joined = tuple(n for n in names if n in rows and not _stands_apart(rows[n], backend))
        groups[f"one product on {backend.name} ({bond})"] = joined
    for bond, names in groups.items():
        own = [rows[name] for name in names if name in rows]
        if len({row.format for row in own}) > 1:
            told = ", ".join(f"{row.name} as {row.format}" for row in own)
            yield f"layers that share {bond} must take one format; got {told}"
    for tie, names in ties_of(layers).items():
        blocks = {rows[name].block for name in names if name in rows}
        if len(blocks) > 1:
            told = ", ".join(f"{name}: {rows[name].block}" for name in names if name in rows)
            yield f"layers that share the weight {tie!r} must take one `block`; got {told}"


def _stands_apart(row: PlanLayer, backend: Backend) -> bool:
    """Whether a layer is kept in fp32 beside fp16: it is then joined with none."""
    return row.format == "fp32" != backend.high_precision


def _row_problems(row: PlanLayer, backend: Backend, layer: Layer | None) -> Iterator[str]:
    if layer is not None and layer.kind is not row.kind:
        yield f"layer {row.name!r} is of kind {layer.kind}, not {row.kind}; kinds are not edited"
        return
    status, reason = applicability(row.kind, row.format, backend)
    if status is not Status.OK:
        allowed = ", ".join(applicable_formats(row.kind, backend))
        yield (
            f"layer {row.name!r} cannot take {row.format}: {reason}; "
            f"allowed on {row.kind}: {allowed}"
        )
        return
    numbers = {"divergence": row.divergence, **row.clips, **row.alternatives}
    for what, number in numbers.items():
        if number is not None and not math.isfinite(number):
            yield f"layer {row.name!r}: {what} is {number}; a finite number is needed"
    wrong = check_row(row)
    if wrong:
        yield f"layer {row.name!r}: {wrong}"
    if not format_named(row.format).needs_range:
        return
    tensors = [edge.tensor for edge in layer.edges if edge.tensor != layer.weight] if layer else []
    absent = sorted(set(tensors) - row.clips.keys())
    if absent or not (row.clips or row.kind is Kind.EMBEDDING):  # a table reads no activation
        of = f" of {', '.join(map(repr, absent))}" if absent else ""
        yield (
            f"layer {row.name!r} as {row.format} needs the clip{of} under `clips`; calibrate and "
            "plan again, or choose a format that needs none (int8_dynamic, w8a16)"
        )


def _schema_words(error: ValidationError, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a schema violation means, in our words."""
    where = _place(list(error.absolute_path), document)
    given: Any = error.instance
    rule: Any = error.validator_value
    if error.validator == "additionalProperties" and rule is False:
        schema: Any = error.schema
        allowed = list(schema["properties"])
        unknown = [name for name in given if name not in allowed]
        yield from (where + unknown_name("key", str(name), allowed) for name in unknown)
    elif error.validator == "required":
        absent = [name for name in rule if name not in given]
        yield f"{where}missing: {', '.join(map(repr, absent))}"
    else:
        yield where + _value_words(error)


def _value_words(error: ValidationError) -> str:
    """Return what is wrong with one value, and what is allowed there."""
    given: Any = error.instance
    rule: Any = error.validator_value
    match error.validator:
        case "enum":
            what = str(error.absolute_path[-1]) if error.absolute_path else "value"
            return unknown_name(what, str(given), [str(item) for item in rule])
        case "type":
            return f"got {_words_of(given)}; allowed: {_allowed(rule)}{_number_hint(given, rule)}"
        case "minimum":
            return f"got {given!r}; allowed: a number ≥ {rule}"
        case "exclusiveMinimum":
            return f"got {given!r}; allowed: a number > {rule}"
        case "minItems" | "minLength":
            return "got nothing; at least one is needed"
        case "pattern":
            return f"got {given!r}; allowed: 64 hexadecimal digits"
        case _:
            return str(error.message)


def _place(path: Sequence[str | int], document: Mapping[str, Any]) -> str:
    """Return a path in words: the layer by its name, then the key."""
    if not path:
        return ""
    if path[0] != "layers" or len(path) < 2:
        return ".".join(map(str, path)) + ": "
    row = document["layers"][path[1]]
    name = row.get("name") if isinstance(row, dict) else None
    place = f"layer {name!r}" if isinstance(name, str) else f"layers[{path[1]}]"
    return ", ".join([place, *(f"{part}" for part in path[2:])]) + ": "


def _words_of(value: Any) -> str:
    for kind, python in (("object", dict), ("array", list)):
        if isinstance(value, python):
            return _TYPES[kind]
    return f"{value!r}"


def _allowed(rule: str | Sequence[str]) -> str:
    names = [rule] if isinstance(rule, str) else list(rule)
    return " or ".join(_TYPES.get(name, name) for name in names)


def _number_hint(given: Any, rule: str | Sequence[str]) -> str:
    """Return how YAML wants a number that it read as text, or a text that it read as a number."""
    if isinstance(given, str) and "number" in rule:
        try:
            return f" (YAML reads it as text; write {float(given):.6e})"
        except ValueError:
            return ""
    if isinstance(given, (int, float)) and rule == "string":
        return f" (put quotes around it: '{given}')"
    return ""


def _raise_all(origin: str, problems: Sequence[str]) -> None:
    if not problems:
        return
    if len(problems) == 1:
        raise PlanError(f"{origin}: {problems[0]}")
    lines = [f"  {problem}" for problem in problems[:_LISTED]]
    if len(problems) > _LISTED:
        lines.append(f"  and {len(problems) - _LISTED} more")
    raise PlanError("\n".join([f"{origin}: {len(problems)} problems", *lines]))
