"""The normal form: what every graph is brought to before anything else looks at it."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from qbench.errors import ModelError, did_you_mean
from qbench.graph.content import share_equal_weights, share_transposed_tables

#: The oldest opset with 4-bit integers and blocked DequantizeLinear.
MIN_OPSET = 21

#: The oldest opset whose conversion keeps metadata, and with it the names of modules.
_GENTLE_OPSET = 18

#: Weights of this size and above are kept out of a message that is converted.
_LARGE_BYTES = 1024


def normalise(model: ir.Model, output: str | None = None) -> ir.Model:
    """Bring a graph to the normal form in place and return it.

    Functions are inlined; constants, and initializers of subgraphs, become initializers of the
    main graph; the opset is raised to 21 or above; equal weight matrices become one, and so do a
    table and its transposed copy; dead nodes go; every node and tensor gets a unique name.
    Operators stay what they are.

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
    common_passes.LiftSubgraphInitializersToMainGraphPass()(model)
    common_passes.RemoveUnusedNodesPass()(model)
    model.ir_version = max(model.ir_version or 0, 10)
    model = raise_opset(model)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    share_equal_weights(model.graph)
    share_transposed_tables(model.graph)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.TopologicalSortPass()(model)
    common_passes.NameFixPass()(model)
    name_nodes(model)
    model.ir_version = max(model.ir_version or 0, 10)
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


def name_nodes(model: ir.Model) -> None:
    """Give every node, those of subgraphs too, a unique name that is not empty."""
    taken: set[str] = set()
    for index, node in enumerate(model.graph.all_nodes()):
        name = node.name or f"{node.op_type}_{index}"
        while name in taken:
            name = f"{name}_{index}"
        node.name = name
        taken.add(name)


def opset_of(model: ir.Model) -> int:
    """Return the version of ONNX's own operators that a graph is written in; 0 where none."""
    return int(model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0)))


def raise_opset(model: ir.Model) -> ir.Model:
    """Return the model at opset 21 or above; its weights are never serialised.

    Raises:
        ModelError: If no converter knows one of its operators.
    """
    version = opset_of(model)
    if version >= MIN_OPSET:
        return model
    if not version:  # only operators of other domains
        model.opset_imports[""] = MIN_OPSET
        return model
    try:
        return _raise_gently(model) if version >= _GENTLE_OPSET else _raise_by_message(model)
    except Exception as error:  # the converters raise bare RuntimeErrors of their C++ part
        raise ModelError(
            f"the model is at opset {version}; opset {MIN_OPSET} is needed and the converter "
            f"refused ({' '.join(str(error).split())[:300]}); export it again with "
            f"opset_version={MIN_OPSET}"
        ) from error


def _raise_gently(model: ir.Model) -> ir.Model:
    from onnxscript import version_converter

    version_converter.convert_version(model, MIN_OPSET)
    return model


def _raise_by_message(model: ir.Model) -> ir.Model:
    for value in model.graph.initializers.values():  # a message does not know its files' folder
        small = value.const_value
        if isinstance(small, ir.ExternalTensor) and small.nbytes < _LARGE_BYTES:
            value.const_value = ir.tensor(small.numpy(), name=value.name)
    tensors = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes >= _LARGE_BYTES
    }
    for name, tensor in tensors.items():
        model.graph.initializers[name].const_value = _placeholder(tensor)
    metadata = {_outputs_of(node): dict(node.metadata_props) for node in model.graph}
    proto = onnx.version_converter.convert_version(ir.to_proto(model), MIN_OPSET)
    raised = ir.from_proto(proto)
    for name, tensor in tensors.items():
        if name in raised.graph.initializers:
            raised.graph.initializers[name].const_value = tensor
    for node in raised.graph:
        node.metadata_props.update(metadata.get(_outputs_of(node), {}))
    _check_no_placeholder(raised)
    return raised


def _outputs_of(node: ir.Node) -> tuple[str, ...]:
    return (node.op_type, *(str(value.name) for value in node.outputs))


def _check_no_placeholder(model: ir.Model) -> None:
    lost = [
        str(value.name)
        for value in model.graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor) and value.const_value.location == _HOLE
    ]
    if lost:
        raise ModelError(f"conversion renamed the weights {', '.join(lost[:5])}")


_HOLE = "weight kept elsewhere"


def _placeholder(tensor: ir.TensorProtocol) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        _HOLE,
        0,
        tensor.nbytes,
        tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=tensor.name or "",
    )
