"""What is wrong with a model repository, found without a server: configuration against graph."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qbench.engine.tritonconfig import (
    CONFIG_FILE,
    DATA_TYPES,
    Platform,
    model_config_messages,
)
from qbench.errors import ModelError
from qbench.graph.reading import read_onnx


def problems_of(folder: Path, graph_file: Path | None = None) -> list[str]:
    """Return what is wrong with a model's folder; empty if nothing is.

    Args:
        folder: The model's folder.
        graph_file: The ONNX graph that it must fit; by default the file in it.
    """
    from google.protobuf import text_format

    messages = model_config_messages()
    config = messages.ModelConfig()
    try:
        text_format.Parse((folder / CONFIG_FILE).read_text(encoding="utf-8"), config)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        return [f"{CONFIG_FILE} cannot be read: {error}"]
    found = [*_named(config, folder), *_batching(config), *_instances(config, messages)]
    found += _files(config, folder)
    graph_file = graph_file or next(folder.glob("[0-9]*/model.onnx"), None)
    if graph_file is not None and not found:
        found += _tensors(config, messages, graph_file)
    return found


def _named(config: Any, folder: Path) -> Iterator[str]:
    if config.name and config.name != folder.name:
        yield f"the name is {config.name!r} and the folder {folder.name!r}"
    if config.platform not in list(Platform):
        yield f"the platform is {config.platform!r}; known here: {', '.join(Platform)}"


def _batching(config: Any) -> Iterator[str]:
    if not config.HasField("dynamic_batching"):
        return
    batching = config.dynamic_batching
    if config.max_batch_size < 1:
        yield "dynamic_batching needs a max_batch_size of 1 or more"
    for size in batching.preferred_batch_size:
        if not 1 <= size <= config.max_batch_size:
            yield f"preferred batch size {size} is over max_batch_size {config.max_batch_size}"
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels and not 1 <= default <= levels:
        yield f"default_priority_level {default} is no level of 1 to {levels}"
    for level in batching.priority_queue_policy:
        if not 1 <= level <= levels:
            yield f"priority_queue_policy names level {level} of {levels}"


def _instances(config: Any, messages: Any) -> Iterator[str]:
    kinds = messages.ModelInstanceGroup.Kind
    for group in config.instance_group:
        if group.kind == kinds.Value("KIND_CPU") and group.gpus:
            yield "an instance group of KIND_CPU names GPUs"
        if group.kind == kinds.Value("KIND_CPU") and config.platform == Platform.TENSORRT:
            yield "tensorrt_plan cannot run on KIND_CPU"


def _files(config: Any, folder: Path) -> Iterator[str]:
    versions = [path for path in folder.iterdir() if path.name.isdigit() and int(path.name) > 0]
    if not versions:
        yield "there is no version folder (a number)"
    for version in versions:
        if config.platform not in list(Platform):
            continue
        path = version / Platform(config.platform).file
        if not path.is_file():
            yield f"{path.relative_to(folder)} is missing"
        elif path.suffix == ".onnx":
            try:
                external_files(path)
            except ModelError as error:
                yield str(error)
    for warm in config.model_warmup:
        for name, item in warm.inputs.items():
            if item.input_data_file and not (folder / "warmup" / item.input_data_file).is_file():
                yield f"the warm-up data of {name!r} is missing: warmup/{item.input_data_file}"


def _tensors(config: Any, messages: Any, graph_file: Path) -> Iterator[str]:
    graph = read_onnx(graph_file).graph
    # Some exporters name weights as inputs too: nobody has to give them.
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    sides = (("input", config.input, inputs), ("output", config.output, graph.outputs))
    for what, told, values in sides:
        by_name = {str(value.name): value for value in values}
        for tensor in told:
            if tensor.name not in by_name:
                yield f"{what} {tensor.name!r} is not in the graph, which has {sorted(by_name)}"
                continue
            kind = messages.DataType.Name(tensor.data_type)
            dims = [] if tensor.HasField("reshape") else list(tensor.dims)
            value = by_name[tensor.name]
            yield from _tensor(f"{what} {tensor.name!r}", kind, dims, config, value)
        missing = sorted(set(by_name) - {tensor.name for tensor in told})
        if missing and what == "input":
            yield f"inputs of the graph are missing: {', '.join(missing)}"
    for warm in config.model_warmup:
        if warm.batch_size > max(config.max_batch_size, 1):
            yield f"a warm-up has a batch of {warm.batch_size}, over max_batch_size"


def _tensor(
    what: str, kind: str, dims: Sequence[int], config: Any, value: ir.Value
) -> Iterator[str]:
    """Yield how a tensor of the configuration differs from the graph's."""
    wanted = None if value.dtype is None else DATA_TYPES.get(str(value.dtype.numpy()))
    if wanted != kind:
        yield f"{what} is {kind}, and {wanted} in the graph"
    if value.shape is None:
        return
    sizes: list[int] = [size if isinstance(size, int) else -1 for size in value.shape]
    if config.max_batch_size > 0:
        if not sizes or sizes[0] != -1:
            yield f"{what} has no batch dimension of free size in the graph: {sizes}"
            return
        sizes = sizes[1:]
    fits = len(sizes) == len(dims) and all(
        mine == its or -1 in (mine, its) for mine, its in zip(dims, sizes, strict=True)
    )
    if not fits:
        yield f"{what} has dims {list(dims)}, and {sizes} in the graph"


def external_files(graph_file: Path) -> list[str]:
    """Return where an ONNX file's external data lies, relative to it.

    Raises:
        ModelError: If a file is missing, or lies outside the folder of the ONNX file.
    """
    graph = read_onnx(graph_file)
    found = {
        str(tensor.location)
        for part in graph.graphs()
        for value in part.initializers.values()
        if isinstance(tensor := value.const_value, ir.ExternalTensor)
    }
    for location in sorted(found):
        if os.path.isabs(location) or ".." in Path(location).parts:
            raise ModelError(
                f"{graph_file}: external data {location!r} lies outside its folder, where Triton "
                "does not look; save the model with its data beside it"
            )
    return sorted(found)
