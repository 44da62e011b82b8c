"""Backends: where an engine runs, which formats it takes and what "high precision" is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from qbench.errors import InputError, unknown_name
from qbench.formats import Format, Granularity, format_named
from qbench.records import Kind, Status


@dataclass(frozen=True, slots=True)
class Backend:
    """A place where an engine runs.

    Attributes:
        name: The word used in configurations and plans.
        high_precision: The format of every layer that no plan lowers.
        formats: Formats that the backend can run, the high precision first.
        emulated: Formats whose arithmetic is emulated there (right rounding, no speed).
        session_options: Session configuration entries that every session of this backend
            sets, in the sweep and in the engine alike.
        opset: The ONNX opset of its engines.
        ready: Whether this version of qbench builds and runs it.
        fuses_siblings: Whether linear layers that read one activation (query, key and value; gate
            and up) run as one product there, and so must share a format.
    """

    name: str
    high_precision: str
    formats: tuple[str, ...]
    emulated: tuple[str, ...] = ()
    session_options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    opset: int = 21
    ready: bool = True
    fuses_siblings: bool = False


#: Accuracy level 0 keeps MatMulNBits in floating point; its default computes in 8 bits.
_ORT_SESSION = MappingProxyType(
    {
        "session.intra_op.allow_spinning": "0",
        "session.inter_op.allow_spinning": "0",
        "session.qdq_matmulnbits_accuracy_level": "0",
    }
)

BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (
        Backend(
            "ort-cpu",
            "fp32",
            ("fp32", "fp16", "int8", "int8_dynamic", "w8a16", "w4a16"),
            emulated=("fp16",),
            session_options=_ORT_SESSION,
        ),
        Backend(
            "ort-cuda",
            "fp16",
            ("fp16", "fp32", "int8", "w8a16", "w4a16"),
            session_options=_ORT_SESSION,
            ready=False,
        ),
        Backend("tensorrt", "fp16", ("fp16", "fp32", "int8", "w8a16", "w4a16", "fp8"), ready=False),
        Backend(
            "tensorrt-rtx", "fp16", ("fp16", "fp32", "int8", "w8a16", "w4a16", "fp8"), ready=False
        ),
    )
}


def backend_named(name: str) -> Backend:
    """Return the backend called ``name``.

    Raises:
        InputError: If there is no such backend, or this version cannot build for it.
    """
    try:
        backend = BACKENDS[name]
    except KeyError:
        raise InputError(unknown_name("backend", name, BACKENDS)) from None
    if not backend.ready:
        ready = ", ".join(b.name for b in BACKENDS.values() if b.ready)
        raise InputError(
            f"backend {name!r} cannot be built by this version of qbench; ready: {ready}"
        )
    return backend


#: Kinds whose layer holds a matrix that can be stored in fewer bits.
_STORED = (Kind.LINEAR, Kind.CONV, Kind.EMBEDDING)
#: What quantizes a kind in this version, besides fp32 and fp16.
_QUANTIZED: dict[Kind, tuple[str, ...]] = {
    Kind.LINEAR: ("int8", "int8_dynamic", "w8a16", "w4a16"),
    Kind.EMBEDDING: ("w8a16",),
}


def _quantizes_activation(form: Format) -> bool:
    return form.activation_granularity is not Granularity.NONE


def applicability(kind: Kind, format_name: str, backend: Backend) -> tuple[Status, str]:
    """Return whether layers of a kind can take a format on a backend, and why not.

    Returns:
        ``(Status.OK, "")``, or ``not_yet`` / ``not_applicable`` with the reason in words.

    Raises:
        InputError: If there is no such format.
    """
    form = format_named(format_name)
    if form.name not in backend.formats:
        runs = ", ".join(backend.formats)
        return Status.NOT_APPLICABLE, f"{backend.name} cannot run {form.name}; it runs {runs}"
    if form.is_float or form.name in _QUANTIZED.get(kind, ()):
        return Status.OK, ""
    if kind not in _STORED and not _quantizes_activation(form):
        return Status.NOT_APPLICABLE, f"{form.name} is for weight matrices; {kind} has none"
    if kind is Kind.EMBEDDING and _quantizes_activation(form):
        return Status.NOT_APPLICABLE, f"{form.name} quantizes an activation; {kind} looks up rows"
    return Status.NOT_YET, f"{form.name} on {kind} is not offered by this version of qbench"


def applicable_formats(kind: Kind, backend: Backend) -> tuple[str, ...]:
    """Return the formats that layers of a kind can take on a backend, the high precision first."""
    return tuple(f for f in backend.formats if applicability(kind, f, backend)[0] is Status.OK)
