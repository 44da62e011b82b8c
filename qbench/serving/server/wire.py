"""Bodies of the Open Inference Protocol v2: JSON, and tensors as bytes behind a JSON header."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from qbench.errors import unknown_name
from qbench.serving.server.contract import Contract, Merging, Tensor
from qbench.serving.server.terms import (
    LONGEST_NAME,
    Asked,
    BadRequestError,
    kind_of,
    parameters_of,
    parse_asked,
)
from qbench.serving.server.values import values_of


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request may be.

    Attributes:
        body_bytes: Largest body, after decompression too.
        items: Most rows or texts of a request.
        truncate: Whether what is too long is cut; else it is refused.
    """

    body_bytes: int = 16 << 20
    items: int = 128
    truncate: bool = False


@dataclass(frozen=True, slots=True)
class InferRequest:
    """Rows that were asked for, each by the keys of the inputs.

    Attributes:
        asked: Terms and outputs.
        rows: One mapping a row of the request.
        length: Tokens of each row; 0 where rows have no length.
    """

    asked: Asked
    rows: list[dict[str, np.ndarray]] = field(default_factory=list)
    length: int = 0


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body.

    Raises:
        BadRequestError: If it is none: bad syntax, NaN, not UTF-8, nested too deeply.
    """
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise BadRequestError(f"the body must be a JSON object, got {kind_of(found)}")
    return found


def split_body(body: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    """Return the JSON part of a body and the bytes behind it.

    Args:
        body: The whole body.
        header_length: The header ``Inference-Header-Content-Length``, if there is one.

    Raises:
        BadRequestError: If that is no length within the body.
    """
    if header_length is None:
        return body, memoryview(b"")
    words = header_length.strip()
    if not (words.isascii() and words.isdigit() and len(words) < 19):
        raise BadRequestError(
            f"Inference-Header-Content-Length is {words[:40]!r}; allowed: a number of bytes"
        )
    if int(words) > len(body):
        raise BadRequestError(
            f"Inference-Header-Content-Length is {words}, and the body has {len(body)} bytes"
        )
    return body[: int(words)], memoryview(body)[int(words) :]


def parse_infer(
    head: Mapping[str, Any],
    rest: memoryview,
    headers: Mapping[str, str],
    contract: Contract,
    limits: RequestLimits,
) -> InferRequest:
    """Return what an inference request asks for, checked against what the engine takes.

    Raises:
        BadRequestError: With the first thing that is wrong, in words.
    """
    asked = parse_asked(head, headers, contract)
    inputs = head.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise BadRequestError('"inputs" must be a list of tensors')
    arrays: dict[str, np.ndarray] = {}
    known, place = contract.by_name, 0
    for item in inputs:
        tensor = _tensor_of(item, known, arrays)
        shape = _shape_of(item, tensor, limits)
        size = _binary_size(item, tensor, shape)
        if size is None:
            array = _checked(values_of(item.get("data"), tensor, shape), tensor)
        else:
            if place + size > len(rest):
                raise BadRequestError(
                    f"input {tensor.name!r} needs {size} bytes behind the JSON, "
                    f"{len(rest) - place} are left"
                )
            array = _from_bytes(rest[place : place + size], tensor, shape)
            place += size
        arrays[tensor.name] = array
    if place != len(rest):
        raise BadRequestError(f"{len(rest) - place} bytes behind the tensors belong to none")
    return _rows_of(arrays, asked, contract, limits)


def _tensor_of(item: Any, known: Mapping[str, Tensor], taken: Mapping[str, Any]) -> Tensor:
    name = item.get("name") if isinstance(item, dict) else None
    if not isinstance(name, str):
        raise BadRequestError('each of "inputs" must be an object with a "name"')
    if name not in known:
        raise BadRequestError(unknown_name("input", name[:LONGEST_NAME], known))
    if name in taken:
        raise BadRequestError(f"input {name!r} is given twice")
    tensor = known[name]
    if item.get("datatype") != tensor.datatype:
        raise BadRequestError(
            f"input {name!r} has datatype {str(item.get('datatype'))[:40]!r}; "
            f"allowed: {tensor.datatype}"
        )
    return tensor


def _shape_of(item: Mapping[str, Any], tensor: Tensor, limits: RequestLimits) -> tuple[int, ...]:
    shape = item.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise BadRequestError(f"input {tensor.name!r}: the shape must be a list of whole numbers")
    if not _fits(shape, tensor.dims):
        wanted = [-1, *(-1 if size is None else size for size in tensor.dims)]
        raise BadRequestError(
            f"input {tensor.name!r} has shape {str(shape)[:80]}; allowed: {wanted}, where -1 is "
            "any size from 1 on"
        )
    if shape[0] > limits.items:
        raise BadRequestError(
            f"input {tensor.name!r} has {shape[0]} rows; at most {limits.items} are served at once"
        )
    return tuple(shape)


def _fits(shape: Sequence[int], dims: Sequence[int | None]) -> bool:
    if len(shape) != len(dims) + 1 or shape[0] < 1:
        return False
    for size, wanted in zip(shape[1:], dims, strict=True):
        if size < 1 or wanted not in (None, size):
            return False
    return True


def _binary_size(item: Mapping[str, Any], tensor: Tensor, shape: Sequence[int]) -> int | None:
    """Return the bytes of a tensor that lie behind the JSON; ``None`` if its data is in it."""
    size = parameters_of(item, f"input {tensor.name!r}").get("binary_data_size")
    if size is None:
        return None
    needed = math.prod(shape) * tensor.wire_dtype.itemsize
    if type(size) is not int or size != needed:
        raise BadRequestError(
            f"input {tensor.name!r}: binary_data_size is {str(size)[:40]}, and shape {list(shape)} "
            f"of {tensor.datatype} takes {needed} bytes"
        )
    if "data" in item:
        raise BadRequestError(f'input {tensor.name!r} has "data" and binary_data_size; give one')
    return needed


def _from_bytes(raw: memoryview, tensor: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    if tensor.dtype == "bool":
        return np.frombuffer(raw, np.uint8).astype(bool).reshape(shape)
    array = np.frombuffer(raw, tensor.wire_dtype)
    return _checked(array.astype(tensor.dtype).reshape(shape), tensor)


def _checked(array: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Refuse values that the engine cannot take."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise BadRequestError(f"input {tensor.name!r} holds a value that is not finite")
    if tensor.bound is None and not tensor.is_mask:
        return array
    low, high = int(array.min()), int(array.max())
    if tensor.bound is not None and (low < 0 or high >= tensor.bound):
        raise BadRequestError(
            f"input {tensor.name!r} holds {low if low < 0 else high}; allowed: 0 to "
            f"{tensor.bound - 1}"
        )
    if tensor.is_mask:
        if low < 0 or high > 1:
            raise BadRequestError(f"input {tensor.name!r} is a mask; allowed: 0 and 1")
        if low == 0 and array.ndim > 1 and not array.any(axis=-1).all():
            raise BadRequestError(f"input {tensor.name!r}: a row masks every position")
    return array


def _rows_of(
    arrays: Mapping[str, np.ndarray], asked: Asked, contract: Contract, limits: RequestLimits
) -> InferRequest:
    missing = [tensor.name for tensor in contract.inputs if tensor.name not in arrays]
    if missing:
        raise BadRequestError(f"input {missing[0]!r} is missing")
    counts = {array.shape[0] for array in arrays.values()}
    if len(counts) > 1:
        told = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise BadRequestError(f"inputs differ in their first dimension, the batch: {told}")
    length = _common_length(arrays, contract)
    if contract.longest is not None and length > contract.longest:
        if not limits.truncate:
            raise BadRequestError(
                f"a row has {length} tokens; at most {contract.longest} are served"
            )
        length = contract.longest
        arrays = {
            tensor.name: arrays[tensor.name][:, :length]
            if tensor.dims and tensor.dims[0] is None
            else arrays[tensor.name]
            for tensor in contract.inputs
        }
        for tensor in contract.inputs:
            _checked(arrays[tensor.name], tensor)
    rows = [
        {tensor.key: np.atleast_1d(arrays[tensor.name][row]) for tensor in contract.inputs}
        for row in range(counts.pop())
    ]
    return InferRequest(asked, rows, length)


def _common_length(arrays: Mapping[str, np.ndarray], contract: Contract) -> int:
    lengths = {
        tensor.name: arrays[tensor.name].shape[1]
        for tensor in contract.inputs
        if tensor.dims and tensor.dims[0] is None
    }
    if len(set(lengths.values())) > 1 and contract.merging is not Merging.ALONE:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise BadRequestError(f"inputs differ in length: {told}")
    return max(lengths.values(), default=0)
