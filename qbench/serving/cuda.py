"""Memory and a stream of the CUDA runtime, for lanes on a device: by ctypes, without a wheel."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from qbench.errors import MeasurementError

_NAMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
_TO_DEVICE, _TO_HOST = 1, 2
_NON_BLOCKING = 1  # the stream does not wait for the default stream

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_INTO = ctypes.POINTER(ctypes.c_void_p)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaGetDeviceCount": (ctypes.POINTER(_INT),),
    "cudaMallocHost": (_INTO, _SIZE),
    "cudaFreeHost": (_POINTER,),
    "cudaMalloc": (_INTO, _SIZE),
    "cudaFree": (_POINTER,),
    "cudaMemGetInfo": (ctypes.POINTER(_SIZE), ctypes.POINTER(_SIZE)),
    "cudaStreamCreateWithFlags": (_INTO, ctypes.c_uint),
    "cudaStreamSynchronize": (_POINTER,),
    "cudaMemcpyAsync": (_POINTER, _POINTER, _SIZE, _INT, _POINTER),
}


class Cuda:
    """The CUDA runtime of this process; the device is the first one."""

    device = "cuda"  # its name in bindings

    def __init__(self, library: ctypes.CDLL) -> None:
        """Take the loaded library.

        Raises:
            MeasurementError: If it lacks a function.
        """
        self._calls: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            try:
                call = self._calls[name] = library[name]
            except AttributeError as error:
                raise MeasurementError(f"the CUDA runtime has no {name}") from error
            call.argtypes, call.restype = arguments, _INT

    def devices(self) -> int:
        """Return how many devices there are; 0 without a driver."""
        count = _INT(0)
        return count.value if self._calls["cudaGetDeviceCount"](ctypes.byref(count)) == 0 else 0

    def free_and_total(self) -> tuple[int, int]:
        """Return the free memory of the device and all of it, bytes."""
        free, total = _SIZE(0), _SIZE(0)
        self.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def page_locked(self, size: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array [size] in page-locked memory, which is freed with it."""
        count = max(size * dtype.itemsize, 1)
        address = self._made("cudaMallocHost", count)
        memory = (ctypes.c_ubyte * count).from_address(address)
        _free_with(memory, self._calls["cudaFreeHost"], address)
        return np.ndarray((size,), dtype, memoryview(memory))

    def memory(self, count: int) -> DeviceMemory:
        """Return ``count`` bytes on the device, which are freed with it."""
        memory = DeviceMemory(self._made("cudaMalloc", max(count, 1)), count)
        _free_with(memory, self._calls["cudaFree"], memory.address)
        return memory

    def stream(self) -> Stream:
        """Return a new stream.

        NOTE: it lives as long as the process: a session that computes on it may outlive its lane.
        """
        return Stream(self, self._made("cudaStreamCreateWithFlags", _NON_BLOCKING))

    def call(self, name: str, *given: Any) -> None:
        """Call a function of the runtime.

        Raises:
            MeasurementError: If it fails.
        """
        code = self._calls[name](*given)
        if code != 0:
            raise MeasurementError(f"{name} failed with CUDA error {code}")

    def _made(self, name: str, how: int) -> int:
        found = ctypes.c_void_p()
        self.call(name, ctypes.byref(found), how)
        return found.value or 0


class DeviceMemory:
    """Bytes on the device."""

    def __init__(self, address: int, count: int) -> None:
        """Note where they are, and how many."""
        self.address, self.count = address, count


class Stream:
    """What is copied and computed on it is done in order, while the host goes on."""

    def __init__(self, cuda: Cuda, handle: int) -> None:
        """Take the runtime and its handle of the stream."""
        self.cuda, self.handle = cuda, handle

    def copy_in(self, memory: DeviceMemory, array: np.ndarray) -> None:
        """Begin to copy an array to the device."""
        given = (memory.address, array.ctypes.data, array.nbytes, _TO_DEVICE, self.handle)
        self.cuda.call("cudaMemcpyAsync", *given)

    def copy_out(self, array: np.ndarray, memory: DeviceMemory) -> None:
        """Begin to copy from the device into an array."""
        given = (array.ctypes.data, memory.address, array.nbytes, _TO_HOST, self.handle)
        self.cuda.call("cudaMemcpyAsync", *given)

    def wait(self) -> None:
        """Wait until all that was begun is done."""
        self.cuda.call("cudaStreamSynchronize", self.handle)


def find_cuda() -> Cuda | None:
    """Return the CUDA runtime where there is one, and a device."""
    for name in _NAMES:
        try:
            cuda = Cuda(ctypes.CDLL(name))
        except OSError:
            continue
        return cuda if cuda.devices() else None
    return None


def _free_with(owner: Any, free: Callable[[int], int], address: int) -> None:
    """Free memory when its owner goes; not at the end of the process, when lanes may still run."""
    weakref.finalize(owner, free, address).atexit = False
