"""ONNX Runtime sessions: one set of options for the sweep and the engine alike."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx_ir as ir

from qbench.backends import BACKENDS, Backend
from qbench.errors import MeasurementError, ModelError
from qbench.graph.model import TensorSpec
from qbench.runtime.memory import return_free_memory

#: Held while a graph names its weights as lying elsewhere: another thread may open it too.
_SERIALISING = threading.Lock()
#: Weights in memory of this size and above are not serialised.
_SERIALISED_BYTES = 1 << 16
#: Element types that the runtime and NumPy share.
_NUMPY_TYPES = frozenset(
    ir.DataType[name]
    for name in ("FLOAT", "FLOAT16", "DOUBLE", "INT8", "UINT8", "INT16", "INT32", "INT64", "BOOL")
)
#: Bytes of weights from which on a closed session's memory is given back at once.
_LARGE_BYTES = 8 << 20
CUDA_PROVIDER = "CUDAExecutionProvider"
_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(int16)": "int16",
    "tensor(uint16)": "uint16",
    "tensor(uint32)": "uint32",
    "tensor(uint64)": "uint64",
    "tensor(bool)": "bool",
}


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How a session runs.

    Attributes:
        backend: Backend whose execution provider is asked for.
        threads: Threads inside an operator.
        entries: Session configuration entries, written down in the plan.
        optimised_path: Where the runtime saves its optimised graph, or ``None``.
        optimise: Whether graph optimisation is on (it is, but for a look at single nodes).
        profile_stem: Beginning of the file where the runtime writes node times, or ``None``.
        stream: CUDA stream that the session computes on; 0 for one of the runtime's own.
    """

    backend: str = "ort-cpu"
    threads: int = 2
    entries: Mapping[str, str] = field(default_factory=dict)
    optimised_path: Path | None = None
    optimise: bool = True
    profile_stem: Path | None = None
    stream: int = 0


def settings_for(backend: Backend, threads: int | None = None) -> SessionSettings:
    """Return the settings of a backend's sessions; ``threads`` defaults to the usable cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return SessionSettings(backend.name, threads or cores or 1, backend.session_options)


class Session:
    """A loaded graph that runs on NumPy arrays."""

    def __init__(
        self,
        raw: Any,
        provider: str,
        weight_bytes: int = 0,
        held: Sequence[Any] = (),
        source: tuple[Path, SessionSettings] | None = None,
    ) -> None:
        """Wrap an ``onnxruntime.InferenceSession`` that must run on ``provider``.

        Args:
            raw: The runtime's session.
            provider: The execution provider.
            weight_bytes: Bytes of the graph's weights.
            held: Weights that the runtime reads where they lie: they live as long as it does.
            source: The file that it was opened on, and how; ``None`` for a graph in memory.
        """
        self._raw, self._source = raw, source
        self._weight_bytes, self._held = weight_bytes, list(held)
        self.provider = provider
        self.inputs = tuple(
            TensorSpec(i.name, _DTYPES.get(i.type, i.type), tuple(i.shape))
            for i in raw.get_inputs()
        )
        self.outputs: tuple[str, ...] = tuple(o.name for o in raw.get_outputs())
        self._wanted = frozenset(i.name for i in self.inputs)

    def run(
        self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Run once; feeds that the graph does not read are left out.

        Raises:
            MeasurementError: If the runtime refuses; the message is the runtime's own.
        """
        names = list(outputs or self.outputs)
        own = {name: array for name, array in feeds.items() if name in self._wanted}
        try:
            values = self._raw.run(names, own)
        except Exception as error:  # the runtime's exceptions have no common base
            raise MeasurementError(f"{type(error).__name__}: {error}") from error
        return dict(zip(names, values, strict=True))

    def on_stream(self, stream: int) -> Session | None:
        """Return a session of its own on a CUDA stream; ``None`` where no file can be reopened.

        Args:
            stream: The runtime's handle of the stream.
        """
        if self._source is None or self.provider != CUDA_PROVIDER:
            return None
        path, settings = self._source
        return open_session(path, replace(settings, stream=stream))

    @property
    def raw(self) -> Any:
        """The runtime's own session, for bindings."""
        return self._raw

    def run_bound(self, binding: Any) -> None:
        """Run once on arrays that are bound already.

        Raises:
            MeasurementError: If the runtime refuses; the message is the runtime's own.
        """
        try:
            self._raw.run_with_iobinding(binding)
        except Exception as error:  # the runtime's exceptions have no common base
            raise MeasurementError(f"{type(error).__name__}: {error}") from error

    def end_profiling(self) -> Path:
        """Return the file with the node times of every run since the session was opened."""
        return Path(self._raw.end_profiling())

    def close(self) -> None:
        """Free the runtime's session; memory of a large one goes back to the system."""
        self._raw, self._held = None, []
        if self._weight_bytes >= _LARGE_BYTES:
            return_free_memory()

    def __enter__(self) -> Session:
        """Return the session itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free the runtime's session."""
        self.close()


class SharedSessions:
    """Sessions by their threads: one of each, while anybody uses it; the last one asked for stays.

    Sessions run on several threads at once, so that lanes share one. Those of arrangements that
    were only tried are let go.
    """

    def __init__(self, open_one: Callable[[int], Session]) -> None:
        """Take what opens a session with so many threads."""
        self._open, self._lock = open_one, threading.Lock()
        self._known: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
        self._last: Session | None = None

    def __call__(self, threads: int) -> Session:
        """Return the session with so many threads."""
        with self._lock:
            session = self._known.get(threads)
            if session is None:
                session = self._known[threads] = self._open(threads)
            self._last = session
            return session


def open_session(graph: ir.Model | Path, settings: SessionSettings) -> Session:
    """Open a session on a graph in memory or an ONNX file.

    A graph in memory is handed over without its weights: the runtime maps external ones from the
    file where they lie, and reads large ones in memory in place.

    Raises:
        MeasurementError: If the runtime cannot load the graph, or fell back to another provider.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = 1
    for key, value in settings.entries.items():
        options.add_session_config_entry(key, value)
    if not settings.optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if settings.profile_stem is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(settings.profile_stem)
    if settings.optimised_path is not None:
        options.optimized_model_filepath = str(settings.optimised_path)
    runs_on = BACKENDS[BACKENDS[settings.backend].executed_on]
    provider = runs_on.provider
    payload, held = _payload(graph, options)
    try:
        raw = _open(payload, options, runs_on, settings.stream)
    except Exception as error:  # the runtime's exceptions have no common base
        raise MeasurementError(f"{type(error).__name__}: {str(error)[:600]}") from error
    if provider not in raw.get_providers():
        raise MeasurementError(f"{provider} was asked for and {raw.get_providers()} realised")
    source = (graph, settings) if isinstance(graph, Path) else None
    return Session(raw, provider, _weight_bytes(graph), held, source)


def _open(payload: str | bytes, options: Any, backend: Backend, stream: int) -> Any:
    import onnxruntime as ort

    given = {"user_compute_stream": str(stream)} if stream else {}
    asked = [(backend.provider, {**backend.provider_options, **given})]
    return ort.InferenceSession(payload, options, providers=asked)


def _weight_bytes(graph: ir.Model | Path) -> int:
    if isinstance(graph, Path):
        files = (graph, graph.with_name(f"{graph.name}.data"))
        return sum(file.stat().st_size for file in files if file.is_file())
    tensors = (value.const_value for value in graph.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def open_model(path: Path, source: str, light: bool = False) -> Session:
    """Open a session on the CPU for a model that a user gave.

    Args:
        path: The ONNX file.
        source: What the user gave, for the message.
        light: Whether the runtime only has to accept the graph: weights then stay where they are.

    Raises:
        ModelError: If the runtime cannot load it; operators that it lacks are named.
    """
    settings = settings_for(BACKENDS["ort-cpu"])
    if light:
        entries = {**settings.entries, "session.disable_prepacking": "1"}
        settings = replace(settings, entries=entries, optimise=False)
    try:
        return open_session(path, settings)
    except MeasurementError as error:
        words = " ".join(str(error).split()).split(" failed:", 1)[-1].removeprefix("Fatal error: ")
        raise ModelError(f"ONNX Runtime cannot load {source!r}: {words}") from error


def _payload(graph: ir.Model | Path, options: Any) -> tuple[str | bytes, list[Any]]:
    """Return what the runtime loads, and the weights in memory that it reads in place."""
    if isinstance(graph, Path):
        return str(graph), []
    with _SERIALISING:
        folder, held = _weights_folder(graph), _large_weights(graph)
        if folder:
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", folder
            )
        if held:
            options.add_external_initializers(list(held), list(held.values()))
        with _elsewhere(graph, held):
            return bytes(ir.to_proto(graph).SerializeToString()), list(held.values())


def _large_weights(graph: ir.Model) -> dict[str, Any]:
    """Return the large weights in memory by name, in place for the runtime to read.

    Weights that NumPy has no element type for stay in the graph.
    """
    import onnxruntime as ort

    large: dict[str, Any] = {}
    for name, value in graph.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or isinstance(tensor, ir.ExternalTensor | ir.StringTensor):
            continue
        if tensor.nbytes >= _SERIALISED_BYTES and tensor.dtype in _NUMPY_TYPES:
            array = np.ascontiguousarray(tensor.numpy())
            large[name] = ort.OrtValue.ortvalue_from_numpy(array)
    return large


@contextmanager
def _elsewhere(graph: ir.Model, names: Iterable[str]) -> Iterator[None]:
    """Let a graph name some weights as lying elsewhere, for as long as it is serialised."""
    own = {name: graph.graph.initializers[name] for name in names}
    tensors = {name: value.const_value for name, value in own.items()}
    try:
        for name, value in own.items():
            tensor = tensors[name]
            assert tensor is not None
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor(
                "in memory", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name
            )
        yield
    finally:
        for name, value in own.items():
            value.const_value = tensors[name]


def _weights_folder(graph: ir.Model) -> str:
    folders = {
        os.path.dirname(os.path.abspath(tensor.path))
        for value in graph.graph.initializers.values()
        if isinstance(tensor := value.const_value, ir.ExternalTensor)
    }
    if len(folders) > 1:
        raise MeasurementError(f"external weights lie in {len(folders)} folders; one is supported")
    return next(iter(folders), "")
