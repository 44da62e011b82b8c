"""One writer a folder: an advisory lock that the system lifts when its process ends, however."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from qbench import storage
from qbench.errors import RunDirError

try:
    import fcntl
except ImportError:  # pragma: no cover - not on POSIX: folders are then not locked
    fcntl = None  # type: ignore[assignment]

#: Locks that this process holds, by folder: a second handle in one process shares its lock.
_HELD: dict[Path, IO[bytes]] = {}


def take_lock(folder: Path) -> None:
    """Lock a folder for this process, until it ends or calls ``give_lock``.

    Raises:
        RunDirError: If another process has it.
    """
    key = folder.resolve()
    if fcntl is None or key in _HELD:
        return
    with storage.clear_disk_errors(folder):
        file = open(folder / ".lock", "ab")  # noqa: SIM115 - held beyond this block
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RunDirError(
            f"another process is writing to {folder}; wait for it, or use another run id"
        ) from None
    _HELD[key] = file


def give_lock(folder: Path) -> None:
    """Give a folder back to other processes."""
    if file := _HELD.pop(folder.resolve(), None):
        file.close()
