"""Backends: where an engine runs, which formats it takes and what "high precision" is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from qbench.errors import InputError, unknown_name


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
    """

    name: str
    high_precision: str
    formats: tuple[str, ...]
    emulated: tuple[str, ...] = ()
    session_options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    opset: int = 21
    ready: bool = True


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
        Backend(
            "tensorrt", "fp16", ("fp16", "fp32", "int8", "w8a16", "w4a16", "fp8"), ready=False
        ),
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
