"""Answers as bodies of the Open Inference Protocol v2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from qbench.serving.request import Answer
from qbench.serving.server.contract import DATATYPES
from qbench.serving.server.terms import Asked, BadRequestError

_NOT_ACCEPTABLE = 406


@dataclass(frozen=True, slots=True)
class Body:
    """The body of an answer.

    Attributes:
        content: Its bytes.
        media_type: Its type.
        header_length: Bytes of the JSON in front of tensors sent as bytes, or ``None``.
    """

    content: bytes
    media_type: str = "application/json"
    header_length: int | None = None


def infer_body(
    model: tuple[str, str], asked: Asked, rows: Sequence[Mapping[str, np.ndarray]], served_by: str
) -> Body:
    """Return the answer to an inference request.

    Args:
        model: Name and version.
        asked: What was asked for.
        rows: Outputs of each row.
        served_by: What answered.

    Raises:
        BadRequestError: If an output holds a number that JSON cannot carry, or its shape differs
            between the rows.
    """
    outputs: list[dict[str, Any]] = []
    tails: list[bytes] = []
    for name, binary in asked.outputs:
        array = _stacked(name, [row[name] for row in rows])
        told: dict[str, Any] = {
            "name": name,
            "datatype": DATATYPES[array.dtype.name],
            "shape": list(array.shape),
        }
        if binary:
            tails.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            told["parameters"] = {"binary_data_size": len(tails[-1])}
        else:
            told["data"] = for_json(name, array).reshape(-1)
        outputs.append(told)
    head = _head(model, asked, served_by)
    text = orjson.dumps({**head, "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    if not tails:
        return Body(text)
    return Body(b"".join([text, *tails]), "application/octet-stream", len(text))


def _stacked(name: str, rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return an output's rows as one array ``[rows, …]``."""
    if len(rows) == 1:
        return rows[0][None]
    if any(row.shape != rows[0].shape for row in rows):
        raise BadRequestError(
            f"output {name!r} has another shape for each row; ask for one row at a time"
        )
    return np.stack(rows)


def text_body(
    model: tuple[str, str], asked: Asked, answers: Sequence[Answer], rows: Sequence[Any]
) -> Body:
    """Return the answer to texts: the outputs of each by name, and its tokens."""
    names = [name for name, _ in asked.outputs]
    told = [
        {
            "outputs": {name: for_json(name, row[name]) for name in names},
            "tokens": answer.tokens,
            "served_by": answer.served_by,
        }
        for answer, row in zip(answers, rows, strict=True)
    ]
    head = {"model_name": model[0], "model_version": model[1]}
    if asked.id:
        head["id"] = asked.id
    return Body(orjson.dumps({**head, "answers": told}, option=orjson.OPT_SERIALIZE_NUMPY))


def error_body(reason: str, **more: Any) -> bytes:
    """Return the body that says what is wrong."""
    return orjson.dumps({"error": reason, **more})


def for_json(name: str, array: np.ndarray) -> np.ndarray:
    """Return an array as JSON can carry it.

    Raises:
        BadRequestError: If it holds infinity, which JSON has no word for.
    """
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise BadRequestError(
                f"output {name!r} holds infinity, which JSON cannot carry; ask for it with "
                "binary_data true",
                _NOT_ACCEPTABLE,
            )
        if array.dtype == np.float16:
            array = array.astype(np.float32)
    return np.ascontiguousarray(array)


def _head(model: tuple[str, str], asked: Asked, served_by: str) -> dict[str, Any]:
    head: dict[str, Any] = {"model_name": model[0], "model_version": model[1]}
    if asked.id:
        head["id"] = asked.id
    if served_by != "engine":
        head["parameters"] = {"served_by": served_by}
    return head
