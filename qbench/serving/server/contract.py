"""What an engine takes and gives, as a server must know it; ``trying`` finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from qbench.serving.request import Encoded, Feeds

#: Datatypes of the Open Inference Protocol by NumPy's names.
DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}
_ALIASES = {"input_mask": "attention_mask", "segment_ids": "token_type_ids"}
_MASK = "attention_mask"


class Merging(StrEnum):
    """How requests may share a batch."""

    PADDED = "padded"  # of any length: the graph reads a mask
    EQUAL = "equal"  # of equal shapes only
    ALONE = "alone"  # one at a time


@dataclass(frozen=True)
class Tensor:
    """An input or output.

    Attributes:
        name: Its name in the graph.
        dtype: NumPy's name of its element type.
        dims: Sizes of one row, without the batch: ``None`` where free.
        bound: Values must be below it and not negative (rows of the table that they look up);
            ``None`` where any value will do.
    """

    name: str
    dtype: str
    dims: tuple[int | None, ...]
    bound: int | None = None

    @cached_property
    def datatype(self) -> str:
        """Its datatype in the Open Inference Protocol."""
        return DATATYPES[self.dtype]

    @cached_property
    def wire_dtype(self) -> np.dtype[Any]:
        """Its element type in the protocol's bytes."""
        return np.dtype(self.dtype).newbyteorder("<")

    @cached_property
    def key(self) -> str:
        """The name of its role: other names of masks and segments are one."""
        return _ALIASES.get(self.name, self.name)

    @cached_property
    def is_mask(self) -> bool:
        """Whether it says which positions count."""
        return self.key == _MASK and np.dtype(self.dtype).kind in "iu"


@dataclass(frozen=True)
class Contract:
    """What an engine takes and gives.

    Attributes:
        inputs: Inputs, the one that tells a request's length first.
        outputs: Outputs.
        merging: How requests may share a batch.
        one_row: Whether a batch can only be one row.
        longest: Longest request in tokens; ``None`` where lengths are fixed.
        shortest: A size of the free dimensions on which the engine ran.
        sequence_axes: Axes of an output's row that are as long as the request, by output.
        pad_id: Token id of padded positions.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    merging: Merging
    one_row: bool = False
    longest: int | None = None
    shortest: int = 1
    sequence_axes: Mapping[str, tuple[int, ...]] | None = None
    pad_id: int = 0

    @cached_property
    def by_name(self) -> Mapping[str, Tensor]:
        """The inputs by name."""
        return {tensor.name: tensor for tensor in self.inputs}

    @property
    def fixed_length(self) -> int | None:
        """The length that every request must have, where the graph fixes it."""
        first = self.inputs[0]
        return first.dims[0] if len(first.dims) == 1 else None

    @property
    def fills(self) -> bool:
        """Whether a request shorter than the fixed length can be filled up: a mask tells it."""
        fixed = self.fixed_length
        masked = any(tensor.is_mask for tensor in self.inputs)
        return masked and fixed is not None and all(t.dims == (fixed,) for t in self.inputs)

    def fill(self, one: Encoded) -> Encoded:
        """Return a request filled up to the fixed length, where there is one and a mask."""
        if not self.fills or self.fixed_length is None:
            return one
        length = len(one[self.inputs[0].key])
        found: dict[str, Any] = {}
        for tensor in self.inputs:
            row = self._row(tensor, one, length)
            found[tensor.key] = self._filled(tensor, row, self.fixed_length)
        return found

    def pad(self, encoded: Sequence[Encoded]) -> Feeds:
        """Return feeds ``[batch, …]`` of encoded requests, shorter ones padded on the right."""
        feeds: dict[str, np.ndarray] = {}
        lengths = [len(one[self.inputs[0].key]) for one in encoded]
        for tensor in self.inputs:
            rows = [self._row(tensor, one, n) for one, n in zip(encoded, lengths, strict=True)]
            if tensor.dims and tensor.dims[0] is None and self.merging is not Merging.ALONE:
                rows = [self._filled(tensor, row, max(lengths)) for row in rows]
            feeds[tensor.name] = np.stack(rows)
        return feeds

    def _row(self, tensor: Tensor, one: Encoded, length: int) -> np.ndarray:
        found: Any = one.get(tensor.key)
        if found is None:  # a tokenizer does not give every companion of its ids
            if tensor.key == "position_ids":
                found = np.arange(length)
            else:
                found = np.full(length, 1 if tensor.is_mask else 0)
        row = np.asarray(found, tensor.dtype)
        return row if tensor.dims else row.reshape(())

    def _filled(self, tensor: Tensor, row: np.ndarray, longest: int) -> np.ndarray:
        short = longest - len(row)
        if not short:
            return row
        filler = self.pad_id if tensor.key == "input_ids" else 0
        return np.concatenate([row, np.full((short, *row.shape[1:]), filler, row.dtype)])

    def cut(self, row: Mapping[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
        """Return a request's outputs without what belongs to padded positions."""
        found = dict(row)
        if self.merging is not Merging.PADDED:
            return found
        for name, axes in (self.sequence_axes or {}).items():
            for axis in axes:
                found[name] = found[name].take(range(min(length, found[name].shape[axis])), axis)
        return found

    def sample(self, length: int, seed: int = 0) -> dict[str, Any]:
        """Return a random request of that length, by the inputs' keys."""
        rng = np.random.default_rng(seed)
        found: dict[str, Any] = {}
        for tensor in self.inputs:
            shape = tuple(length if size is None else size for size in tensor.dims) or (1,)
            array: np.ndarray
            if np.dtype(tensor.dtype).kind == "f":
                array = rng.normal(size=shape)
            elif tensor.is_mask:
                array = np.ones(shape)
            elif tensor.key == "position_ids":
                array = np.broadcast_to(np.arange(shape[-1]), shape)
            else:
                most = min(tensor.bound or 2, 1 << 30)
                # Low ids stand for no word: a graph that takes its padding from them skips those.
                array = rng.integers(most // 2 if tensor.key == "input_ids" else 0, most, shape)
            found[tensor.key] = array.astype(tensor.dtype)
        return found
