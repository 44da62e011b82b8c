"""Reference activations at the cuts: in memory up to a budget, beyond it in a file.

The file has no name from the moment that it is made, so nothing is left of it however the process
ends. It is memory-mapped tensor by tensor, as they are asked for: what was read and let go takes
no memory any more. The numbers are the same wherever they lie.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qbench.runtime.memory import free_bytes, resident_bytes
from qbench.storage import clear_disk_errors
from qbench.tasks.base import Array

#: Share of the memory that is free for activations where nobody said how much.
_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an array lies in the file.

    Attributes:
        start: Byte at which it begins, a multiple of what a map can begin at.
        shape: Its sizes.
        dtype: Its element type.
    """

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Activations:
    """Arrays by batch and name.

    Args:
        budget_bytes: Bytes of arrays to keep in memory; beyond them arrays go to the file.
        folder: Where the file lies; the system's temporary folder by default.
    """

    def __init__(self, budget_bytes: int, folder: Path | None = None) -> None:
        """Keep nothing yet; the file is made when the first array does not fit."""
        self._left = budget_bytes
        self._folder = folder or Path(tempfile.gettempdir())
        self._file: Any = None
        self._end = 0
        self._batches: list[dict[str, Array | _Place]] = []
        self.memory_bytes = 0
        self.disk_bytes = 0

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    def append(self, arrays: Mapping[str, Array]) -> None:
        """Keep the arrays of the next batch.

        Raises:
            InputError: If the disk is full.
        """
        kept: dict[str, Array | _Place] = {}
        for name, array in arrays.items():
            if array.nbytes <= self._left or not _mappable(array):
                self._left -= array.nbytes
                self.memory_bytes += array.nbytes
                kept[name] = array
            else:
                kept[name] = self._write(array)
        self._batches.append(kept)

    def batch(self, index: int) -> dict[str, Array]:
        """Return the arrays of a batch; those in the file are read-only maps of it."""
        return {
            name: self._read(kept) if isinstance(kept, _Place) else kept
            for name, kept in self._batches[index].items()
        }

    def _write(self, array: Array) -> _Place:
        with clear_disk_errors(self._folder):
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
            start = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            left = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            self._file.seek(start)
            while left:  # a raw file may take less than it is given
                left = left[self._file.write(left) :]
        self._end = start + array.nbytes
        self.disk_bytes += array.nbytes
        return _Place(start, array.shape, array.dtype)

    def _read(self, place: _Place) -> Array:
        size = int(np.prod(place.shape)) * place.dtype.itemsize
        mapped = mmap.mmap(self._file.fileno(), size, offset=place.start, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, place.dtype).reshape(place.shape)

    def spill(self, most_bytes: int) -> None:
        """Move arrays from memory to the file, the last batches first, until so many bytes went.

        Raises:
            InputError: If the disk is full.
        """
        self._left, left = 0, most_bytes
        for kept in reversed(self._batches):
            for name, array in kept.items():
                if left <= 0:
                    return
                if not isinstance(array, _Place) and _mappable(array):
                    kept[name] = self._write(array)
                    self.memory_bytes -= array.nbytes
                    left -= array.nbytes

    def close(self) -> None:
        """Let go of everything; arrays that somebody still holds stay readable."""
        self._batches = []
        if self._file is not None:
            self._file.close()
            self._file = None


def _mappable(array: Array) -> bool:
    """Whether an array is plain numbers and not empty: nothing else can be mapped."""
    return array.nbytes > 0 and array.dtype.kind in "biufc"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a replay may take of segments, memory and disk.

    Attributes:
        max_segments: Most segments to cut the graph into.
        budget_bytes: Bytes of activations in memory; ``None`` leaves it to the limit.
        memory_limit: Bytes that the whole process may take; ``None`` for no limit.
        folder: Where activations beyond the budget go; the temporary folder by default.
        cells: Cells that are measured at once; a limit leaves them what they take.
    """

    max_segments: int = 32
    budget_bytes: int | None = None
    memory_limit: int | None = None
    folder: Path | None = None
    cells: int = 1

    def excess(self, reserved: int) -> int:
        """Return by how many bytes the process is too large to take ``reserved`` more."""
        if self.memory_limit is None:
            return 0
        return max(resident_bytes() + reserved - self.memory_limit, 0)

    def budget(self, reserved: int) -> int:
        """Return the bytes of activations that stay in memory.

        What was said counts; a limit leaves what the process holds already and what cells will
        take beside it; without either it is half of the memory that is free.

        Args:
            reserved: Bytes that cells will take beside the activations.
        """
        choices = [] if self.budget_bytes is None else [self.budget_bytes]
        if self.memory_limit is not None:
            choices.append(max(self.memory_limit - resident_bytes() - reserved, 0))
        return min(choices) if choices else int(free_bytes() * _SHARE)
