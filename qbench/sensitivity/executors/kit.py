"""What a worker elsewhere is given so that it can measure cells, and what it says of itself."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import qbench
from qbench.graph.model import CARD_FILE, DATA_FILE, MODEL_FILE, Model
from qbench.provenance import installed_versions, machine_type, sha256_of_files
from qbench.records import Layers, TensorRange
from qbench.runtime.ort import SessionSettings
from qbench.sensitivity.cells import Bench, Reference
from qbench.sensitivity.looking import SIZES, Feeding
from qbench.tasks.base import Array, Task
from qbench.tasks.batches import Batch

#: Packages that must be the same everywhere: their version changes numbers.
DECIDING = ("numpy", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "qbench", "scipy")
#: Files of a stored model.
_FILES = (MODEL_FILE, DATA_FILE, CARD_FILE)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What decides whether a worker's numbers are this run's.

    Attributes:
        host: Name of its machine.
        pid: Its process there.
        versions: Versions of what changes numbers.
        code_sha256: Hash of qbench's own modules.
        machine: Type of its machine.
        place: What processes share that can see each other by their number.
        package: Folder of qbench there.
    """

    host: str
    pid: int
    versions: Mapping[str, str]
    code_sha256: str
    machine: Mapping[str, str]
    place: str
    package: str


@dataclass(frozen=True, slots=True)
class Opened:
    """How opening a kit ended.

    Attributes:
        refusal: Why the worker cannot measure; "" if it can.
        needs_files: Whether it cannot reach the model's folder, and wants the files.
    """

    refusal: str = ""
    needs_files: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Kit:
    """Everything of a sweep but activations and weights.

    Attributes:
        folder: Folder of the stored model.
        model_sha256: Its hash.
        output: Name of the output that is scored.
        layers: All layers.
        batches: The frozen batches.
        settings: Session settings.
        max_segments: Most segments of the cut graph.
        cuts: Where the graph is cut.
        task: The task on the sweep split.
        reference: The reference's outputs and scores.
        backend: Name of the backend.
        clips: Clipping magnitude of each edge tensor.
        ranges: What calibration saw, by tensor.
        seed: Seed of the resamples.
        family: Number of p-values that will be adjusted together.
        feeding: How batches of looks are made; ``None`` where the sweep is no race.
        looks: Samples of each look.
        blas_threads: Threads of matrix products outside of sessions.
        timed: Batches that times are measured on; none where those of the task serve.
    """

    folder: str
    model_sha256: str
    output: str
    layers: Layers
    batches: tuple[Batch, ...]
    settings: SessionSettings
    max_segments: int
    cuts: tuple[int, ...]
    task: Task
    reference: Reference
    backend: str
    clips: Mapping[str, float]
    ranges: Mapping[str, TensorRange]
    seed: int
    family: int
    feeding: Feeding | None
    looks: tuple[int, ...]
    blas_threads: int
    timed: tuple[Batch, ...] = ()


def make_kit(
    bench: Bench,
    model: Model,
    layers: Layers,
    feeding: Feeding | None = None,
    looks: Sequence[int] = SIZES,
) -> Kit:
    """Return the kit of a sweep whose reference has run.

    Args:
        bench: What its cells share.
        model: The stored model that was swept.
        layers: All layers.
        feeding: How batches of looks are made; ``None`` where the sweep is no race.
        looks: Samples of each look.
    """
    replay = bench.replay
    return Kit(
        folder=str(Path(model.folder).resolve()),
        model_sha256=model.sha256,
        output=model.output,
        layers=layers,
        batches=replay.batches,
        settings=replace(replay.settings, entries=dict(replay.settings.entries)),
        max_segments=replay.limits.max_segments,
        cuts=tuple(replay.cuts),
        task=bench.task,
        reference=bench.reference,
        backend=bench.backend.name,
        clips=dict(bench.clips),
        ranges=dict(bench.ranges),
        seed=bench.seed,
        family=bench.family,
        feeding=feeding,
        looks=tuple(looks),
        blas_threads=blas_threads(),
        timed=bench.timing.batches if bench.timing else (),
    )


def kept_of(bench: Bench, batch: int) -> dict[str, Array]:
    """Return what the reference keeps of a batch, its scored output included."""
    feeds = bench.replay.batches[batch].feeds
    values = bench.replay.start_values(batch)
    return {name: array for name, array in values.items() if name not in feeds}


def user_module(task: Task) -> Any:
    """Return the module of a task's own function where a worker could not import it by name."""
    name = getattr(getattr(task, "function", None), "__module__", "")
    return sys.modules.get(name) if name.startswith("qbench_user_") else None


def own_facts() -> WorkerFacts:
    """Return the facts of this process."""
    package = Path(qbench.__file__).parent
    return WorkerFacts(
        host=socket.gethostname(),
        pid=os.getpid(),
        versions={
            "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
            **installed_versions(DECIDING),
        },
        code_sha256=sha256_of_files(package.rglob("*.py")),
        machine=machine_type(),
        place=_place(),
        package=str(package.resolve()),
    )


def _place() -> str:
    """Return the boot of this machine and the space of process numbers; "" where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def unlike(worker: WorkerFacts, driver: WorkerFacts) -> str:
    """Return in what a worker differs so that its numbers would not be this run's; "" if alike."""
    told = [
        f"{name} is {worker.versions.get(name, 'not installed')} there and "
        f"{driver.versions.get(name, 'not installed')} here"
        for name in sorted({*worker.versions, *driver.versions})
        if worker.versions.get(name) != driver.versions.get(name)
    ]
    told += [
        f"its machine's {name} is {worker.machine.get(name)!r}, and {driver.machine.get(name)!r} "
        "here: other kernels give other numbers"
        for name in sorted({*worker.machine, *driver.machine})
        if worker.machine.get(name) != driver.machine.get(name)
    ]
    same_files = worker.place == driver.place != "" and worker.package == driver.package
    if not told and not same_files and worker.code_sha256 != driver.code_sha256:
        told.append("its copy of qbench has the same version and other code")
    return "; ".join(told)


def blas_threads() -> int:
    """Return how many threads NumPy's matrix products take in this process."""
    from threadpoolctl import threadpool_info

    pools = [pool for pool in threadpool_info() if pool.get("user_api") == "blas"]
    return max((int(pool["num_threads"]) for pool in pools), default=1)


def limit_blas(threads: int) -> None:
    """Give NumPy's matrix products so many threads: another number may sum in another order."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(threads, user_api="blas")


def model_files(folder: Path) -> dict[str, Array]:
    """Return the bytes of a stored model's files, memory-mapped, by name."""
    import numpy as np

    return {
        name: np.memmap(folder / name, np.uint8, "r")
        for name in _FILES
        if (folder / name).is_file() and (folder / name).stat().st_size
    }


def write_files(files: Mapping[str, Array], folder: Path) -> None:
    """Write the files of a model; the card comes last."""
    for name in sorted(files, key=_FILES.index):
        files[name].tofile(folder / name)
