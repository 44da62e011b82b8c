"""The configuration of a model in Triton: what it says, as text."""

from __future__ import annotations

import importlib.util
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from qbench.errors import InputError, ModelError
from qbench.gate import require
from qbench.graph.model import TensorSpec

CONFIG_FILE = "config.pbtxt"
VERSION = "1"
#: Triton's words for element types, by NumPy's names.
DATA_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
}
_DESCRIPTIONS = "qbench_model_config_pb2"
_WARM_RUNS = 10
_MOST = (1 << 31) - 1  # of what the configuration holds in 32 bits
#: Names of models: each is a folder, and none may be one of the folders ``.`` and ``..``.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class Platform(StrEnum):
    """What runs the model in Triton."""

    ONNXRUNTIME = "onnxruntime_onnx"
    TENSORRT = "tensorrt_plan"

    @property
    def file(self) -> str:
        """Name of the model's file."""
        return "model.onnx" if self is Platform.ONNXRUNTIME else "model.plan"


@dataclass(frozen=True, slots=True)
class TritonOptions:
    """How Triton shall serve.

    Attributes:
        name: Name of the model.
        platform: What runs it.
        max_batch: Most rows of a batch.
        preferred: Batch sizes that the scheduler likes best.
        max_wait_ms: Longest wait for a fuller batch.
        queue: Most requests of one priority in the queue; more are refused.
        timeout_ms: Longest wait in the queue; 0 for no limit. Requests may name less.
        instances: Copies that run at once.
        threads: Threads inside an operator of each, on a CPU.
        gpu: Whether instances run on GPUs.
    """

    name: str
    platform: Platform = Platform.ONNXRUNTIME
    max_batch: int = 16
    preferred: tuple[int, ...] = (4, 8, 16)
    max_wait_ms: float = 5.0
    queue: int = 256
    timeout_ms: float = 0.0
    instances: int = 1
    threads: int = 1
    gpu: bool = False


@dataclass(frozen=True, slots=True)
class TritonModel:
    """What goes into a repository.

    Attributes:
        graph_file: The ONNX file.
        inputs: Its inputs with whole shapes, the batch first.
        outputs: Its outputs likewise.
        warmup: One row of each input, by name; none for no warm-up.
        plan_file: The serialized TensorRT engine, for that platform.
    """

    graph_file: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    warmup: Mapping[str, np.ndarray] = field(default_factory=dict)
    plan_file: Path | None = None


def check_batch(model: TritonModel) -> None:
    """Refuse a graph whose tensors do not all begin with a batch of free size.

    Raises:
        ModelError: With the tensor that does not.
    """
    for what, specs in (("input", model.inputs), ("output", model.outputs)):
        for spec in specs:
            if not spec.shape or isinstance(spec.shape[0], int):
                raise ModelError(
                    f"{what} {spec.name!r} has shape {list(spec.shape)}: the graph has no batch "
                    "dimension of free size, and Triton cannot batch it; export it with one"
                )
            if 0 in spec.shape:
                raise ModelError(
                    f"{what} {spec.name!r} has shape {list(spec.shape)}: no value in it"
                )
            if spec.dtype not in DATA_TYPES:
                raise ModelError(f"{what} {spec.name!r} is {spec.dtype}; Triton has no such type")


def config_text(model: TritonModel, options: TritonOptions) -> str:
    """Return the model's ``config.pbtxt``.

    Raises:
        InputError: If an option is out of its range.
        MissingDependencyError: If ``tritonclient`` is not installed.
    """
    from google.protobuf import text_format

    _check_options(options)
    messages = model_config_messages()
    config = messages.ModelConfig(
        name=options.name, platform=str(options.platform), max_batch_size=options.max_batch
    )
    for group, specs in ((config.input, model.inputs), (config.output, model.outputs)):
        for spec in specs:
            data_type = messages.DataType.Value(DATA_TYPES[spec.dtype])
            tensor = group.add(name=spec.name, data_type=data_type, dims=_row_dims(spec) or [1])
            if len(spec.shape) == 1:  # a row is one number: Triton wants a dimension for it
                tensor.reshape.SetInParent()
    _add_batching(config, messages, options)
    kind = "KIND_GPU" if options.gpu else "KIND_CPU"
    kinds = messages.ModelInstanceGroup
    config.instance_group.add(count=options.instances, kind=kinds.Kind.Value(kind))
    config.version_policy.latest.num_versions = 1
    if options.platform is Platform.ONNXRUNTIME and not options.gpu:
        config.parameters["intra_op_thread_count"].string_value = str(options.threads)
        config.parameters["inter_op_thread_count"].string_value = "1"
    for size in sorted({1, options.max_batch} if model.warmup else ()):
        _add_warmup(config, messages, model.warmup, size)
    head = "# Written by qbench; `qbench export-triton` writes it again.\n"
    return head + str(text_format.MessageToString(config))


def model_config_messages() -> Any:
    """Return the protobuf messages of Triton's model configuration.

    NOTE: the module is loaded by its path: its package would import gRPC.

    Raises:
        MissingDependencyError: If ``tritonclient`` is not installed.
    """
    package = Path(str(require("tritonclient").__path__[0]))
    path = package / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location(_DESCRIPTIONS, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check_options(options: TritonOptions) -> None:
    for name, value in (
        ("max_batch", options.max_batch),
        ("queue", options.queue),
        ("instances", options.instances),
        ("threads", options.threads),
    ):
        if not 1 <= value <= _MOST:
            raise InputError(f"{name} is {value}; allowed: 1 to {_MOST}")
    for name, wait_ms in (("max_wait_ms", options.max_wait_ms), ("timeout_ms", options.timeout_ms)):
        if not 0 <= wait_ms <= _MOST:
            raise InputError(f"{name} is {wait_ms}; allowed: 0 to {_MOST} milliseconds")
    wrong = [size for size in options.preferred if not 1 <= size <= options.max_batch]
    if wrong:
        raise InputError(
            f"preferred batch size {wrong[0]}; allowed: 1 to the largest batch, {options.max_batch}"
        )
    if not _NAME.fullmatch(options.name):
        raise InputError(
            f"name {options.name!r}; allowed: letters, digits, '.', '_' and '-', no '.' in front"
        )


def _row_dims(spec: TensorSpec) -> list[int]:
    return [size if isinstance(size, int) else -1 for size in spec.shape[1:]]


def _add_batching(config: Any, messages: Any, options: TritonOptions) -> None:
    """Let Triton batch, bound its queue, and give it two priorities, interactive first."""
    batching = config.dynamic_batching
    batching.preferred_batch_size.extend(sorted(set(options.preferred)))
    batching.max_queue_delay_microseconds = round(options.max_wait_ms * 1000)
    batching.priority_levels, batching.default_priority_level = 2, 1
    policies = [batching.default_queue_policy]
    policies += [batching.priority_queue_policy[level] for level in (1, 2)]
    for policy in policies:
        policy.timeout_action = messages.ModelQueuePolicy.TimeoutAction.Value("REJECT")
        policy.default_timeout_microseconds = round(options.timeout_ms * 1000)
        policy.allow_timeout_override = True
        policy.max_queue_size = options.queue


def _add_warmup(config: Any, messages: Any, rows: Mapping[str, np.ndarray], size: int) -> None:
    warm = config.model_warmup.add(
        name=f"batch of {size}", batch_size=size, count=_WARM_RUNS if size > 1 else 1
    )
    for name, row in rows.items():
        item = warm.inputs[name]
        item.data_type = messages.DataType.Value(DATA_TYPES[row.dtype.name])
        item.dims.extend(row.shape or (1,))
        item.input_data_file = warmup_file(name)


def warmup_file(name: str) -> str:
    """Return the name of the file with an input's warm-up row; no two inputs share one."""
    return urllib.parse.quote(name, safe="") + ".bin"


def preferred_sizes(max_batch: int) -> tuple[int, ...]:
    """Return the preferred sizes up to a largest batch: it, its half and its quarter."""
    sizes: Sequence[int] = [max_batch // part for part in (4, 2, 1)]
    return tuple(sorted({size for size in sizes if size >= 2} or {max_batch}))
