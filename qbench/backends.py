"""Backends: where an engine runs, which formats it takes and what "high precision" is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from qbench.errors import InputError, unknown_name
from qbench.formats import Format, Granularity, format_named
from qbench.records import Kind, Status


class Kernel(StrEnum):
    """How a backend computes layers of a kind in a format."""

    NATIVE = "native"  # a kernel of its own
    EMULATED = "emulated"  # the right rounding; computed in the high precision, without its speed
    NONE = "none"  # not at all: never offered


class Variant(StrEnum):
    """How the graph of an engine holds fp16."""

    ROUNDED = "rounded"  # computed in fp32, rounded to fp16 at the borders of each layer
    ISLANDS = "islands"  # computed in fp16, with Casts where a run of fp16 layers begins and ends


@dataclass(frozen=True, slots=True)
class Support:
    """One format on one backend.

    Attributes:
        format: Name of the format.
        kernels: How each kind of layer that can take it is computed.
        hardware: The least hardware that has the kernels, or "" for the backend's own.
        proof: Operators of the runtime's optimised graph of which one shows the native kernel.
        remark: In words.
    """

    format: str
    kernels: Mapping[Kind, Kernel]
    hardware: str = ""
    proof: frozenset[str] = frozenset()
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Backend:
    """A place where an engine runs.

    Attributes:
        name: The word used in configurations and plans.
        high_precision: The format of every layer that no plan lowers.
        supports: Formats that the backend can run, the high precision first.
        variant: How its engines hold fp16.
        contrib: Whether operators of ONNX Runtime's own domain are allowed in its engines.
        fuses_siblings: Whether products that read one tensor (query, key and value; gate and up)
            are joined there, and so must share a format.
        hardware: The least hardware that it runs on.
        session_options: Session configuration entries that every session of this backend
            sets, in the sweep and in the engine alike.
        opset: The ONNX opset of its engines.
        provider: Execution provider of ONNX Runtime that its sessions ask for.
        provider_options: Options of the provider.
        builder: Python module that makes a serialized engine of its ONNX file, or "".
        stand_in: Backend that runs its graphs in its place: qbench itself has no session of a
            backend with a builder. Numbers are then emulated, and every record says so.
    """

    name: str
    high_precision: str
    supports: tuple[Support, ...]
    variant: Variant = Variant.ROUNDED
    contrib: bool = True
    fuses_siblings: bool = False
    hardware: str = ""
    session_options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    opset: int = 21
    provider: str = "CPUExecutionProvider"
    provider_options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    builder: str = ""
    stand_in: str = ""

    @property
    def executed_on(self) -> str:
        """Name of the backend that runs its graphs here."""
        return self.stand_in or self.name

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the formats that it can run, the high precision first."""
        return tuple(support.format for support in self.supports)

    def support(self, format_name: str) -> Support | None:
        """Return what the backend has for a format, or ``None``."""
        return next((s for s in self.supports if s.format == format_name), None)

    def kernel(self, kind: Kind, format_name: str) -> Kernel:
        """Return how layers of a kind are computed in a format."""
        support = self.support(format_name)
        return Kernel.NONE if support is None else support.kernels.get(kind, Kernel.NONE)

    def emulates(self, kind: Kind, format_name: str) -> bool:
        """Whether layers of a kind have the format's rounding and not its speed."""
        return bool(self.stand_in) or self.kernel(kind, format_name) is Kernel.EMULATED


def _all(kernel: Kernel, *kinds: Kind) -> dict[Kind, Kernel]:
    return dict.fromkeys(kinds or tuple(Kind), kernel)


#: What int8 quantizes besides matrices: activations that products, norms and softmaxes read.
_EDGES = (
    Kind.ATTENTION_SCORES,
    Kind.ATTENTION_CONTEXT,
    Kind.SOFTMAX,
    Kind.KV,
    Kind.LAYERNORM,
)
_NATIVE, _EMULATED = Kernel.NATIVE, Kernel.EMULATED
_BITS = frozenset({"MatMulNBits"})
#: Accuracy level 0 keeps MatMulNBits in floating point; its default computes in 8 bits.
_ORT_SESSION = MappingProxyType(
    {
        "session.intra_op.allow_spinning": "0",
        "session.inter_op.allow_spinning": "0",
        "session.qdq_matmulnbits_accuracy_level": "0",
    }
)
#: The CPU's SkipLayerNormalization takes three to six times as long as the Add and the
#: LayerNormalization that the runtime would fuse into it (64 to 4096 wide, 32 to 2048 rows): a
#: twelfth of MiniLM in fp32, a fifth of it in int8.
_ORT_CPU_SESSION = MappingProxyType(
    {**_ORT_SESSION, "optimization.disable_specified_optimizers": "SkipLayerNormFusion"}
)
#: Products of fp32 stay in fp32, and no convolution is chosen by a race of its own each time.
_CUDA = MappingProxyType({"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"})
#: Graphs of other backends that run here in their place keep signed numbers: ONNX Runtime would
#: make those of cached keys unsigned, and their type not, and refuse the graph.
_STAND_IN_SESSION = MappingProxyType({**_ORT_CPU_SESSION, "session.qdqisint8allowed": "1"})

_ORT_CPU = (
    Support("fp32", _all(_NATIVE)),
    Support("fp16", _all(_EMULATED), remark="rounded at the borders of each layer"),
    Support("bf16", _all(_EMULATED), remark="rounded at the borders of each layer"),
    Support(
        "int8",
        _all(_NATIVE, Kind.LINEAR, Kind.EMBEDDING) | _all(_EMULATED, Kind.CONV, *_EDGES),
        proof=frozenset({"MatMulIntegerToFloat", "QLinearMatMul", "QGemm"}),
        remark="what an activation alone carries is rounded and multiplied in fp32",
    ),
    Support(
        "int8_dynamic",
        _all(_NATIVE, Kind.LINEAR),
        proof=frozenset({"DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulInteger"}),
        remark="one scale a batch: an answer depends on its batch-mates",
    ),
    Support("w8a16", _all(_NATIVE, Kind.LINEAR, Kind.EMBEDDING), proof=_BITS),
    Support("w4a16", _all(_NATIVE, Kind.LINEAR), proof=_BITS, remark="accuracy level 0"),
    Support(
        "w4a8",
        _all(_NATIVE, Kind.LINEAR),
        proof=frozenset({"MatMulNBits(int8)"}),
        remark="accuracy level 4, written on its node",
    ),
    Support("fp8", _all(_EMULATED, Kind.LINEAR), remark="E4M3; the product is computed in fp32"),
)
_ORT_CUDA = (
    Support("fp16", _all(_NATIVE)),
    Support("fp32", _all(_NATIVE), remark="beside fp16, with Casts at its borders"),
    Support("bf16", _all(_EMULATED), hardware="SM80", remark="rounded, computed in fp16"),
    Support("int8", _all(_EMULATED, Kind.LINEAR), remark="Q/DQ stays around a product in fp16"),
    Support("w8a16", _all(_NATIVE, Kind.LINEAR, Kind.EMBEDDING), proof=_BITS),
    Support("w4a16", _all(_NATIVE, Kind.LINEAR), proof=_BITS),
)
_TENSORRT = (
    Support("fp16", _all(_NATIVE)),
    Support("fp32", _all(_NATIVE), remark="beside fp16, with Casts at its borders"),
    Support("bf16", _all(_EMULATED), hardware="SM80", remark="rounded, computed in fp16"),
    Support(
        "int8",
        _all(_NATIVE, Kind.LINEAR, Kind.CONV, *_EDGES[:4]) | _all(_EMULATED, Kind.LAYERNORM),
        remark="symmetric, no zero points but int8 0",
    ),
    Support("w4a16", _all(_NATIVE, Kind.LINEAR), remark="blocks of 128 along K"),
    Support("fp8", _all(_NATIVE, Kind.LINEAR), hardware="SM89", remark="E4M3"),
)

BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (
        Backend(
            "ort-cpu",
            "fp32",
            _ORT_CPU,
            session_options=_ORT_CPU_SESSION,
            hardware="x86-64, Arm",
        ),
        Backend(
            "ort-cuda",
            "fp16",
            _ORT_CUDA,
            variant=Variant.ISLANDS,
            session_options=_ORT_SESSION,
            hardware="SM60",
            provider="CUDAExecutionProvider",
            provider_options=_CUDA,
        ),
        Backend(
            "tensorrt",
            "fp16",
            _TENSORRT,
            variant=Variant.ISLANDS,
            contrib=False,
            fuses_siblings=True,
            hardware="SM75",
            session_options=_STAND_IN_SESSION,
            builder="tensorrt",
            stand_in="ort-cpu",
        ),
        Backend(
            "tensorrt-rtx",
            "fp16",
            _TENSORRT,
            variant=Variant.ISLANDS,
            contrib=False,
            fuses_siblings=True,
            hardware="SM75, 80, 86, 89, 120, 121",
            session_options=_STAND_IN_SESSION,
            builder="tensorrt_rtx",
            stand_in="ort-cpu",
        ),
    )
}


def backend_named(name: str) -> Backend:
    """Return the backend called ``name``.

    Raises:
        InputError: If there is no such backend.
    """
    try:
        return BACKENDS[name]
    except KeyError:
        raise InputError(unknown_name("backend", name, BACKENDS)) from None


@dataclass(frozen=True, slots=True)
class SupportRow:
    """One row of the table of backends and formats, in words.

    Attributes:
        backend: Name of the backend.
        format: Name of the format.
        native: Kinds of layers with a kernel of their own.
        emulated: Kinds of layers that are rounded and computed in the high precision.
        hardware: The least hardware.
        remark: In words.
    """

    backend: str
    format: str
    native: str
    emulated: str
    hardware: str
    remark: str


def support_rows() -> Iterator[SupportRow]:
    """Yield every format of every backend: the one table that doctor and the documents print."""
    for backend in BACKENDS.values():
        for support in backend.supports:
            high = "the high precision" if support.format == backend.high_precision else ""
            yield SupportRow(
                backend.name,
                support.format,
                _kinds_with(support, Kernel.NATIVE),
                _kinds_with(support, Kernel.EMULATED),
                support.hardware or backend.hardware,
                "; ".join(words for words in (high, support.remark) if words),
            )


def _kinds_with(support: Support, kernel: Kernel) -> str:
    kinds = [kind for kind in Kind if support.kernels.get(kind) is kernel]
    return "every kind" if len(kinds) == len(Kind) else ", ".join(kinds)


#: Kinds whose layer holds a matrix that can be stored in fewer bits.
_STORED = (Kind.LINEAR, Kind.CONV, Kind.EMBEDDING)


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
    if backend.kernel(kind, form.name) is not Kernel.NONE:
        return Status.OK, ""
    if kind not in _STORED and not _quantizes_activation(form):
        return Status.NOT_APPLICABLE, f"{form.name} is for weight matrices; {kind} has none"
    if kind is Kind.EMBEDDING and _quantizes_activation(form):
        return Status.NOT_APPLICABLE, f"{form.name} quantizes an activation; {kind} looks up rows"
    return Status.NOT_YET, f"{form.name} on {kind} is not offered by this version of qbench"


def applicable_formats(kind: Kind, backend: Backend) -> tuple[str, ...]:
    """Return the formats that layers of a kind can take on a backend, the high precision first."""
    return tuple(f for f in backend.formats if applicability(kind, f, backend)[0] is Status.OK)


def in_uniform(kind: Kind, format_name: str, backend: Backend) -> bool:
    """Whether a uniform engine of a format gives it to layers of a kind.

    That is every kind for a floating-point format. Another goes to what multiplies by a matrix,
    and to tables where it is the stored weight alone that it narrows: int8 in front of every norm
    and softmax is nothing that anyone ships.
    """
    form = format_named(format_name)
    kernel = backend.kernel(kind, form.name)
    if form.is_float or kind is Kind.LINEAR:
        return kernel is not Kernel.NONE
    table = kind is Kind.EMBEDDING and not _quantizes_activation(form)
    return kernel is Kernel.NATIVE and (table or kind is Kind.CONV)
