"""Buffers that a lane owns and uses again: inputs are padded into them, outputs land in them.

A lane runs one batch at a time, so that one set of buffers a lane is enough; they are as large
as the largest batch. On a CPU this buys steadiness, not speed; on CUDA the host side is
page-locked, so that copies need no staging and run beside the device's work, on the lane's stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from qbench.errors import MeasurementError
from qbench.runtime.ort import Session
from qbench.serving.cuda import DeviceMemory, Stream
from qbench.serving.request import Encoded, Feeds, Pad

#: Makes a flat array of a size and type.
Host: TypeAlias = Callable[[int, Any], np.ndarray]

_ALIASES = {"input_mask": "attention_mask", "segment_ids": "token_type_ids"}
_KNOWN = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


class InputSpec(Protocol):
    """An input of a graph."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def dtype(self) -> str:
        """Its element type by numpy's name."""
        ...

    @property
    def shape(self) -> tuple[int | str | None, ...]:
        """Its sizes: a number where fixed."""
        ...


class Buffers:
    """Flat arrays by name that grow to the largest size asked for; each growth is counted."""

    def __init__(self, host: Host = np.empty) -> None:
        """Begin empty.

        Args:
            host: Makes an array of a size and type: ``Cuda.page_locked`` for a device's lanes.
        """
        self.allocations = 0
        self._host = host
        self._flat: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array of that shape in the buffer of that name; its content is stale."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.size < size or flat.dtype != dtype:
            flat = self._flat[name] = self._host(size, dtype)
            self.allocations += 1
        return flat[:size].reshape(shape)


class PooledPad:
    """Pads requests into a lane's own buffers; what it returns lasts until the next call."""

    def __init__(
        self,
        specs: Sequence[InputSpec],
        tokens: int,
        pad_id: int = 0,
        host: Host = np.empty,
    ) -> None:
        """Allocate.

        Args:
            specs: Inputs of the graph; see ``can_pool``.
            tokens: Padded tokens of the largest batch.
            pad_id: Token id of padded positions.
            host: Makes the buffers; see ``Buffers``.
        """
        self.buffers = Buffers(host)
        self._inputs = [
            (spec.name, _ALIASES.get(spec.name, spec.name), np.dtype(spec.dtype)) for spec in specs
        ]
        self._pad_id = pad_id
        for name, _, dtype in self._inputs:
            self.buffers.take(name, (tokens,), dtype)

    def __call__(self, encoded: Sequence[Encoded]) -> Feeds:
        """Return feeds ``[batch, longest]`` that lie in the buffers."""
        sizes = [len(one["input_ids"]) for one in encoded]
        shape = len(encoded), max(sizes)
        feeds = {}
        for name, source, dtype in self._inputs:
            feed = self.buffers.take(name, shape, dtype)
            self._fill(feed, source, encoded, sizes)
            feeds[name] = feed
        return feeds

    def _fill(
        self, feed: np.ndarray, source: str, encoded: Sequence[Encoded], sizes: Sequence[int]
    ) -> None:
        filler = self._pad_id if source == "input_ids" else 0
        for row, (one, size) in enumerate(zip(encoded, sizes, strict=True)):
            line = feed[row]
            if source in one:
                line[:size] = one[source]
            elif source == "position_ids":
                line[:] = np.arange(feed.shape[1])
                continue
            else:
                line[:size] = 1 if source == "attention_mask" else 0
            line[size:] = filler


def can_pool(specs: Sequence[InputSpec]) -> bool:
    """Whether buffers suit a graph: token inputs ``[batch, sequence]`` of free sizes."""
    return all(
        _ALIASES.get(spec.name, spec.name) in _KNOWN
        and len(spec.shape) == 2
        and not any(isinstance(size, int) for size in spec.shape)
        for spec in specs
    )


def pools_for(
    specs: Sequence[InputSpec],
    pad: Pad,
    encoded: Sequence[Encoded],
    tokens: int,
    pad_id: int = 0,
    host: Host = np.empty,
) -> Callable[[], PooledPad] | None:
    """Return what makes a lane's buffers, or ``None`` where they would not pad as ``pad`` does.

    Args:
        specs: Inputs of the graph.
        pad: What pads without buffers.
        encoded: Some encoded requests, on which both must agree.
        tokens: Padded tokens of the largest batch.
        pad_id: Token id of padded positions.
        host: Makes the buffers; see ``Buffers``.
    """
    if not specs or not can_pool(specs):
        return None
    trial, group = PooledPad(specs, tokens, pad_id), list(encoded[:4])
    for _ in range(2):
        wanted, got = pad(group), trial(group)
        for name, array in wanted.items():
            if name in got and not _same(array, got[name]):
                return None
        group.reverse()
    return lambda: PooledPad(specs, tokens, pad_id, host)


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and np.array_equal(left, right)


class BoundRun:
    """Runs an ONNX Runtime session with its outputs in a lane's own buffers.

    What it returns lasts until the next call: a decoder must copy. Outputs whose sizes do not
    follow from the inputs', by the names of their dimensions, are left to the runtime; so are
    those whose names said so and were wrong, from the first time on that they were.
    """

    def __init__(self, session: Session, host: Host = np.empty) -> None:
        """Take a session; several lanes may share it.

        Args:
            session: The session.
            host: Makes the buffers; see ``Buffers``.
        """
        self._session, self._raw = session, session.raw
        self.buffers = Buffers(host)
        self._inputs = {one.name: tuple(one.shape) for one in session.inputs}
        self._outputs = [(one.name, tuple(one.shape), one.type) for one in self._raw.get_outputs()]
        self._misnamed: set[str] = set()
        self._expected: dict[str, tuple[int, ...]] = {}
        self.binding = self._raw.io_binding()

    def __call__(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Run once.

        Raises:
            MeasurementError: If the runtime refuses; the message is the runtime's own.
        """
        try:
            return self._run(feeds)
        except MeasurementError:
            self.finish({})
            found = self._session.run(feeds)  # which tells better why, if it was the request
            wrong = {n for n, shape in self._expected.items() if found[n].shape != shape}
            if not wrong:
                raise
            self._misnamed |= wrong
            return found

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        binding = self.binding
        sizes: dict[str, int] = {}
        self._expected.clear()
        binding.clear_binding_inputs()
        binding.clear_binding_outputs()
        for name, dims in self._inputs.items():
            array = np.ascontiguousarray(feeds[name])
            self.bind_input(name, array)
            pairs = zip(dims, array.shape, strict=True)
            sizes |= {dim: size for dim, size in pairs if isinstance(dim, str)}
        found: dict[str, np.ndarray | None] = {}
        for name, dims, kind in self._outputs:
            found[name] = self._bind_output(name, dims, kind, sizes)
        self._session.run_bound(binding)
        self.finish({name: array for name, array in found.items() if array is not None})
        return {
            name: binding.get_outputs()[place].numpy() if array is None else array
            for place, (name, array) in enumerate(found.items())
        }

    def bind_input(self, name: str, array: np.ndarray) -> None:
        """Bind an input to an array."""
        self.binding.bind_cpu_input(name, array)

    def bind_array(self, name: str, array: np.ndarray) -> None:
        """Bind an output to an array."""
        given = (array.dtype.type, array.shape, array.ctypes.data)
        self.binding.bind_output(name, "cpu", 0, *given)

    def finish(self, outputs: Mapping[str, np.ndarray]) -> None:
        """See to it that these outputs lie in their arrays and nothing goes on; here it is so."""

    def _bind_output(
        self, name: str, dims: tuple[Any, ...], kind: str, sizes: dict[str, int]
    ) -> np.ndarray | None:
        dtype = _DTYPES.get(kind)
        shape = tuple(dim if isinstance(dim, int) else sizes.get(dim) for dim in dims)
        if dtype is None or None in shape or not shape or name in self._misnamed:
            self.binding.bind_output(name, "cpu")
            return None
        array = self.buffers.take(name, tuple(int(size or 0) for size in shape), np.dtype(dtype))
        self._expected[name] = array.shape
        self.bind_array(name, array)
        return array


class StreamedRun(BoundRun):
    """Runs a session that computes on a lane's own CUDA stream, on memory that the lane keeps.

    Inputs are copied from page-locked buffers to the device, the session runs, and outputs are
    copied back, all in order on the one stream; the host waits once, at the end. Copies of one
    lane thus run beside the computation of others.
    """

    def __init__(self, session: Session, stream: Stream) -> None:
        """Take a session that was opened on the stream; no other lane may use either."""
        super().__init__(session, stream.cuda.page_locked)
        self._stream, self._memory = stream, dict[str, DeviceMemory]()
        self.device_allocations = 0

    def bind_input(self, name: str, array: np.ndarray) -> None:
        """Begin to copy an array to the device, and bind the input there."""
        memory = self._take(f"in {name}", array.nbytes)
        self._stream.copy_in(memory, array)
        given = (array.dtype.type, array.shape, memory.address)
        self.binding.bind_input(name, self._stream.cuda.device, 0, *given)

    def bind_array(self, name: str, array: np.ndarray) -> None:
        """Bind an output to memory on the device that is as large as an array."""
        memory = self._take(f"out {name}", array.nbytes)
        given = (array.dtype.type, array.shape, memory.address)
        self.binding.bind_output(name, self._stream.cuda.device, 0, *given)

    def finish(self, outputs: Mapping[str, np.ndarray]) -> None:
        """Copy the outputs into their arrays, and wait."""
        for name, array in outputs.items():
            self._stream.copy_out(array, self._memory[f"out {name}"])
        self._stream.wait()

    def _take(self, name: str, count: int) -> DeviceMemory:
        memory = self._memory.get(name)
        if memory is None or memory.count < count:
            memory = self._memory[name] = self._stream.cuda.memory(count)
            self.device_allocations += 1
        return memory


_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}
