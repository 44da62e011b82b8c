"""The serialized engine of a plan for TensorRT or TensorRT-RTX, from the ONNX file of its engine.

Where the builder is not installed and cannot be (TensorRT outside NVIDIA's own index), the exact
command is written beside the file, for a machine that has it.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from qbench.backends import Backend
from qbench.engine.shapes import Sizes, profile_of
from qbench.errors import MeasurementError, MissingDependencyError, PlanError
from qbench.gate import install_command
from qbench.graph.model import TensorSpec
from qbench.lowering.edit import LAYER_KEY
from qbench.records import Serialized
from qbench.runtime.tensorrt import Outcome, Problem, Profile, build_serialized, has_builder
from qbench.storage import atomic_write, clear_disk_errors

SERIALIZED_FILE = "engine.plan"
COMMAND_FILE = "build_engine.sh"
#: Backends whose builder anyone can install; they are called by their extra.
_EXTRAS = frozenset({"tensorrt-rtx"})
#: Command-line builder of each backend.
_COMMANDS = {"tensorrt": "trtexec", "tensorrt-rtx": "tensorrt_rtx"}
_MOST_TOLD = 3


class NotBuiltError(MeasurementError):
    """The builder refuses the graph; the message names layers where it names their nodes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a serialized engine shall be.

    Attributes:
        backend: Backend with a builder.
        inputs: Inputs of the graph.
        sizes: Sizes of each dynamic axis.
        hardware: What it is for (``SM86``), or ``None`` for what the builder takes itself.
    """

    backend: Backend
    inputs: tuple[TensorSpec, ...]
    sizes: Mapping[str, Sizes]
    hardware: str | None = None

    @property
    def profile(self) -> Profile:
        """Shapes of each input with a dynamic axis."""
        return profile_of(self.inputs, self.sizes)

    @property
    def targets(self) -> tuple[str, ...]:
        """Hardware to build for."""
        return () if self.hardware is None else (self.hardware.upper().replace(" ", ""),)


def check_builder(backend: Backend, hardware: str | None = None) -> None:
    """Check that a backend's engines can be made here, before any is.

    Raises:
        MissingDependencyError: If its builder is not installed, and could be.
        PlanError: If the builder makes nothing for the hardware.
    """
    if backend.name in _EXTRAS and not has_builder(backend):
        command = install_command(backend.name)
        raise MissingDependencyError(
            f"backend {backend.name} is not installed: its builder, the Python module "
            f"{backend.builder}, is not here; add it: {command}. What was measured is kept, and "
            "the same command then builds"
        )
    numbers = [int(n) for n in re.findall(r"\d+", backend.hardware)]
    asked = re.search(r"\d+", hardware or "")
    if asked and len(numbers) > 1 and int(asked.group()) not in numbers:
        raise PlanError(
            f"hardware: got {hardware!r}; {backend.name} builds for "
            f"{', '.join(f'SM{n}' for n in numbers)}"
        )


def serialize(onnx: Path, graph: ir.Model, wanted: Wanted) -> Serialized:
    """Make the serialized engine beside an ONNX file, or the command that makes it elsewhere.

    Args:
        onnx: The engine's file.
        graph: Its labelled graph.
        wanted: What the engine shall be.

    Raises:
        NotBuiltError: If parser or builder refuses the graph; layers are named.
        InputError: If the disk is full.
    """
    target = onnx.with_name(SERIALIZED_FILE)
    for old in (target, onnx.with_name(COMMAND_FILE)):
        old.unlink(missing_ok=True)
    if not has_builder(wanted.backend):
        return _told(onnx, wanted, "its Python module is not installed here")
    try:
        with clear_disk_errors(target):
            outcome = build_serialized(onnx, target, wanted.backend, wanted.profile, wanted.targets)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    if outcome.missing:
        return _told(onnx, wanted, outcome.missing)
    if outcome.problems:
        raise NotBuiltError(refusal_words(outcome.problems, graph, wanted.backend))
    return _built(target, outcome, wanted)


def _built(target: Path, outcome: Outcome, wanted: Wanted) -> Serialized:
    name = wanted.backend.name
    remark = "built ahead of time by its own builder; no device ran it here"
    if name not in _EXTRAS:
        remark = "unverified: built by a path that no test of qbench has run; no device ran it here"
    if not outcome.repeatable:
        remark += "; this system gives memory at random places, so its bytes may differ each time"
    data = target.read_bytes()
    return Serialized(
        path=str(target),
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        builder=f"{name} {outcome.version}",
        targets=wanted.targets,
        shapes=_told_sizes(wanted),
        network=dict(outcome.network),
        repeatable=outcome.repeatable,
        remark=remark,
    )


def _told_sizes(wanted: Wanted) -> dict[str, tuple[int, ...]]:
    return {name: (s.least, s.best, s.most) for name, s in sorted(wanted.sizes.items())}


def _told(onnx: Path, wanted: Wanted, why: str) -> Serialized:
    """Write the command that makes the engine elsewhere."""
    command = build_command(onnx.name, wanted)
    name = wanted.backend.name
    note = (
        f"{name} was not run here ({why}). {COMMAND_FILE} holds the command that builds the engine "
        f"on the machine that will serve it; this path is unverified until it has run"
    )
    script = (
        "#!/bin/sh\n"
        f"# Builds {SERIALIZED_FILE} from {onnx.name} with {name}, on the machine that serves.\n"
        "# The network is strongly typed: every precision stands in the file as Cast and Q/DQ.\n"
        'set -e\ncd "$(dirname "$0")"\n'
        f"{command}\n"
    )
    with atomic_write(onnx.with_name(COMMAND_FILE)) as file:
        file.write(script.encode())
    return Serialized(
        targets=wanted.targets, shapes=_told_sizes(wanted), command=command, remark=note
    )


def build_command(onnx_name: str, wanted: Wanted) -> str:
    """Return the command that builds the engine in the folder of its ONNX file."""
    profile = wanted.profile
    words = [_COMMANDS[wanted.backend.name], f"--onnx={onnx_name}"]
    words += ["--stronglyTyped"] if wanted.backend.name == "tensorrt" else []
    for index, option in enumerate(("minShapes", "optShapes", "maxShapes")):
        shapes = (f"{n}:{'x'.join(map(str, s[index]))}" for n, s in profile.items())
        if profile:
            words.append(f"--{option}={','.join(shapes)}")
    words += [f"--saveEngine={SERIALIZED_FILE}", "--skipInference"]
    return " ".join(shlex.quote(word) for word in words)


def refusal_words(problems: Sequence[Problem], graph: ir.Model, backend: Backend) -> str:
    """Return why a builder refuses a graph, with the layers whose nodes it names."""
    owner = {str(n.name): n.metadata_props.get(LAYER_KEY, "") for n in graph.graph.all_nodes()}
    told = [_problem_words(problem, owner) for problem in problems]
    more = f"; and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
    return f"{backend.name} does not build the engine: {'; '.join(told[:_MOST_TOLD])}{more}"


def _problem_words(problem: Problem, owner: Mapping[str, str]) -> str:
    text = " ".join(problem.text.split()) or "the builder gave no reason"
    node = problem.node if problem.node in owner else _node_in(text, owner)
    if not node:
        return text
    layer = owner[node]
    where = f"layer {layer!r}" if layer else "no layer"
    return f"{where} (node {node!r}): {text}"


def _node_in(text: str, owner: Mapping[str, str]) -> str:
    """Return the longest name of a node that a message holds, or ""."""
    return max((name for name in owner if name and name in text), key=len, default="")
