"""Whether what a backend runs on is here, asked before anything is measured for it."""

from __future__ import annotations

import functools

import onnx_ir as ir

from qbench.backends import BACKENDS, Backend
from qbench.errors import MeasurementError, MissingDependencyError
from qbench.gate import check_runtime, install_command
from qbench.runtime.ort import open_session, settings_for

_CPU = "CPUExecutionProvider"


def check_present(backend: Backend) -> None:
    """Check that the sessions of a backend open here: its own, or those of what stands in for it.

    Raises:
        MissingDependencyError: If they do not; it says what was found, what to install, and which
            backends are here.
    """
    absence = why_absent(BACKENDS[backend.executed_on])
    if absence:
        here = ", ".join(name for name in present_backends() if name != backend.name)
        raise MissingDependencyError(
            f"backend {backend.name} is not installed: {absence}; or take a backend that is here: "
            f"{here}"
        )


def present_backends() -> tuple[str, ...]:
    """Return the names of the backends whose graphs can be run here, by themselves or in place."""
    return tuple(b.name for b in BACKENDS.values() if not why_absent(BACKENDS[b.executed_on]))


def why_absent(backend: Backend) -> str:
    """Return why a backend's sessions do not open here and what to do about it, or "".

    Raises:
        MissingDependencyError: If there is no ONNX Runtime, or there are two.
    """
    return _absence(backend.name, check_runtime(), backend.provider)


@functools.cache
def _absence(name: str, package: str, provider: str) -> str:
    import onnxruntime as ort

    offered = ort.get_available_providers()
    if provider not in offered:
        return (
            f"it needs {provider}, and {package} {ort.__version__} offers {', '.join(offered)}; "
            f"install the extra gpu (an NVIDIA GPU with its driver is needed): pip uninstall -y "
            f"{package}, then {install_command('gpu')}"
        )
    if provider == _CPU:
        return ""
    try:
        open_session(_smallest(), settings_for(BACKENDS[name], threads=1)).close()
    except MeasurementError as error:
        return (
            f"{package} {ort.__version__} offers {provider} and cannot open it here ({error}); "
            "check the GPU's driver and the CUDA libraries that ONNX Runtime asks for (nvidia-smi)"
        )
    return ""


def _smallest() -> ir.Model:
    """Return a graph of one node."""
    float32 = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", shape=ir.Shape([1]), type=float32)
    node = ir.node("Add", [x, x])
    node.outputs[0].name, node.outputs[0].type = "y", float32
    node.outputs[0].shape = ir.Shape([1])
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 21}, name="smallest")
    return ir.Model(graph, ir_version=10)
