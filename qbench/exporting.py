"""From what a user gave to a model repository for Triton."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qbench.engine.shapes import axis_name
from qbench.engine.triton import Repository, write_repository
from qbench.engine.tritonconfig import Platform, TritonModel, TritonOptions
from qbench.errors import InputError, ModelError
from qbench.graph.model import TensorSpec
from qbench.hosting import describe
from qbench.servable import Servable

_PLAN_ENDS = (".plan", ".engine", ".trt")


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What to export beside the options of Triton.

    Attributes:
        options: How Triton shall serve it.
        plan_file: The serialized TensorRT engine; by default the one beside the ONNX file.
        warmup: Whether Triton runs a few batches before it is ready.
    """

    options: TritonOptions
    plan_file: Path | None = None
    warmup: bool = True


def platform_of(servable: Servable) -> Platform:
    """Return what runs an engine of its backend in Triton.

    Raises:
        ModelError: If nothing does.
    """
    _check_rtx(servable)
    tensorrt = servable.backend.name == "tensorrt"
    return Platform.TENSORRT if tensorrt else Platform.ONNXRUNTIME


def _check_rtx(servable: Servable) -> None:
    """Refuse the serialized engine of another product: Triton would not load it."""
    if servable.backend.name == "tensorrt-rtx":
        raise ModelError(
            f"{servable.path} is for tensorrt-rtx, whose engines Triton does not load; name "
            "--platform onnxruntime_onnx, or tensorrt_plan with the --plan-file of TensorRT itself"
        )


def export_triton(
    servable: Servable, request: ExportRequest, folder: Path, force: bool = False
) -> Repository:
    """Write an engine as a model repository, and return what was written.

    The engine is run first: a graph that does not batch is told before anything is written.

    Raises:
        ModelError: If the graph has no batch dimension, does not run, or the TensorRT engine is
            not there.
        InputError: If the folder exists, or an option is out of its range.
    """
    engine, contract = describe(servable)
    most = _most_sizes(servable, request)
    axes = [axis_name(spec, 0) for spec in engine.inputs]
    largest = min((most[name] for name in axes if name in most), default=None)
    if largest is not None and request.options.max_batch > largest:
        raise ModelError(
            f"the TensorRT engine of {servable.path} takes batches of at most {largest}: give "
            f"--max-batch {largest}, or build it again with --dim {axes[0]}=LEAST,BEST,MOST"
        )
    shapes = {}
    for tensor in (*contract.inputs, *contract.outputs):
        batch = 1 if contract.one_row else None
        shapes[tensor.name] = TensorSpec(tensor.name, tensor.dtype, (batch, *tensor.dims))
    rows: dict[str, np.ndarray] = {}
    if request.warmup:
        lengths = [size for name, size in most.items() if name not in axes]
        longest = min([contract.longest or 1, *lengths])
        sample = contract.sample(contract.fixed_length or longest)
        rows = {one.name: np.asarray(sample[one.key], one.dtype) for one in contract.inputs}
    model = TritonModel(
        servable.path,
        tuple(shapes[one.name] for one in contract.inputs),
        tuple(shapes[one.name] for one in contract.outputs),
        rows,
        _plan_file(servable, request),
    )
    return write_repository(model, request.options, folder, force)


def _most_sizes(servable: Servable, request: ExportRequest) -> dict[str, int]:
    """Return the most that a run's own TensorRT engine takes of each dynamic axis."""
    tensorrt = request.options.platform is Platform.TENSORRT and request.plan_file is None
    if servable.run is None or not tensorrt:
        return {}
    for report in servable.run.known_engines():
        if report.name == servable.facts.get("engine") and report.serialized is not None:
            return {name: sizes[-1] for name, sizes in report.serialized.shapes.items()}
    return {}


def _plan_file(servable: Servable, request: ExportRequest) -> Path | None:
    """Return the serialized TensorRT engine, where the platform needs one."""
    given = request.plan_file
    if request.options.platform is not Platform.TENSORRT:
        if given is not None:
            raise InputError("--plan-file belongs to --platform tensorrt_plan")
        return None
    if given is not None:
        if not given.is_file():
            raise InputError(f"--plan-file: there is no file {str(given)!r}")
        return given
    _check_rtx(servable)
    found = sorted(
        path for path in servable.path.parent.iterdir() if path.suffix.lower() in _PLAN_ENDS
    )
    if len(found) != 1:
        told = ", ".join(path.name for path in found) or "none"
        raise ModelError(
            f"tensorrt_plan needs one serialized TensorRT engine beside {servable.path}, found: "
            f"{told}; build it on the GPU that will serve (trtexec --onnx={servable.path.name} "
            "--saveEngine=engine.plan), or name it with --plan-file"
        )
    return found[0]
