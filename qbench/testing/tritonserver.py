"""A real Triton server on this machine, without a GPU: the one inside the wheel of PyTriton.

The wheel brings the server and its Python backend; ``triton_backend`` stands in for the ONNX
Runtime backend, so that a repository is loaded as it was written.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qbench.errors import MeasurementError, MissingDependencyError

_BACKEND = Path(__file__).with_name("triton_backend.py")
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class TritonServer:
    """A running server.

    Attributes:
        port: Where it listens for HTTP, on 127.0.0.1.
        pid: Its process.
    """

    port: int
    pid: int


def find_server() -> Path:
    """Return the folder of the server inside the wheel.

    Raises:
        MissingDependencyError: If the wheel is not installed, or this interpreter brings no
            shared library for the server's Python backend.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            "nvidia-pytriton is not installed; add it: pip install --no-deps nvidia-pytriton"
        )
    folder = Path(spec.origin).parent / "tritonserver"
    library = _library_folder() / f"libpython{_version()}.so.1.0"
    if not (folder / "bin" / "tritonserver").is_file() or not library.exists():
        raise MissingDependencyError(
            f"Triton's Python backend needs {library}, which this Python does not bring"
        )
    return folder


@contextlib.contextmanager
def running_triton(repository: Path, folder: Path, limit_s: float = 60.0) -> Iterator[TritonServer]:
    """Serve a model repository until the block is left.

    Args:
        repository: The repository, as it was written.
        folder: An empty folder for backends and the log.
        limit_s: Longest time until it is ready, seconds.

    Raises:
        MissingDependencyError: As ``find_server``.
        MeasurementError: If the server does not become ready: the end of its log is told.
    """
    server = find_server()
    backends = _make_backends(server, folder / "backends")
    port, log = _free_port(), folder / "triton.log"
    command = [
        str(server / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        "--http-address=127.0.0.1",
        f"--http-port={port}",
        "--allow-grpc=false",
        "--allow-metrics=false",
        "--exit-timeout-secs=3",
    ]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=_environment(server))
    try:
        _wait_ready(process, port, log, limit_s)
        yield TritonServer(port, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _make_backends(server: Path, folder: Path) -> Path:
    """Return a folder of backends: the server's own Python backend and the stand-in."""
    shutil.copytree(server / "backends" / "python", folder / "python")
    stub = "triton_python_backend_stub"
    shutil.copy2(server / "python_backend_stubs" / _version() / stub, folder / "python" / stub)
    (folder / "onnxruntime").mkdir()
    shutil.copyfile(_BACKEND, folder / "onnxruntime" / "model.py")
    return folder


def _environment(server: Path) -> dict[str, str]:
    site = server.parents[1]
    libraries = [_library_folder(), site / "nvidia_pytriton.libs"]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "PYTHONPATH": os.pathsep.join([str(site), *_site_folders()]),
        "OMP_NUM_THREADS": "1",
    }


def _site_folders() -> list[str]:
    return [path for path in sys.path if path.endswith("site-packages")]


def _library_folder() -> Path:
    return Path(str(sysconfig.get_config_var("LIBDIR")))


def _version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path, limit_s: float) -> None:
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            address = f"http://127.0.0.1:{port}/v2/health/ready"
            with urllib.request.urlopen(address, timeout=1) as answer:
                if answer.status == 200:
                    return
        time.sleep(_POLL_S)
    end = log.read_text(encoding="utf-8", errors="replace")[-3000:]
    raise MeasurementError(f"Triton was not ready within {limit_s:g} s: {end}")
