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
            Status.NOT_YET, f"it is computed by the fused operator {sorted(odd)[0]}", "export plain"
        )
    if layer.kind is not Kind.LINEAR:
        return Refusal(
            Status.NOT_APPLICABLE, f"quantized weights are for linear layers, not {layer.kind}"
        )
    if len(layer.weight_shape) != 2:
        return Refusal(
            Status.NOT_YET,
            f"its weight has shape {list(layer.weight_shape)}; matrices alone are quantized",
        )
    weight = model.graph.initializers.get(layer.weight)
    if weight is None or weight.const_value is None:
        return Refusal(Status.NOT_APPLICABLE, f"its weight {layer.weight!r} is no stored constant")
    if weight.const_value.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        return Refusal(
            Status.NOT_APPLICABLE, f"its weight is {weight.const_value.dtype}, not floating point"
        )
    return None


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """Return the constant that a value holds, seen through Transpose, Cast and Identity."""
    if value is None:
        return None
    if value.const_value is not None:
        return np.asarray(value.const_value.numpy())
    node = value.producer()
    if node is None or node.op_type not in ("Transpose", "Cast", "Identity"):
        return None
    inner = constant_of(node.inputs[0])
    if inner is None or node.op_type != "Transpose":
        return inner
    perm = node.attributes.get("perm")
    return inner.transpose(tuple(perm.as_ints()) if perm else None)


def linear_forms(editor: GraphEditor, uses: list[Occurrence]) -> Iterator[LinearForm]:
    """Rewrite each use to ``x @ W`` and yield it; the caller replaces the right operand."""
    for use in uses:
        node = _product_node(editor, use)
        if node is None:
            continue
        tensor = use.edges[0].tensor if use.edges else use.inputs[0]
        if node.op_type == "Gemm":
            yield _from_gemm(editor, node, tensor)
            continue
        left, right = constant_of(node.inputs[0]), constant_of(node.inputs[1])
        if right is not None and node.inputs[0] is not None:
            yield LinearForm(node, node.inputs[0], _as_float(right), tensor)
        elif left is not None:
            yield _from_left(editor, node, left, tensor)


def _product_node(editor: GraphEditor, use: Occurrence) -> ir.Node | None:
    nodes = [editor.nodes[name] for name in use.nodes if name in editor.nodes]
    return next((n for n in nodes if n.op_type in ("MatMul", "Gemm")), None)


def _as_float(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, dtype=np.float32)


def _transposed(editor: GraphEditor, anchor: ir.Node, value: ir.Value, stem: str) -> ir.Value:
    rank = value.shape.rank() if value.shape is not None else 2
    perm = [*range(rank - 2), rank - 1, rank - 2]
    made = editor.op(anchor, "Transpose", [value], stem)[0]
    producer = made.producer()
    assert producer is not None
    producer.attributes["perm"] = ir.AttrInt64s("perm", perm)
    made.shape = ir.Shape([None] * rank)
    return made


def _from_left(editor: GraphEditor, node: ir.Node, weight: np.ndarray, tensor: str) -> LinearForm:
    x = node.inputs[1]
    assert x is not None
    turned = _transposed(editor, node, x, "transpose_in")
    product = editor.op(node, "MatMul", [turned, node.inputs[0]], "product")[0]
    product.shape = x.shape
    back = _transposed(editor, node, product, "transpose_out")
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
        a = _transposed(editor, node, a, "transpose_in")
    result = editor.op(node, "MatMul", [a, b], "product")[0]
    made = result.producer()
    assert made is not None
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        beta = node.attributes.get_float("beta", 1.0)
        if beta != 1.0:
            scale = editor.constant("beta", np.array(beta, np.float32))
            bias = editor.op(node, "Mul", [bias, scale], "scaled_bias")[0]
        result = editor.op(node, "Add", [result, bias], "biased")[0]
    editor.replace_uses(node.outputs[0], result)
    editor.drop_unused([node])
    return LinearForm(made, a, weight, tensor)


def swap_weight(editor: GraphEditor, form: LinearForm, new: ir.Value) -> None:
    """Make the MatMul read ``new`` and drop what only the old weight needed."""
    old = form.node.inputs[1]
    form.node.replace_input_with(1, new)
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


def check_operators(model: ir.Model, layer: Layer, wanted: Mapping[str, str]) -> str | None:
    """Return what is wrong where a layer's MatMul does not read what the format needs."""
    found = {n.op_type for n in model.graph if n.metadata_props.get(LAYER_KEY) == layer.name}
    missing = [why for op, why in wanted.items() if op not in found]
    return "; ".join(missing) or None


def unchanged() -> Change:
    """Return the change of a graph that holds no node of the layer."""
    return Change(False)
