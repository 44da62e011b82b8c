"""How much memory is used, and how much there is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qbench.serving.cuda import Cuda

_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")
_NO_LIMIT = 1 << 60  # version 1 writes a huge number for "no limit"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory, bytes.

    Attributes:
        used: What this process holds (on a device: what all processes hold).
        limit: What it may hold.
        source: Where the limit comes from: ``given``, ``cgroup``, ``machine`` or ``device``.
    """

    used: int
    limit: int
    source: str

    @property
    def free(self) -> int:
        """What is left."""
        return max(self.limit - self.used, 0)


def process_memory(limit: int | None = None) -> MemoryUse:
    """Return the resident memory of this process and the tightest limit that it has.

    Args:
        limit: A limit that the user gives, bytes.
    """
    import psutil

    limits = [(psutil.virtual_memory().total, "machine")]
    if (grouped := cgroup_limit()) is not None:
        limits.append((grouped, "cgroup"))
    if limit is not None:
        limits.append((limit, "given"))
    least, source = min(limits)
    return MemoryUse(psutil.Process().memory_info().rss, least, source)


def cgroup_limit(v2: Path = _CGROUP_V2, v1: Path = _CGROUP_V1) -> int | None:
    """Return the memory limit of this process's control group, bytes, if it has one."""
    for path in (v2 / _own_group() / "memory.max", v2 / "memory.max", v1 / "memory.limit_in_bytes"):
        try:
            text = path.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if text.isdigit() and int(text) < _NO_LIMIT:
            return int(text)
    return None


def _own_group() -> str:
    """Return this process's group below the root of version 2; empty if there is none."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")


def device_memory(cuda: Cuda) -> MemoryUse:
    """Return the memory of the device that this process computes on, as its driver tells.

    Raises:
        MeasurementError: If the driver refuses.
    """
    free, total = cuda.free_and_total()
    return MemoryUse(total - free, total, "device")
