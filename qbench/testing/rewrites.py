"""Rewrites that change how a graph is written and not what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

Build = Callable[..., ir.Value]


def anonymise(model: ir.Model, seed: int = 0) -> ir.Model:
    """Return a copy with meaningless names and no metadata; weights are shared.

    Every node, intermediate value and initializer is renamed; graph inputs and outputs keep
    their names. ``seed`` decides which name goes where.
    """
    copy = _clone(model)
    graph = copy.graph
    kept = {id(v) for v in (*graph.inputs, *graph.outputs)}
    nodes = list(graph)
    values = [o for node in nodes for o in node.outputs] + list(graph.initializers.values())
    random = np.random.default_rng(seed)
    for node, number in zip(nodes, random.permutation(len(nodes)), strict=True):
        node.name = f"n{number}"
        _forget(node)
    for value, number in zip(values, random.permutation(len(values)), strict=True):
        _forget(value)
        if id(value) not in kept:
            value.name = f"v{number}"
    _forget(graph)
    _forget(copy)
    return copy


def _forget(thing: Any) -> None:
    thing.metadata_props.clear()
    thing.doc_string = None


def _clone(model: ir.Model) -> ir.Model:
    copy = model.clone()
    for value in copy.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and not isinstance(tensor, ir.ExternalTensor):
            # NOTE: a renamed value renames its tensor, and tensors are shared with the original.
            value.const_value = _shared(tensor, value.name or "")
        elif tensor is not None:
            value.const_value = _external(tensor, value.name or "")
    return copy


def _shared(tensor: ir.TensorProtocol, name: str) -> ir.LazyTensor:
    return ir.LazyTensor(lambda: tensor, tensor.dtype, ir.Shape(tensor.shape.numpy()), name=name)


def _external(tensor: ir.ExternalTensor, name: str) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        tensor.location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=name,
        base_dir=tensor.base_dir,
    )


def decompose(model: ir.Model) -> ir.Model:
    """Return a copy with LayerNormalization, Gelu and Softmax written out; weights are shared."""
    copy = _clone(model)
    rules = {"LayerNormalization": _layer_norm, "Gelu": _gelu, "Softmax": _softmax}
    for node in list(copy.graph):
        rule = rules.get(node.op_type) if node.domain == "" else None
        if rule is None:
            continue
        new: list[ir.Node] = []
        result = rule(node, _builder(node, new))
        _replace(copy.graph, node, new, result)
    return copy


def _builder(node: ir.Node, new: list[ir.Node]) -> Build:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    number = iter(range(100))

    def constant(name: str, array: Any) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        value = ir.val(
            name, dtype=tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
        )
        graph.register_initializer(value)
        return value

    def build(op: str, *inputs: ir.Value | float | tuple[int, ...], **attributes: Any) -> ir.Value:
        name = f"{node.name}_{op}_{next(number)}"
        values: list[ir.Value] = []
        for index, item in enumerate(inputs):
            if isinstance(item, ir.Value):
                values.append(item)
            elif isinstance(item, tuple):
                values.append(constant(f"{name}_axes_{index}", np.array(item, np.int64)))
            else:
                values.append(constant(f"{name}_number_{index}", np.float32(item)))
        made = ir.Node(
            "",
            op,
            values,
            ir.convenience.convert_attributes(attributes),
            outputs=[ir.Value(name=f"{name}_out", type=node.outputs[0].type)],
            name=name,
            metadata_props=dict(node.metadata_props),
        )
        new.append(made)
        return made.outputs[0]

    return build


def _layer_norm(node: ir.Node, build: Build) -> ir.Value:
    x, gamma, *beta = [value for value in node.inputs if value is not None]
    axes = (node.attributes.get_int("axis", -1),)
    centred = build("Sub", x, build("ReduceMean", x, axes, keepdims=1))
    variance = build("ReduceMean", build("Pow", centred, 2.0), axes, keepdims=1)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    normal = build("Div", centred, build("Sqrt", build("Add", variance, epsilon)))
    scaled = build("Mul", normal, gamma)
    return build("Add", scaled, beta[0]) if beta else scaled


def _gelu(node: ir.Node, build: Build) -> ir.Value:
    x = node.inputs[0]
    if node.attributes.get_string("approximate", "none") == "tanh":
        cube = build("Mul", build("Pow", x, 3.0), 0.044715)
        inner = build("Tanh", build("Mul", build("Add", x, cube), math.sqrt(2 / math.pi)))
        return build("Mul", build("Mul", x, 0.5), build("Add", inner, 1.0))
    inner = build("Erf", build("Div", x, math.sqrt(2)))
    return build("Mul", build("Mul", x, build("Add", inner, 1.0)), 0.5)


def _softmax(node: ir.Node, build: Build) -> ir.Value:
    x, axes = node.inputs[0], (node.attributes.get_int("axis", -1),)
    shifted = build("Exp", build("Sub", x, build("ReduceMax", x, axes, keepdims=1)))
    return build("Div", shifted, build("ReduceSum", shifted, axes, keepdims=1))


def _replace(graph: ir.Graph, old: ir.Node, new: list[ir.Node], result: ir.Value) -> None:
    target = old.outputs[0]
    graph.insert_before(old, new)
    result.shape, result.type = target.shape, target.type
    name = target.name
    target.replace_all_uses_with(result, replace_graph_outputs=True)
    graph.remove(old, safe=True)
    result.name = name
