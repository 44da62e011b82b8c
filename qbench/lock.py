"""One writer a folder: an advisory lock that the system lifts when its process ends, however.

``.lock`` also tells who holds it, for the message to the next one. Where the system has no locks
on files, what it tells is all there is: it counts as long as its process lives.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from qbench import storage
from qbench.errors import RunDirError

try:
    import fcntl
except ImportError:  # pragma: no cover - not on POSIX
    fcntl = None  # type: ignore[assignment]
_HAS_LOCKS = fcntl is not None

#: Locks that this process holds, by folder: a second handle in one process shares its lock.
_HELD: dict[Path, IO[bytes]] = {}
#: What the system says of a lock that another process has; anything else: it has no locks there.
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
#: Seconds that a lock's holder gets to end, or to say who it is.
_PATIENCE_S = 1.0
#: Seconds after which a name that was written stays.
_SETTLED_S = 0.1


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that has, or had, a lock.

    Attributes:
        pid: Its number.
        host: Name of its machine.
        boot: What tells one start of that machine from the next; "" where nothing does.
        began_s: When the process began, seconds since 1970: numbers are used again.
    """

    pid: int
    host: str
    boot: str
    began_s: float

    @property
    def is_here(self) -> bool:
        """Whether it ran on this machine, since its last start."""
        return (self.host, self.boot) == (platform.node(), _boot())

    @property
    def is_alive(self) -> bool:
        """Whether it runs now, as far as this machine can tell: another's processes may."""
        if self.host != platform.node():
            return True
        return self.is_here and abs(_began_s(self.pid) - self.began_s) < 2.0


def take_lock(folder: Path) -> None:
    """Lock a folder for this process, until it ends or calls ``give_lock``.

    What a process that ended left behind is no lock, and is taken over.

    Raises:
        RunDirError: If another process has it (its pid and host are named), or the folder cannot
            be written.
    """
    key, path = folder.resolve(), folder / ".lock"
    if key in _HELD:
        return
    try:
        with storage.clear_disk_errors(path):
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
    except OSError as error:
        raise RunDirError(
            f"{folder} cannot be written: {error.strerror}; give another folder with --results"
        ) from error
    try:
        _claim(file, folder)
        with storage.clear_disk_errors(path):
            _sign(file)
    except BaseException:
        file.close()
        raise
    _HELD[key] = file


def give_lock(folder: Path) -> None:
    """Give a folder back to other processes."""
    if file := _HELD.pop(folder.resolve(), None):
        with contextlib.suppress(OSError):
            file.truncate(0)
        file.close()


def _claim(file: IO[bytes], folder: Path) -> None:
    """Take the lock; one whose holder is ending, or has not said yet who it is, gets a moment."""
    until = time.monotonic() + _PATIENCE_S
    while not (locked := _lock(file)):
        owner = _read_owner(file)
        if locked is None:
            _claim_by_name(file, folder, owner)
            return
        if (owner is not None and owner.is_alive) or time.monotonic() > until:
            raise RunDirError(_told(folder, owner))
        time.sleep(0.02)


def _lock(file: IO[bytes]) -> bool | None:
    """Return whether this process has the lock now; ``None`` where there are no locks."""
    if not _HAS_LOCKS:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _TAKEN else None
    return True


def _claim_by_name(file: IO[bytes], folder: Path, owner: Owner | None) -> None:
    """Take a folder on a system without locks: by what its file says, and still says later."""
    if owner is None or not owner.is_alive:
        _sign(file)
        time.sleep(_SETTLED_S)  # of two that sign at one moment, the last one stays
        owner = _read_owner(file)
    if owner is None or owner.pid != os.getpid() or not owner.is_here:
        raise RunDirError(f"{_told(folder, owner)}. If it ended, delete {folder / '.lock'}")


def _told(folder: Path, owner: Owner | None) -> str:
    who = "another process is writing"
    if owner is not None and owner.is_alive:
        who += f" (pid {owner.pid} on {owner.host})"
    elif owner is not None:
        who = (
            f"a process that pid {owner.pid} on {owner.host} started, and left behind when it "
            "ended, is writing"
        )
    return f"{who} to {folder}; wait for it, end it, or use another run id"


def _sign(file: IO[bytes]) -> None:
    file.seek(0)
    file.truncate(0)
    file.write(json.dumps(asdict(_me())).encode() + b"\n")


def _read_owner(file: IO[bytes]) -> Owner | None:
    file.seek(0)
    try:
        said = json.loads(file.read())
        return Owner(int(said["pid"]), said["host"], said["boot"], float(said["began_s"]))
    except (ValueError, KeyError, TypeError):
        return None


def _me() -> Owner:
    return Owner(os.getpid(), platform.node(), _boot(), _began_s(os.getpid()))


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _began_s(pid: int) -> float:
    """Return when a process began; −1 where there is none, or none but its remains."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return -1.0
        return float(process.create_time())
    except psutil.Error:
        return -1.0


def _forget() -> None:
    """Close a forked child's copies: the lock is its parent's, and ends with it."""
    for file in _HELD.values():
        file.close()
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
