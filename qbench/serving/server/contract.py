"""What an engine takes and gives, as a server must know it: found from its graph, then tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from qbench.errors import MeasurementError, ModelError
from qbench.runtime.ort import Session
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
_TRIED = 512
_SHORT = 3


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
        sequence_axes: Axes of an output's row that are as long as the request, by output.
        pad_id: Token id of padded positions.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    merging: Merging
    one_row: bool = False
    longest: int | None = None
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
                array = rng.integers(0, min(tensor.bound or 2, 1 << 30), size=shape)
            found[tensor.key] = array.astype(tensor.dtype)
        return found


def find_contract(
    session: Session,
    bounds: Mapping[str, int],
    *,
    longest: int | None = None,
    pad_id: int = 0,
    source: str = "the engine",
) -> Contract:
    """Return what an engine takes and gives, after running it on requests of several lengths.

    Args:
        session: The engine.
        bounds: Rows of the table that an input looks up, by input.
        longest: Longest request in tokens, if the engine runs on it; else the longest that it
            runs on. ``None`` stands for 512.
        pad_id: Token id of padded positions.
        source: What the user gave, for messages.

    Raises:
        ModelError: If the graph has no batch dimension, a type that cannot be sent, or does
            not run on requests of the shapes that it states.
    """
    one_row = _check_batch(session, source)
    inputs = tuple(
        Tensor(spec.name, spec.dtype, _dims(spec.shape), bounds.get(spec.name))
        for spec in session.inputs
    )
    ordered = tuple(sorted(inputs, key=lambda one: (one.key != "input_ids", None not in one.dims)))
    outputs = tuple(
        Tensor(one.name, _output_dtype(one, source), _dims(tuple(one.shape)))
        for one in session.raw.get_outputs()
    )
    contract = Contract(ordered, outputs, _merging(ordered, one_row), one_row, pad_id=pad_id)
    return _tried(contract, session, longest, source)


def _dims(shape: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) and size >= 0 else None for size in shape[1:])


def _check_batch(session: Session, source: str) -> bool:
    """Return whether a batch is one row; refuse a graph without a batch dimension."""
    shapes = {spec.name: tuple(spec.shape) for spec in session.inputs}
    for spec in session.inputs:
        if spec.dtype not in DATATYPES:
            raise ModelError(f"{source}: input {spec.name!r} is {spec.dtype}, which cannot be sent")
        if not spec.shape:
            raise ModelError(
                f"{source}: input {spec.name!r} is a scalar: the graph has no batch dimension; "
                "export it with one, as [batch, …]"
            )
    firsts = {shape[0] for shape in shapes.values()}
    fixed = {size for size in firsts if isinstance(size, int)}
    if fixed - {1} or (fixed and len(firsts) > 1):
        told = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ModelError(
            f"{source}: the first dimension is no free batch ({told}); export it with a batch "
            "dimension of free size"
        )
    return bool(fixed)


def _output_dtype(output: Any, source: str) -> str:
    kinds = {"tensor(float)": "float32", "tensor(double)": "float64"}
    dtype = kinds.get(output.type, output.type.removeprefix("tensor(").removesuffix(")"))
    if dtype not in DATATYPES:
        raise ModelError(f"{source}: output {output.name!r} is {output.type}; it cannot be sent")
    return str(dtype)


def _merging(inputs: Sequence[Tensor], one_row: bool) -> Merging:
    free = [tensor for tensor in inputs if None in tensor.dims]
    if one_row:
        return Merging.ALONE
    if not free:
        return Merging.EQUAL
    lines = all(tensor.dims == (None,) for tensor in inputs)
    if lines and any(tensor.is_mask for tensor in inputs):
        return Merging.PADDED
    leading = all(tensor.dims[0] is None and None not in tensor.dims[1:] for tensor in free)
    return Merging.EQUAL if leading else Merging.ALONE


def _tried(contract: Contract, session: Session, longest: int | None, source: str) -> Contract:
    """Run the engine on requests and return the contract with what they showed."""
    rows = 1 if contract.one_row else 2
    free = any(None in tensor.dims for tensor in contract.inputs)
    run = _runner(contract, session, rows)
    if not free:
        _run_or_explain(run, 1, source)
        return replace(contract, sequence_axes={})
    first = _run_or_explain(run, _SHORT, source)
    limit = _longest(run, longest or _TRIED)
    second = _run_or_explain(run, min(max(_SHORT + 2, 2), limit), source) if limit > 3 else first
    axes: dict[str, tuple[int, ...]] = {}
    for name, array in first.items():
        other, found = second[name], []
        for axis, (size, other_size) in enumerate(
            zip(array.shape[1:], other.shape[1:], strict=True)
        ):
            if (size, other_size) == (_SHORT, min(max(_SHORT + 2, 2), limit)) and limit > 3:
                found.append(axis)
            elif size != other_size:
                contract = replace(contract, merging=_stricter(contract.merging))
        axes[name] = tuple(found)
    return replace(contract, longest=limit, sequence_axes=axes)


def _stricter(merging: Merging) -> Merging:
    """Return the merging under which nothing is cut: an axis follows the length in its own way."""
    return Merging.EQUAL if merging is Merging.PADDED else merging


def _runner(
    contract: Contract, session: Session, rows: int
) -> Callable[[int], dict[str, np.ndarray]]:
    def run(length: int) -> dict[str, np.ndarray]:
        feeds = contract.pad([contract.sample(length, seed) for seed in range(rows)])
        outputs = session.run(feeds)
        for name, array in outputs.items():
            if array.ndim < 1 or array.shape[0] != rows:
                raise ModelError(
                    f"output {name!r} has shape {list(array.shape)} for a batch of {rows}: the "
                    "graph has no batch dimension there; export it with one"
                )
        return outputs

    return run


def _run_or_explain(
    run: Callable[[int], dict[str, np.ndarray]], length: int, source: str
) -> dict[str, np.ndarray]:
    try:
        return run(length)
    except MeasurementError as error:
        raise ModelError(
            f"{source} does not run on requests of the shapes that its graph states: "
            f"{' '.join(str(error).split())[:400]}"
        ) from error


def _longest(run: Callable[[int], dict[str, np.ndarray]], wanted: int) -> int:
    """Return the longest request, up to the one wanted, that the engine runs on; by bisection."""
    if wanted <= _SHORT or _runs(run, wanted):
        return wanted
    good, bad = _SHORT, wanted
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if _runs(run, middle) else (good, middle)
    return good


def _runs(run: Callable[[int], dict[str, np.ndarray]], length: int) -> bool:
    try:
        run(length)
    except MeasurementError:
        return False
    return True
