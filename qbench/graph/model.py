"""The model: an ONNX graph in one normal form, its weights memory-mapped from one data file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from qbench.errors import ModelError, did_you_mean
from qbench.graph.lint import find_non_finite_weights

MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
CARD_FILE = "model.json"

#: The oldest opset with 4-bit integers and blocked DequantizeLinear.
MIN_OPSET = 21

#: Initializers below this size stay inside the ONNX file: shapes and scalars are read by value.
_EXTERNAL_BYTES = 1024


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a graph.

    Attributes:
        name: Name of the tensor.
        dtype: NumPy name of its element type.
        shape: Its dimensions: a number, a symbol, or ``None`` where unknown.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model in normal form.

    Attributes:
        ir: The graph: unique node and value names, constants as initializers, opset ≥ 21,
            weights memory-mapped from ``folder``.
        folder: Folder with the ONNX file and its external data.
        sha256: Hash of the graph and its weights; names of nodes and tensors count, metadata
            does not.
        source: What the user gave.
        card: Where it came from and what it needs: ``kind`` (``onnx``, ``hf``, ``torch``),
            ``tokenizer``, ``max_length``, ``id2label``, ``export_check`` and the like.
    """

    ir: ir.Model
    folder: Path
    sha256: str
    source: str
    card: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The graph's inputs, initializers left out."""
        return tuple(_spec_of(value) for value in self.ir.graph.inputs)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The graph's outputs."""
        return tuple(_spec_of(value) for value in self.ir.graph.outputs)

    @property
    def output(self) -> str:
        """Name of the one output that tasks score."""
        return str(self.card.get("output") or self.outputs[0].name)

    @property
    def path(self) -> Path:
        """The ONNX file of the normal form."""
        return self.folder / MODEL_FILE


def _spec_of(value: ir.Value) -> TensorSpec:
    dims: tuple[int | str | None, ...] = ()
    if value.shape is not None:
        dims = tuple(d if isinstance(d, int) else d.value for d in value.shape)
    dtype = "float32" if value.dtype is None else str(value.dtype.numpy())
    return TensorSpec(value.name or "", dtype, dims)


def read_onnx(path: Path) -> ir.Model:
    """Read an ONNX file, its external data memory-mapped.

    Raises:
        ModelError: If the file is missing, is no ONNX model, is cut short, or lacks its
            external data; the message names the missing file.
    """
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.onnx")])
        raise ModelError(f"model file {str(path)!r} does not exist{near}; give an ONNX file")
    try:
        model = ir.load(path)
    except Exception as error:  # the protobuf and IR layers raise many unrelated classes
        raise ModelError(
            f"{str(path)!r} cannot be read as ONNX: it is not an ONNX model or is cut short "
            f"({type(error).__name__}: {str(error)[:200]}); export or copy it again"
        ) from error
    if not len(model.graph) or not model.graph.outputs:
        raise ModelError(f"{str(path)!r} holds no graph: it is not an ONNX model or is cut short")
    _check_external_data(model, path)
    return model


def _check_external_data(model: ir.Model, path: Path) -> None:
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        file = Path(tensor.path)
        if not file.is_file():
            raise ModelError(
                f"{str(path)!r} keeps its weights in {tensor.location!r}, and that file is "
                f"missing beside it; copy it to {str(path.parent)!r}"
            )
        end = (tensor.offset or 0) + (tensor.length or 0)
        if file.stat().st_size < end:
            raise ModelError(
                f"external data {tensor.location!r} of {str(path)!r} is cut short: it has "
                f"{file.stat().st_size} bytes and initializer {value.name!r} ends at {end}"
            )


def normalise(model: ir.Model, output: str | None = None) -> ir.Model:
    """Bring a graph to the normal form in place and return it.

    Functions are inlined, constants become initializers, the opset is raised to 21 or above,
    dead nodes go, every node and tensor gets a unique name. Operators stay what they are.

    Args:
        model: The graph.
        output: The one output to keep, or ``None`` to keep all.

    Raises:
        ModelError: If the opset cannot be raised or the output does not exist.
    """
    if model.functions:
        common_passes.InlinePass()(model)
    if output is not None:
        _keep_output(model, output)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common_passes.RemoveInitializersFromInputsPass()(model)
    model = raise_opset(model)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.TopologicalSortPass()(model)
    common_passes.NameFixPass()(model)
    _name_anonymous(model)
    if model.ir_version < 10:
        model.ir_version = 10
    return model


def _keep_output(model: ir.Model, output: str) -> None:
    names = [value.name or "" for value in model.graph.outputs]
    if output not in names:
        raise ModelError(
            f"the graph has no output {output!r}{did_you_mean(output, names)}; "
            f"outputs: {', '.join(names)}"
        )
    kept = model.graph.outputs[names.index(output)]
    model.graph.outputs.clear()
    model.graph.outputs.append(kept)


def _name_anonymous(model: ir.Model) -> None:
    taken: set[str] = set()
    for index, node in enumerate(model.graph.all_nodes()):
        name = node.name or f"{node.op_type}_{index}"
        while name in taken:
            name = f"{name}_{index}"
        node.name = name
        taken.add(name)


def raise_opset(model: ir.Model) -> ir.Model:
    """Return the model at opset 21 or above; its weights are never serialised.

    Raises:
        ModelError: If no converter knows one of its operators.
    """
    version = model.opset_imports.get("", model.graph.opset_imports.get("", 0))
    if version >= MIN_OPSET:
        return model
    tensors = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes >= _EXTERNAL_BYTES
    }
    for name, tensor in tensors.items():
        model.graph.initializers[name].const_value = _placeholder(tensor)
    try:
        proto = onnx.version_converter.convert_version(ir.to_proto(model), MIN_OPSET)
    except Exception as error:  # the converter raises bare RuntimeErrors of its C++ part
        raise ModelError(
            f"the model is at opset {version}; opset {MIN_OPSET} is needed and the converter "
            f"refused ({str(error)[:300]}); export it again with opset_version={MIN_OPSET}"
        ) from error
    raised = ir.from_proto(proto)
    for name, tensor in tensors.items():
        if name in raised.graph.initializers:
            raised.graph.initializers[name].const_value = tensor
    return raised


def _placeholder(tensor: ir.TensorProtocol) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        "absent",
        0,
        tensor.nbytes,
        tensor.dtype,
        shape=ir.Shape(tensor.shape),
        name=tensor.name or "",
    )


def store_model(model: ir.Model, folder: Path, source: str, card: Mapping[str, Any]) -> Model:
    """Write a normal-form graph to ``folder`` and return it with memory-mapped weights.

    Raises:
        ModelError: If a weight holds NaN or infinity.
        OSError: If the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    strip_traces(model)
    save_graph(model, folder / MODEL_FILE)
    stored = ir.load(folder / MODEL_FILE)
    bad = find_non_finite_weights(stored)
    if bad:
        raise ModelError(
            f"{source!r} has NaN or infinite weights in {', '.join(bad[:5])}"
            f"{' and others' if len(bad) > 5 else ''}: nothing can be measured; repair the model"
        )
    sha256 = graph_sha256(stored)
    (folder / CARD_FILE).write_text(
        json.dumps({"source": source, "sha256": sha256, "card": dict(card)}, indent=1)
    )
    return Model(stored, folder, sha256, source, dict(card))


def open_stored(folder: Path) -> Model:
    """Return the model that ``store_model`` wrote to ``folder``.

    Raises:
        ModelError: If the folder holds none, or its files were changed.
    """
    try:
        card = json.loads((folder / CARD_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{str(folder)!r} holds no stored model ({error})") from error
    stored = read_onnx(folder / MODEL_FILE)
    return Model(stored, folder, card["sha256"], card["source"], card["card"])


def save_graph(model: ir.Model, path: Path) -> None:
    """Write a graph and its external data; weights are streamed, never held as one message."""
    ir.save(
        model,
        path,
        external_data=f"{path.name}.data",
        size_threshold_bytes=_EXTERNAL_BYTES,
    )


def strip_traces(model: ir.Model) -> None:
    """Remove what leaks paths of the exporting machine: stack traces and documentation strings."""
    for node in model.graph.all_nodes():
        node.doc_string = None
        for key in list(node.metadata_props):
            if "stack_trace" in key:
                del node.metadata_props[key]


def graph_sha256(model: ir.Model) -> str:
    """Return the hash of a graph: operators, names, attributes, and the content of its weights."""
    digest = hashlib.sha256()
    for value in (*model.graph.inputs, *model.graph.outputs):
        digest.update(repr(_spec_of(value)).encode())
    for node in model.graph.all_nodes():
        names = [v.name if v is not None else "" for v in (*node.inputs, *node.outputs)]
        attributes = sorted((a.name, _attribute_text(a)) for a in node.attributes.values())
        digest.update(repr((node.domain, node.op_type, node.name, names, attributes)).encode())
    for name, value in sorted(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None:
            digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
            digest.update(_tensor_bytes(tensor))
    return digest.hexdigest()


def _attribute_text(attribute: ir.Attr) -> str:
    value = attribute.value
    if isinstance(value, ir.TensorProtocol):
        return hashlib.sha256(value.tobytes()).hexdigest()
    if isinstance(value, ir.Graph):
        return repr([(n.op_type, n.name) for n in value])
    return repr(value)


def _tensor_bytes(tensor: ir.TensorProtocol) -> bytes | memoryview:
    if isinstance(tensor, ir.ExternalTensor):
        array = tensor.numpy()
        if array.flags.c_contiguous and array.size:
            return memoryview(array.reshape(-1).view(np.uint8))
    return tensor.tobytes()
