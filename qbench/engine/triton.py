"""Model repositories for Triton: written from an engine, and checked against its graph.

DIR/NAME/config.pbtxt       tensors, batching, queue, priorities, instances, warm-up
DIR/NAME/1/model.onnx       the engine (``model.plan`` for TensorRT)
DIR/NAME/1/…                its external data, where the ONNX file says that it lies
DIR/NAME/warmup/…           one row of each input
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from qbench.engine.tritoncheck import external_files, problems_of
from qbench.engine.tritonconfig import (
    CONFIG_FILE,
    VERSION,
    Platform,
    TritonModel,
    TritonOptions,
    check_batch,
    config_text,
    warmup_file,
)
from qbench.errors import InputError, ModelError
from qbench.graph.reading import read_onnx


@dataclass(frozen=True, slots=True)
class Repository:
    """A model repository that was written and checked.

    Attributes:
        folder: The repository.
        model: The model's folder in it.
        files: Files of the model, relative to the repository.
        remarks: What Triton will do otherwise than qbench's own server.
    """

    folder: Path
    model: Path
    files: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def write_repository(
    model: TritonModel, options: TritonOptions, folder: Path, force: bool = False
) -> Repository:
    """Write a model repository whole, check it, and return what it is.

    Args:
        model: What goes in.
        options: How Triton shall serve it.
        folder: The repository; it must not exist.
        force: Whether it may; a model of that name in it is then replaced.

    Raises:
        InputError: If the folder exists, or an option is out of its range.
        ModelError: If the graph has no batch dimension, its files are not all there, or the
            configuration does not fit it.
        MissingDependencyError: If ``tritonclient`` is not installed.
    """
    if folder.exists() and not (force and folder.is_dir()):
        raise InputError(
            f"{str(folder)!r} exists; name a new folder, or replace the model {options.name!r} in "
            "it with --force"
        )
    check_batch(model)
    text = config_text(model, options)
    target = folder / options.name
    if target.is_symlink() or target.is_file():
        raise InputError(f"{str(target)!r} is no folder; remove it, or give another --name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".qbench-", dir=folder.parent) as made:
        inside = Path(made) / options.name
        _fill(inside, model, options, text)
        wrong = problems_of(inside, model.graph_file)
        if wrong:
            raise ModelError(f"the repository would not fit its graph: {'; '.join(wrong)}")
        folder.mkdir(exist_ok=True)
        if target.exists():
            shutil.rmtree(target)
        inside.rename(target)
    files = sorted(str(p.relative_to(folder)) for p in target.rglob("*") if p.is_file())
    return Repository(folder, target, tuple(files), remarks_on(model, options))


def _fill(folder: Path, model: TritonModel, options: TritonOptions, text: str) -> None:
    """Write the files of a model."""
    version = folder / VERSION
    version.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    if options.platform is Platform.TENSORRT:
        if model.plan_file is None:
            raise ModelError("tensorrt_plan needs a serialized TensorRT engine; name its file")
        shutil.copyfile(model.plan_file, version / options.platform.file)
    else:
        shutil.copyfile(model.graph_file, version / options.platform.file)
        for location in external_files(model.graph_file):
            (version / location).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(model.graph_file.parent / location, version / location)
    for name, row in model.warmup.items():
        path = folder / "warmup" / warmup_file(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(row.astype(row.dtype.newbyteorder("<")).tobytes())


def remarks_on(model: TritonModel, options: TritonOptions) -> tuple[str, ...]:
    """Return what Triton does otherwise than qbench's own server with this engine."""
    remarks = []
    free = [
        spec.name for spec in model.inputs if any(not isinstance(d, int) for d in spec.shape[1:])
    ]
    if free:
        remarks.append(
            f"Triton batches requests of equal shape alone: {', '.join(free)} of different lengths "
            "run apart, unless clients pad them"
        )
    if options.platform is Platform.ONNXRUNTIME and _has_four_bits(model.graph_file):
        remarks.append(
            "Triton's ONNX Runtime backend does not take session.qdq_matmulnbits_accuracy_level: "
            "w4a16 layers may be computed as w4a8 there; verify the answers"
        )
    return tuple(remarks)


def _has_four_bits(graph_file: Path) -> bool:
    graph = read_onnx(graph_file)
    return any(
        value.dtype in (ir.DataType.INT4, ir.DataType.UINT4)
        for value in graph.graph.initializers.values()
    )
