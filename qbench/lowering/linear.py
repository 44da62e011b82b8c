"""Linear layers in one form: every product of an activation and a constant as ``x @ W``.

Gemm (with any of its attributes), a constant on the left, a transposed constant: each is
rewritten to a MatMul whose right operand is W [K, N], so that a lowering knows one form and the
output channel is always the last axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from qbench.lowering.base import Change, Refusal
from qbench.lowering.constants import (
    constant_dtype,
    constant_of,
    constant_rank,
    is_constant,
    source_of,
    stored_constant,
)
from qbench.lowering.edit import LAYER_KEY, GraphEditor
from qbench.records import Kind, Layer, Occurrence, Status


@dataclass(frozen=True, slots=True)
class LinearForm:
    """A MatMul ``x @ W``.

    Attributes:
        node: The MatMul.
        x: The activation.
        weight: W, shape [K, N].
        tensor: Name of the edge tensor, as calibration knows it.
    """

    node: ir.Node
    x: ir.Value
    weight: np.ndarray
    tensor: str


def present(model: ir.Model, layer: Layer) -> list[Occurrence]:
    """Return the occurrences of a layer whose nodes are in the graph."""
    names = {str(n.name) for n in model.graph}
    return [use for use in layer.occurrences if not names.isdisjoint(_nodes_of(use))]


def _nodes_of(use: Occurrence) -> tuple[str, ...]:
    return use.nodes or tuple(edge.node for edge in use.edges)


def require_linear(model: ir.Model, layer: Layer) -> Refusal | None:
    """Return why a layer is not a product of an activation and one matrix, or ``None``."""
    odd = {use.op for use in layer.occurrences} - {"MatMul", "Gemm"}
    if layer.kind is Kind.LINEAR and odd:
        return Refusal(
            Status.NOT_YET,
            f"it is computed by the fused operator {sorted(odd)[0]}",
            "give the graph as exported, before a runtime fused its operators",
        )
    if layer.kind is not Kind.LINEAR:
        return Refusal(
            Status.NOT_APPLICABLE, f"quantized weights are for linear layers, not {layer.kind}"
        )
    if stored_constant(model, layer.weight) is None:
        return Refusal(Status.NOT_APPLICABLE, f"its weight {layer.weight!r} is no stored constant")
    nodes = {str(node.name): node for node in model.graph}
    for use in layer.occurrences:
        product = _product_of(nodes, use)
        refusal = _operand_refusal(layer, product) if product is not None else None
        if refusal is not None:
            return refusal
    return None


def summed_length(model: ir.Model, layer: Layer) -> int | None:
    """Return K, the length that a linear layer's product sums over; ``None`` without a product."""
    nodes = {str(node.name): node for node in model.graph}
    for use in layer.occurrences:
        product = _product_of(nodes, use)
        if product is None:
            continue
        side = 1 if is_constant(product.inputs[1]) else 0
        array = constant_of(product.inputs[side])
        turned = bool(product.attributes.get_int("transB", 0))
        return None if array is None else int(array.shape[-1 if (side == 0) != turned else -2])
    return None


def _operand_refusal(layer: Layer, product: ir.Node) -> Refusal | None:
    """Return why the constant operand of a product is not a float32 matrix, or ``None``."""
    side = 1 if is_constant(product.inputs[1]) else 0
    operand, x = product.inputs[side], product.inputs[1 - side]
    if operand is None or not is_constant(operand):
        through = layer.occurrences[0].attributes.get("weight_through", "a computation")
        return Refusal(Status.NOT_YET, f"its weight is read through {through}", "fold constants")
    rank = constant_rank(operand)
    if rank != 2:
        return Refusal(
            Status.NOT_YET, f"its weight has {rank} dimensions; matrices alone are quantized"
        )
    refusal = require_float32(operand)
    if refusal is None and side == 0 and (x is None or x.shape is None):
        return Refusal(
            Status.NOT_YET,
            "its weight is the left operand, and the graph does not tell the rank of the right one",
            "run shape inference on the graph before it is given",
        )
    return refusal


def require_table(model: ir.Model, layer: Layer) -> Refusal | None:
    """Return why a layer is not a lookup in one float32 table, or ``None``."""
    nodes = {str(node.name): node for node in model.graph}
    lookups = [nodes[name] for name in layer.nodes if name in nodes]
    for table in (node.inputs[0] for node in lookups):
        if table is None or not is_constant(table):
            return Refusal(Status.NOT_APPLICABLE, "its table is no stored constant")
        if constant_rank(table) != 2:
            return Refusal(Status.NOT_YET, f"its table has {constant_rank(table)} dimensions")
        refusal = require_float32(table)
        if refusal is not None:
            return refusal
    return None


def require_float32(operand: ir.Value) -> Refusal | None:
    """Return why a constant operand is not multiplied in float32, or ``None``."""
    dtype = constant_dtype(operand)
    if dtype == ir.DataType.FLOAT:
        return None
    return Refusal(
        Status.NOT_YET,
        f"it computes in {dtype}; layers that compute in float32 are quantized",
        "export the model in float32",
    )


def linear_forms(editor: GraphEditor, uses: list[Occurrence]) -> Iterator[LinearForm]:
    """Rewrite each use to ``x @ W`` and yield it; the caller replaces the right operand."""
    for use in uses:
        node = _product_of(editor.nodes, use)
        if node is None:
            continue
        tensor = use.edges[0].tensor if use.edges else use.inputs[0]
        if node.op_type == "Gemm":
            yield _from_gemm(editor, node, tensor)
            continue
        left, right = constant_of(node.inputs[0]), constant_of(node.inputs[1])
        if right is not None and node.inputs[0] is not None:
            _keep_apart(editor, use, node)
            yield LinearForm(node, node.inputs[0], _as_float(right), tensor)
        elif left is not None:
            yield _from_left(editor, node, left, tensor)


def _product_of(nodes: Mapping[str, ir.Node], use: Occurrence) -> ir.Node | None:
    own = [nodes[name] for name in use.nodes if name in nodes]
    return next((n for n in own if n.op_type in ("MatMul", "Gemm")), None)


def _as_float(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, dtype=np.float32)


def _transposed(editor: GraphEditor, anchor: ir.Node, value: ir.Value, stem: str) -> ir.Value:
    assert value.shape is not None
    rank = value.shape.rank()
    perm = [*range(rank - 2), rank - 1, rank - 2]
    made = editor.op(anchor, "Transpose", [value], stem)[0]
    producer = made.producer()
    assert producer is not None
    producer.attributes["perm"] = ir.AttrInt64s("perm", perm)
    made.shape = ir.Shape([None] * rank)
    return made


def _from_left(editor: GraphEditor, node: ir.Node, weight: np.ndarray, tensor: str) -> LinearForm:
    x = node.inputs[1]
    assert x is not None and x.shape is not None
    vector = x.shape.rank() == 1  # W·x of a vector is x·Wᵀ
    turned = x if vector else _transposed(editor, node, x, "transpose_in")
    product = editor.op(node, "MatMul", [turned, node.inputs[0]], "product")[0]
    product.shape = ir.Shape([None] * x.shape.rank())
    back = product if vector else _transposed(editor, node, product, "transpose_out")
    editor.replace_uses(node.outputs[0], back)
    made = product.producer()
    assert made is not None
    editor.drop_unused([node])
    return LinearForm(made, turned, _as_float(weight.T), tensor)


def _from_gemm(editor: GraphEditor, node: ir.Node, tensor: str) -> LinearForm:
    a, b = node.inputs[0], node.inputs[1]
    weight = constant_of(b)
    assert a is not None and weight is not None
    weight = _as_float(weight.T if node.attributes.get_int("transB", 0) else weight)
    weight = weight * np.float32(node.attributes.get_float("alpha", 1.0))
    if node.attributes.get_int("transA", 0):
        a.shape = a.shape or ir.Shape([None, None])
        a = _transposed(editor, node, a, "transpose_in")
    result = editor.op(node, "MatMul", [a, b], "product")[0]
    made = result.producer()
    assert made is not None
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        result = _biased(editor, node, result, bias, node.attributes.get_float("beta", 1.0))
    editor.replace_uses(node.outputs[0], result)
    editor.drop_unused([node])
    return LinearForm(made, a, weight, tensor)


def _biased(
    editor: GraphEditor, anchor: ir.Node, product: ir.Value, bias: ir.Value, beta: float = 1.0
) -> ir.Value:
    """Return ``product + beta · bias``, written as a subtraction.

    NOTE: ONNX Runtime joins MatMul and Add to Gemm before it looks at quantized operands where the
    activation is a matrix or has a fixed shape, and then computes in floating point or, with a
    fixed shape of another rank, refuses to load. ``a − (−b)`` is ``a + b`` bit for bit, and is
    left alone.
    """
    array = constant_of(bias)
    if array is not None:
        minus = editor.constant("minus_bias", -np.float32(beta) * _as_float(array))
    else:
        factor = editor.constant("minus_beta", np.array(-beta, np.float32))
        minus = editor.op(anchor, "Mul", [bias, factor], "minus_bias")[0]
    return editor.op(anchor, "Sub", [product, minus], "biased")[0]


def _keep_apart(editor: GraphEditor, use: Occurrence, node: ir.Node) -> None:
    """Rewrite the bias that follows a product, where the runtime would join the two."""
    x, product = node.inputs[0], node.outputs[0]
    if x is None or x.shape is None or not (x.shape.rank() == 2 or x.shape.is_static()):
        return
    own = [editor.nodes[name] for name in use.nodes if name in editor.nodes]
    for add in own:
        if add.op_type != "Add" or product not in add.inputs:
            continue
        bias = add.inputs[1] if add.inputs[0] is product else add.inputs[0]
        if bias is not None and is_constant(bias):
            editor.replace_uses(add.outputs[0], _biased(editor, add, product, bias))
            editor.drop_unused([add])


def swap_weight(editor: GraphEditor, node: ir.Node, new: ir.Value) -> None:
    """Make a product or convolution read ``new`` and drop what only the old weight needed."""
    old = node.inputs[1]
    node.replace_input_with(1, new)
    if old is not None:
        producer = old.producer()
        if producer is not None:
            editor.drop_unused([producer])
        else:
            editor.drop_initializer(old)


def per_channel_int8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return W [K, N] as int8 with one symmetric scale an output channel.

    Returns:
        The quantized weight, int8 [K, N] in −127 … 127, and the scales, float32 [N].
    """
    scale = np.abs(weight).max(axis=0) / np.float32(127)
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    quantized = np.clip(np.rint(weight / scale), -127, 127).astype(np.int8)
    return quantized, scale


def check_operators(
    model: ir.Model, layer: Layer, wanted: Mapping[str, str], keeps_weight: bool = False
) -> str | None:
    """Return what is wrong: an operator that the format needs is missing, or a weight is left.

    Args:
        model: The rewritten graph.
        layer: The layer.
        wanted: Operators with what to say where one is missing.
        keeps_weight: Whether the format leaves the layer's weight as it is.
    """
    found = {n.op_type for n in model.graph if n.metadata_props.get(LAYER_KEY) == layer.name}
    missing = [why for op, why in wanted.items() if op not in found]
    if missing or keeps_weight:
        return "; ".join(missing) or None
    return _unlowered(model, layer)


def _unlowered(model: ir.Model, layer: Layer) -> str | None:
    """Return which node of the layer still multiplies by its weight as stored before."""
    own = set(layer.nodes)
    for node in model.graph:
        if node.name in own and layer.weight:
            left = [v for v in node.inputs if v is not None and is_constant(v)]
            if any(source_of(v).name == layer.weight for v in left):
                return f"node {node.name!r} still reads {layer.weight!r}"
    return None


def unchanged() -> Change:
    """Return the change of a graph that holds no node of the layer."""
    return Change(False)
