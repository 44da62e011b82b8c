"""What a number depends on: machine, versions, seeds, and hashes of content."""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: Packages whose version changes numbers; what is not installed is left out of a record.
PACKAGES = (
    "numpy",
    "onnx",
    "onnx-ir",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxscript",
    "qbench",
    "scipy",
    "tokenizers",
    "torch",
    "transformers",
)
#: Instruction sets by which ONNX Runtime and NumPy choose their kernels: x86-64's, then Arm's.
_INSTRUCTIONS = {
    "avx", "avx2", "fma", "avx_vnni", "avx_vnni_int8", "avx512f", "avx512bw", "avx512dq",
    "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "svei8mm", "sme", "sme2",
}  # fmt: skip
_ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that measured.

    Attributes:
        cpu: Model name of the processor.
        cores: Cores that this process may use.
        memory_gib: Memory of the machine, GiB.
        system: Name and release of the operating system.
        architecture: Architecture of the processor.
        python: Version of Python.
    """

    cpu: str
    cores: int
    memory_gib: float
    system: str
    architecture: str
    python: str


def this_machine() -> Machine:
    """Describe the machine that runs this process."""
    import psutil

    return Machine(
        cpu=_cpu_model(),
        cores=usable_cores(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        python=platform.python_version(),
    )


def machine_type() -> dict[str, str]:
    """Return what of this machine changes numbers: records of two types are never mixed.

    The same model gives other last digits, and a quantized one other integers, where the kernels
    are others: x86-64 with and without AVX-512 VNNI saturates differently, Arm rounds differently.

    Returns:
        ``system``, ``architecture`` and ``instructions``.
    """
    architecture = platform.machine().lower()
    return {
        "system": platform.system(),
        "architecture": _ARCHITECTURES.get(architecture, architecture),
        "instructions": instruction_sets(),
    }


def instruction_sets() -> str:
    """Return the instruction sets that decide about kernels; the processor's name if unknown."""
    fields = _cpu_fields()
    said = fields.get("flags") or fields.get("Features") or ""
    return " ".join(sorted(_INSTRUCTIONS.intersection(said.split()))) or _cpu_model()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def installed_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the version of each package that is installed, without importing any."""
    versions: dict[str, str] = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def provenance(config: Mapping[str, Any] | None = None, seed: int = 0) -> dict[str, Any]:
    """Return what belongs in ``run.json`` beside the model: machine, versions, seed, settings."""
    from qbench.records import to_dict

    return {
        "machine": to_dict(this_machine()),
        "machine_type": machine_type(),
        "versions": installed_versions(),
        "seed": seed,
        "config": dict(config or {}),
    }


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file, read in pieces of one MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def sha256_of_files(paths: Iterable[Path]) -> str:
    """Return one SHA-256 over names and contents of files, in order of their names."""
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        digest.update(f"{path.name}\0{sha256_of_file(path)}\0".encode())
    return digest.hexdigest()


def sha256_of_arrays(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Return one SHA-256 over names, types, shapes and elements of arrays."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.data.cast("B") if array.size else b"")
    return digest.hexdigest()


def sha256_of_json(content: Any) -> str:
    """Return the SHA-256 of plain values; the order of mapping keys does not matter."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _cpu_model() -> str:
    return _cpu_fields().get("model name") or platform.processor() or platform.machine()


def _cpu_fields() -> dict[str, str]:
    """Return what the system tells of the first processor; nothing where it does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def utc_now() -> dt.datetime:
    """Return the time, with its zone."""
    return dt.datetime.now(dt.UTC)


def run_name(source: str, now: dt.datetime) -> str:
    """Return the name of a new run by time and model, ``20260131-142507-all-minilm-l6-v2``.

    The telling part of a source is the last one that is not just "model".
    """
    parts = [part for part in re.split(r"[/:]", source.removesuffix(".onnx")) if part]
    model = next((part for part in reversed(parts) if part != "model"), "model")
    words = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return f"{now:%Y%m%d-%H%M%S}-{words[:40] or 'model'}"
