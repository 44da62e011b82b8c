"""Serialized engines of TensorRT and TensorRT-RTX, made from an ONNX file ahead of time.

One builder serves both: the backend names the Python module. No GPU is needed for TensorRT-RTX;
nothing here runs an engine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qbench.backends import Backend
from qbench.errors import MeasurementError

Shape = tuple[int, ...]
#: Shapes of each input that an engine is built for: the least, the best, and the most.
Profile = Mapping[str, tuple[Shape, Shape, Shape]]

_TIMEOUT_S = 3600.0
_MADE, _ANSWER = "made", "answer.json"
#: Variables of the environment that the process which builds may need; others change nothing.
_KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "SYSTEMROOT")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that parser or builder said is wrong.

    Attributes:
        text: Its words.
        node: Name of the node, or "".
        operator: The node's operator, or "".
    """

    text: str
    node: str = ""
    operator: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the builder made of an ONNX file.

    Attributes:
        version: Version of the builder; "" where it cannot be imported.
        problems: Why there is no engine; empty where there is one.
        network: Layers of the parsed network by kind, counted.
        said: Warnings.
        repeatable: Whether addresses were fixed, so that the same file gives the same bytes.
        missing: Why the builder cannot be imported, or "".
    """

    version: str = ""
    problems: tuple[Problem, ...] = ()
    network: Mapping[str, int] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    repeatable: bool = False
    missing: str = ""


def has_builder(backend: Backend) -> bool:
    """Whether the Python module of a backend's builder is there; it is not imported."""
    return bool(backend.builder) and importlib.util.find_spec(backend.builder) is not None


def build_serialized(
    onnx: Path, engine: Path, backend: Backend, profile: Profile, targets: Sequence[str] = ()
) -> Outcome:
    """Make the serialized engine of an ONNX file, in a process of its own.

    Args:
        onnx: The file; its external data lies beside it.
        engine: Where the engine goes; nothing is written where there is a problem.
        backend: Backend with a builder.
        profile: Shapes of each input with a dynamic axis.
        targets: Hardware to build for (``SM86``); by default what the builder takes itself.

    Raises:
        MeasurementError: If the builder ended without an answer.
        OSError: If the engine cannot be written.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in (onnx, onnx.with_name(f"{onnx.name}.data")):
            if file.is_file():
                (folder / file.name).symlink_to(file.resolve())
        request = {
            "module": backend.builder,
            "onnx": onnx.name,
            "engine": _MADE,
            "answer": _ANSWER,
            "profile": {name: [list(s) for s in shapes] for name, shapes in profile.items()},
            "targets": list(targets),
        }
        outcome = _outcome(_ask(request, folder, backend.name))
        if (folder / _MADE).is_file():
            _copy(folder / _MADE, engine)
    return outcome


def _copy(made: Path, engine: Path) -> None:
    with made.open("rb") as source, engine.open("wb") as target:
        while chunk := source.read(1 << 22):
            target.write(chunk)


def _ask(request: Mapping[str, object], folder: Path, name: str) -> dict[str, object]:
    """Run the process that builds in a folder and return its answer."""
    kept = {key: os.environ[key] for key in _KEPT if key in os.environ}
    path = os.pathsep.join(os.path.abspath(part) for part in sys.path if part)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "qbench.runtime.tensorrt_child"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
            cwd=folder,
            env={**kept, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"the builder of {name} took over {_TIMEOUT_S:g} s") from None
    answer = folder / _ANSWER
    if answer.is_file():
        found: dict[str, object] = json.loads(answer.read_text(encoding="utf-8"))
        return found
    how = f"exit code {done.returncode}"
    if done.returncode < 0:
        how = signal.Signals(-done.returncode).name
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    raise MeasurementError(f"the builder of {name} ended without an answer ({how}): {last}")


def _outcome(answer: Mapping[str, object]) -> Outcome:
    problems, network, said = (answer.get(k) or [] for k in ("problems", "network", "said"))
    assert isinstance(problems, list) and isinstance(said, list)
    return Outcome(
        version=str(answer.get("version", "")),
        problems=tuple(
            Problem(str(p.get("text", "")), str(p.get("node", "")), str(p.get("operator", "")))
            for p in problems
        ),
        network=dict(network) if isinstance(network, dict) else {},
        said=tuple(str(text) for text in said),
        repeatable=bool(answer.get("repeatable")),
        missing=str(answer.get("missing", "")),
    )
