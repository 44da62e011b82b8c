"""Canonical columns: which column of a table plays which role, and what its cells may hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from qbench.data.content import clean_text
from qbench.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pandas


class Form(StrEnum):
    """What the columns of a table say."""

    RETRIEVAL = "retrieval"
    SIMILARITY = "similarity"
    CLASSIFICATION = "classification"
    TEXTS = "texts"


@dataclass(frozen=True, slots=True)
class _Roles:
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return self.needed + self.optional


ROLES: Mapping[Form, _Roles] = {
    Form.RETRIEVAL: _Roles(("query", "answer")),
    Form.SIMILARITY: _Roles(("text", "text_pair", "score")),
    Form.CLASSIFICATION: _Roles(("text", "label"), ("text_pair",)),
    Form.TEXTS: _Roles(("text",), ("text_pair", "label")),
}
TEXT_ROLES = ("query", "answer", "text", "text_pair")


def form_of(kind: str, names: Sequence[str], columns: Mapping[str, str]) -> Form:
    """Return the form that a task needs; ``embedding`` is retrieval or similarity by columns.

    Args:
        kind: Kind of task.
        names: Columns of the table.
        columns: Column of each role, where it has another name than the role.

    Raises:
        DataError: If the task is ``embedding`` and the columns fit neither form.
    """
    if kind in (Form.RETRIEVAL, Form.SIMILARITY, Form.CLASSIFICATION):
        return Form(kind)
    if kind != "embedding":
        return Form.TEXTS
    there = {role for role in TEXT_ROLES if columns.get(role, role) in names}
    if {"query", "answer"} & {*there, *columns}:
        return Form.RETRIEVAL
    if {"text", "text_pair"} & {*there, *columns}:
        return Form.SIMILARITY
    raise DataError(
        "task embedding needs columns query and answer (retrieval), or text, text_pair and score"
        f" (similarity); the data has {_listed(names)}: map them with data.columns"
    )


def canonical(
    raw: pandas.DataFrame, form: Form, columns: Mapping[str, str]
) -> tuple[pandas.DataFrame, tuple[str, ...]]:
    """Return a table with the columns of ``form`` (and ``id`` where there is one), and remarks.

    Rows without text are left out and a remark says so.

    Raises:
        DataError: If a column is missing, a cell holds what its role does not allow, or no row
            is left.
    """
    import pandas

    names = [str(name) for name in raw.columns]
    chosen = _chosen(names, form, columns)
    if "id" in names and "id" not in columns.values():
        chosen["id"] = "id"
    cells: dict[str, list[Any]] = {}
    for role, name in chosen.items():
        values = list(raw[name])
        cells[role] = (
            [_text(v, name, row) for row, v in enumerate(values)] if role in TEXT_ROLES else values
        )
    texts = [cells[role] for role in chosen if role in TEXT_ROLES]
    kept = [row for row in range(len(raw)) if all(column[row] for column in texts)]
    remarks = _remarks(len(raw), kept, [chosen[role] for role in chosen if role in TEXT_ROLES])
    frame = pandas.DataFrame(
        {
            role: _column(role, [values[row] for row in kept], kept, chosen[role], form)
            for role, values in cells.items()
        }
    )
    return frame, remarks


def _chosen(names: Sequence[str], form: Form, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the column of each role of ``form`` that is used."""
    roles = ROLES[form]
    idle = [role for role in columns if role not in roles.all]
    if idle:
        raise DataError(
            f"data.columns names {idle[0]!r}, which {form} does not read; it reads"
            f" {', '.join(roles.all)}"
        )
    wanted = {role: columns.get(role, role) for role in roles.all}
    absent = [
        role
        for role in roles.all
        if wanted[role] not in names and (role in roles.needed or role in columns)
    ]
    if absent:
        role = absent[0]
        raise DataError(
            f"{form} needs column {wanted[role]!r} for {role}{did_you_mean(wanted[role], names)};"
            f" the data has {_listed(names)}: map it with"
            f" --column {role}=COLUMN (data.columns.{role})"
        )
    return {role: name for role, name in wanted.items() if name in names}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "no columns"


def _missing(value: Any) -> bool:
    if value is None or (isinstance(value, str) and not value.strip()):
        return True
    if _nested(value):
        return False
    try:
        return not bool(value == value)  # NaN and NaT are not equal to themselves
    except TypeError:  # pandas.NA is neither equal nor unequal
        return True


def _nested(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict, set, np.ndarray))


def _text(value: Any, name: str, row: int) -> str:
    """Return a text, empty where there is none."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, bytes) or _nested(value):
        raise DataError(
            f"row {row + 1}, column {name!r}: text is needed, got {type(value).__name__}"
            f" {str(value)[:60]!r}"
        )
    return "" if _missing(value) else str(value)


def _remarks(total: int, kept: Sequence[int], names: Sequence[str]) -> tuple[str, ...]:
    dropped = total - len(kept)
    if not dropped:
        return ()
    there = set(kept)
    first = next(row for row in range(total) if row not in there)
    said = (
        f"{dropped} of {total} rows have no text in {' or '.join(map(repr, names))}"
        f" (the first is row {first + 1})"
    )
    if not kept:
        raise DataError(f"{said}: nothing is left")
    return (f"{said}: left out",)


def _column(
    role: str, values: list[Any], rows: Sequence[int], name: str, form: Form
) -> pandas.Series[Any]:
    import pandas

    if role == "score":
        return pandas.Series([_score(v, name, r) for v, r in zip(values, rows, strict=True)])
    if role == "label":
        return _labels(values, rows, name, form)
    if role == "id":
        for value, row in zip(values, rows, strict=True):
            if _missing(value):
                raise DataError(f"row {row + 1}, column {name!r}: the id is missing")
        return pandas.Series([str(value) for value in values], dtype=object)
    return pandas.Series(values, dtype=object)


def _score(value: Any, name: str, row: int) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"row {row + 1}, column {name!r}: a score must be a finite number, got {value!r}"
        )
    return number


def _labels(values: list[Any], rows: Sequence[int], name: str, form: Form) -> pandas.Series[Any]:
    """Return labels as int64 where all are whole, float64 where all are numbers, else str."""
    import pandas

    for value, row in zip(values, rows, strict=True):
        if _missing(value):
            raise DataError(f"row {row + 1}, column {name!r}: the label is missing")
        if form is Form.CLASSIFICATION and _wrong_class(value):
            raise DataError(
                f"row {row + 1}, column {name!r}: label {value!r} is no class; allowed: whole"
                " numbers from 0, or class names"
            )
    numbers = [_number(value) for value in values]
    if any(number is None for number in numbers):
        return pandas.Series([str(value) for value in values], dtype=object)
    if all(number is not None and number.is_integer() for number in numbers):
        return pandas.Series(numbers, dtype="float64").astype("int64")
    return pandas.Series(numbers, dtype="float64")


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _wrong_class(value: Any) -> bool:
    if _nested(value):
        return True
    number = _number(value)
    return number is not None and (number < 0 or not number.is_integer())
