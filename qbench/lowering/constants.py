"""Constants of a graph, seen through the operators that only change their type or shape."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qbench.graph.lint import attribute_tensor

#: Operators through which a constant is still known without running the graph.
_PASSES = frozenset({"Transpose", "Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})


def tensor_of(value: ir.Value) -> ir.TensorProtocol | None:
    """Return what an initializer or a Constant node holds; ``None`` for any other value."""
    if value.const_value is not None:
        return value.const_value
    node = value.producer()
    return None if node is None or node.op_type != "Constant" else attribute_tensor(node)


def stored_constant(model: ir.Model, name: str) -> ir.TensorProtocol | None:
    """Return the tensor of the initializer, or of the Constant node's output, of a name."""
    value = model.graph.initializers.get(name)
    if value is not None:
        return value.const_value
    made = (v for node in model.graph if node.op_type == "Constant" for v in node.outputs)
    return next((tensor_of(v) for v in made if v.name == name), None)


def is_constant(value: ir.Value | None) -> bool:
    """Whether a value is a constant, seen through casts, transpositions and reshapes."""
    if value is None:
        return False
    if tensor_of(value) is not None:
        return True
    node = value.producer()
    if node is None or node.op_type not in _PASSES or node.domain:
        return False
    return all(is_constant(operand) for operand in node.inputs if operand is not None)


def constant_dtype(value: ir.Value) -> ir.DataType:
    """Return the element type of a constant value, with casts applied."""
    tensor = tensor_of(value)
    if tensor is not None:
        return tensor.dtype
    node = value.producer()
    assert node is not None and node.inputs[0] is not None
    if node.op_type == "Cast":
        return ir.DataType(node.attributes.get_int("to", int(ir.DataType.FLOAT)))
    return constant_dtype(node.inputs[0])


def constant_rank(value: ir.Value) -> int:
    """Return the rank of a constant value; the constant is read where reshapes hide it."""
    node, tensor = value.producer(), tensor_of(value)
    if tensor is not None:
        return len(tensor.shape)
    assert node is not None
    if node.op_type in ("Transpose", "Cast", "Identity") and node.inputs[0] is not None:
        return constant_rank(node.inputs[0])
    array = constant_of(value)
    return -1 if array is None else array.ndim


def source_of(value: ir.Value) -> ir.Value:
    """Return the initializer that a constant value is read from, the value itself if it is one."""
    node = value.producer()
    while tensor_of(value) is None and node is not None and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """Return the constant that a value holds, seen through casts, transpositions and reshapes."""
    if value is None or not is_constant(value):
        return None
    tensor = tensor_of(value)
    if tensor is not None:
        return np.asarray(tensor.numpy())
    node = value.producer()
    assert node is not None
    inner = constant_of(node.inputs[0])
    assert inner is not None
    second = constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return _passed(node, inner, second)


def _passed(node: ir.Node, array: np.ndarray, second: np.ndarray | None) -> np.ndarray:
    """Return what an operator of ``_PASSES`` makes of a constant."""
    op = node.op_type
    if op == "Transpose":
        perm = node.attributes.get("perm")
        return array.transpose(tuple(perm.as_ints()) if perm else None)
    if op == "Cast":
        return array.astype(constant_dtype(node.outputs[0]).numpy())
    if op == "Reshape" and second is not None:
        sizes = [int(n) for n in second]
        if not node.attributes.get_int("allowzero", 0):
            sizes = [array.shape[axis] if n == 0 else n for axis, n in enumerate(sizes)]
        return array.reshape(sizes)
    if op == "Flatten":
        axis = node.attributes.get_int("axis", 1) % (array.ndim + 1)
        return array.reshape(int(np.prod(array.shape[:axis])), -1)
    axes = None if second is None else tuple(int(n) for n in second)
    if op == "Squeeze":
        return np.squeeze(array, axes)
    if op == "Unsqueeze" and axes is not None:
        return np.expand_dims(array, axes)
    return array
