"""Layers that hold a weight: linear, convolution and embedding."""

from __future__ import annotations

import onnx_ir as ir

from qbench.graph.layers.found import Claims, Found, Scalar, plain_attributes
from qbench.graph.layers.operators import CONVS, MATMULS, TABLE_STEPS
from qbench.graph.layers.view import Origin, View
from qbench.records import Kind

ALREADY = "already quantized"


def find_weighted(view: View, claims: Claims) -> None:
    """Claim every linear, convolution and embedding of the graph."""
    for node in view.nodes:
        if node.op_type in MATMULS:
            layer = _matmul(view, claims, node)
        elif node.op_type == "Gemm":
            layer = _gemm(view, claims, node)
        elif node.op_type in CONVS:
            layer = _conv(view, claims, node)
        elif node.op_type == "Gather":
            layer = _gather(view, claims, node)
        else:
            continue
        if layer is not None:
            claims.add(layer)


def _matmul(view: View, claims: Claims, node: ir.Node) -> Found | None:
    left, right = (view.origin(value) for value in node.inputs[:2])
    if left is not None and right is not None:
        claims.say([node], "product of two constants")
        return None
    origin = right or left
    if origin is None:
        return None
    reason = _refusal(view, node, origin)
    side = "right" if right is not None else "left"
    index = 0 if side == "right" else 1
    rank = len(origin.tensor.shape)
    swapped = _swapped(node, side)
    inner = _inner_size(origin, side, swapped)
    if not reason and rank < 2:
        reason = "product with a constant vector"
    if not reason and rank > 2 and inner == 1:
        reason = "rotary position arithmetic"
    if not reason and view.producer(node.inputs[index], "OneHot") is not None:
        reason = "table read by a one-hot product"
    if reason:
        claims.say([node], reason)
        return None
    attributes: dict[str, Scalar] = plain_attributes(node) | {"weight_side": side}
    return _linear(view, node, origin, index, attributes | _passage(origin))


def _swapped(node: ir.Node, side: str) -> bool:
    name = "transB" if side == "right" else "transA"
    return bool(node.attributes.get_int(name, 0))


def _inner_size(origin: Origin, side: str, swapped: bool) -> int | None:
    """Return the size of the axis that the product sums over, where it is known."""
    if origin.shape is None or len(origin.shape) < 2:
        return None
    return origin.shape[-2] if (side == "right") != swapped else origin.shape[-1]


def _outer_size(origin: Origin, side: str, swapped: bool) -> int | None:
    if origin.shape is None or len(origin.shape) < 2:
        return None
    return origin.shape[-1] if (side == "right") != swapped else origin.shape[-2]


def _passage(origin: Origin) -> dict[str, Scalar]:
    """Say how the initializer is read: transposed, and through which other operators."""
    others = [op for op in origin.ops if op not in ("Transpose", "Identity")]
    said: dict[str, Scalar] = {"weight_transposed": 1} if origin.transposed else {}
    return said | ({"weight_through": ",".join(others)} if others else {})


def _refusal(view: View, node: ir.Node, origin: Origin) -> str:
    if origin.quantized:
        return ALREADY
    if not origin.is_float or not view.is_float(node.outputs[0]):
        return "not a float tensor"
    return ""


def _gemm(view: View, claims: Claims, node: ir.Node) -> Found | None:
    origin = view.origin(node.inputs[1])
    if origin is None or view.origin(node.inputs[0]) is not None:
        return None
    reason = _refusal(view, node, origin)
    if reason:
        claims.say([node], reason)
        return None
    attributes: dict[str, Scalar] = {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0}
    attributes |= plain_attributes(node) | {"weight_side": "right"}
    return _linear(view, node, origin, 0, attributes | _passage(origin))


def _linear(
    view: View, node: ir.Node, origin: Origin, index: int, attributes: dict[str, Scalar]
) -> Found:
    side = str(attributes["weight_side"])
    outer = _outer_size(origin, side, _swapped(node, side))
    third = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
    bias, add = view.origin(third), None
    if third is None:
        bias, add = _following_bias(view, node, outer, column=side == "left")
    last = add or node
    return Found(
        kind=Kind.LINEAR,
        op=node.op_type,
        nodes=(node,) if add is None else (node, add),
        reads=(node.inputs[index], origin.value, third if bias is None else bias.value),
        output=last.outputs[0],
        edges=((node, index),),
        anchor=node,
        attributes=attributes,
        weight=origin,
        bias=bias,
    )


def _following_bias(
    view: View, node: ir.Node, size: int | None, column: bool
) -> tuple[Origin | None, ir.Node | None]:
    """Return the constant that a following Add adds along the output axis, and that Add."""
    add = view.only_user(node.outputs[0])
    if add is None or add.op_type != "Add" or add.domain:
        return None, None
    other = add.inputs[1] if add.inputs[0] is node.outputs[0] else add.inputs[0]
    origin = view.origin(other)
    if origin is None or origin.quantized or not origin.is_float or origin.shape is None:
        return None, None
    if size is not None and origin.tensor.size != size:
        return None, None
    large = [axis for axis, length in enumerate(origin.shape) if length > 1]
    wanted = len(origin.shape) - (2 if column else 1)
    return (origin, add) if large in ([], [wanted]) else (None, None)


def _conv(view: View, claims: Claims, node: ir.Node) -> Found | None:
    origin = view.origin(node.inputs[1])
    if origin is None:
        claims.say([node], "convolution by a weight that is no constant")
        return None
    reason = _refusal(view, node, origin)
    if reason:
        claims.say([node], reason)
        return None
    third = node.inputs[2] if len(node.inputs) > 2 else None
    bias, add = view.origin(third), None
    if third is None:
        bias, add = _channel_bias(view, node)
    return Found(
        kind=Kind.CONV,
        op=node.op_type,
        nodes=(node,) if add is None else (node, add),
        reads=(node.inputs[0], origin.value, third if bias is None else bias.value),
        output=(add or node).outputs[0],
        edges=((node, 0),),
        anchor=node,
        attributes=plain_attributes(node) | _passage(origin),
        weight=origin,
        bias=bias,
    )


def _channel_bias(view: View, node: ir.Node) -> tuple[Origin | None, ir.Node | None]:
    add = view.only_user(node.outputs[0])
    if add is None or add.op_type != "Add":
        return None, None
    other = add.inputs[1] if add.inputs[0] is node.outputs[0] else add.inputs[0]
    origin, weight = view.origin(other), view.origin(node.inputs[1])
    if origin is None or origin.shape is None or weight is None or not origin.is_float:
        return None, None
    spatial = len(weight.tensor.shape) - 2
    large = [axis for axis, size in enumerate(origin.shape) if size > 1]
    return (origin, add) if large == [len(origin.shape) - 1 - spatial] else (None, None)


def _gather(view: View, claims: Claims, node: ir.Node) -> Found | None:
    origin = view.origin(node.inputs[0])
    if origin is None or not (origin.is_float or origin.quantized):
        return None
    if origin.quantized:
        claims.say([node], ALREADY)
        return None
    indices = view.constant(node.inputs[1])
    if indices is not None and indices.size < 2:
        return None
    rank = len(origin.tensor.shape)
    if rank != 2 or node.attributes.get_int("axis", 0) != 0:
        return None
    if _turns(view, node):
        claims.say([node], "rotary position arithmetic")
        return None
    return Found(
        kind=Kind.EMBEDDING,
        op="Gather",
        nodes=(node,),
        reads=(origin.value, node.inputs[1]),
        output=node.outputs[0],
        edges=(),
        anchor=node,
        attributes={"axis": 0} | _passage(origin),
        weight=origin,
    )


def _turns(view: View, node: ir.Node) -> bool:
    """Whether rows of a table only multiply activations, as rotary sines and cosines do."""
    queue, products, others = [*node.outputs], 0, 0
    while queue:
        value = queue.pop()
        for user, index in view.users(value):
            if user.op_type in TABLE_STEPS and not user.domain:
                queue += [*user.outputs]
            elif user.op_type in ("Shape", "Size"):
                continue
            elif user.op_type == "Mul" and not view.static(user.inputs[1 - index]):
                products += 1
            else:
                others += 1
    return products > 0 and others == 0
