"""Resident memory of this process: how much it is, and giving back what is not used."""

from __future__ import annotations

import contextlib
import ctypes
import sys


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def free_bytes() -> int:
    """Return the bytes of memory that the machine could still give."""
    import psutil

    return int(psutil.virtual_memory().available)


def return_free_memory() -> None:
    """Give pages that were freed, and that the C library keeps for later, back to the system.

    A session of a large model frees gigabytes in pieces; without this they stay resident beside
    those of the next one. Elsewhere than on glibc nothing is done.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
