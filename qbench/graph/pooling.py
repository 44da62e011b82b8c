"""Pooling and normalisation added to a foreign graph that gives hidden states."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qbench.errors import ModelError


def add_pooling(model: ir.Model, pooling: str, normalize: bool) -> str:
    """Make a graph's one output [batch, sequence, hidden] a pooled embedding, in place.

    Args:
        model: A graph with one output.
        pooling: ``mean``, ``cls``, ``max`` or ``last``, where all but ``cls`` read
            ``attention_mask``; or ``none`` for an output that is one vector a text already.
        normalize: Whether the embedding is scaled to length 1.

    Returns:
        The name of the new output.

    Raises:
        ModelError: If the graph has no ``attention_mask`` to pool with.
    """
    graph = model.graph
    hidden = graph.outputs[0]
    build = _Builder(graph)
    width = hidden.shape[-1] if hidden.shape is not None else None
    batch = hidden.shape[0] if hidden.shape is not None else None
    if hidden.dtype != ir.DataType.FLOAT:
        hidden = build.op("Cast", [hidden], {"to": int(ir.DataType.FLOAT)})
    if pooling == "none":
        pooled = hidden
    elif pooling == "cls":
        zero = build.constant("index", np.array(0, np.int64))
        pooled = build.op("Gather", [hidden, zero], {"axis": 1})
    else:
        pooled = _masked(build, hidden, _mask_of(model), pooling)
    if normalize:
        norm = build.op("ReduceL2", [pooled, build.constant("axis", np.array([-1], np.int64))])
        floor = build.constant("floor", np.array(1e-12, np.float32))
        pooled = build.op("Div", [pooled, build.op("Max", [norm, floor])])
    taken = {v.name for n in graph for v in n.outputs} | {v.name for v in graph.inputs}
    taken |= set(graph.initializers)
    name = "sentence_embedding"
    while name in taken:
        name += "_"
    pooled.name, pooled.type = name, ir.TensorType(ir.DataType.FLOAT)
    pooled.shape = ir.Shape([batch, width])
    graph.outputs.clear()
    graph.outputs.append(pooled)
    return name


def _mask_of(model: ir.Model) -> ir.Value:
    for value in model.graph.inputs:
        if value.name in ("attention_mask", "input_mask"):
            return value
    names = ", ".join(str(v.name) for v in model.graph.inputs)
    raise ModelError(
        f"this pooling needs the input attention_mask, and the graph reads {names}; "
        "use --pooling cls, or put pooling inside the graph"
    )


class _Builder:
    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.count = 0
        self.prefix = "pooling"
        taken = [str(node.name) for node in graph] + list(graph.initializers)
        while any(name.startswith(f"{self.prefix}/") for name in taken):
            self.prefix += "_"

    def constant(self, stem: str, array: np.ndarray) -> ir.Value:
        self.count += 1
        name = f"{self.prefix}/{stem}_{self.count}"
        value = ir.Value(
            name=name,
            const_value=ir.Tensor(array, name=name),
            shape=ir.Shape(array.shape),
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        )
        self.graph.register_initializer(value)
        return value

    def op(
        self, op_type: str, inputs: list[ir.Value], attributes: dict[str, int] | None = None
    ) -> ir.Value:
        self.count += 1
        node = ir.node(op_type, inputs, attributes=attributes or {})
        node.name = f"{self.prefix}/{op_type}_{self.count}"
        node.outputs[0].name = f"{node.name}:0"
        self.graph.append(node)
        return node.outputs[0]


def _masked(build: _Builder, hidden: ir.Value, mask: ir.Value, pooling: str) -> ir.Value:
    one = build.constant("axis", np.array([1], np.int64))
    last = build.constant("axis", np.array([-1], np.int64))
    wide = build.op("Cast", [mask], {"to": int(ir.DataType.FLOAT)})
    wide = build.op("Unsqueeze", [wide, last])
    if pooling == "mean":
        total = build.op("ReduceSum", [build.op("Mul", [hidden, wide]), one], {"keepdims": 0})
        floor = build.constant("floor", np.array(1e-9, np.float32))
        count = build.op("Max", [build.op("ReduceSum", [wide, one], {"keepdims": 0}), floor])
        return build.op("Div", [total, count])
    if pooling == "max":
        unit = build.constant("unit", np.array(1.0, np.float32))
        penalty = build.constant("penalty", np.array(-1e4, np.float32))
        pushed = build.op("Mul", [build.op("Sub", [unit, wide]), penalty])
        kept = build.op("Add", [build.op("Mul", [hidden, wide]), pushed])
        return build.op("ReduceMax", [kept, one], {"keepdims": 0})
    as_int = build.op("Cast", [mask], {"to": int(ir.DataType.INT64)})
    positions = build.op("CumSum", [as_int, build.constant("axis", np.array(1, np.int64))])
    index = build.op("ArgMax", [build.op("Mul", [positions, as_int])], {"axis": 1})
    index = build.op("Unsqueeze", [index, last])
    shape = build.op("Shape", [hidden], {"start": 2})
    ones = build.constant("ones", np.array([1, 1], np.int64))
    index = build.op("Expand", [index, build.op("Concat", [ones, shape], {"axis": 0})])
    return build.op("Squeeze", [build.op("GatherElements", [hidden, index], {"axis": 1}), one])
