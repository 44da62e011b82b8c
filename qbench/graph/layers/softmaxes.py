"""Softmax: the operators, and the form written out in primitives."""

from __future__ import annotations

import onnx_ir as ir

from qbench.graph.layers.found import Claims, Found, edges_into, plain_attributes
from qbench.graph.layers.view import View, behind_casts
from qbench.records import Kind


def find_softmaxes(view: View, claims: Claims) -> None:
    """Claim every softmax of the graph."""
    for node in view.nodes:
        if node.op_type in ("Softmax", "LogSoftmax"):
            claims.add(_operator(node))
        elif node.op_type == "ReduceSum":
            layer = _decomposed(view, node)
            if layer is not None:
                claims.add(layer)


def _operator(node: ir.Node) -> Found:
    return Found(
        kind=Kind.SOFTMAX,
        op=node.op_type,
        nodes=(node,),
        reads=(node.inputs[0],),
        output=node.outputs[0],
        edges=((node, 0),),
        anchor=node,
        attributes={"axis": -1} | plain_attributes(node),
    )


def _decomposed(view: View, total: ir.Node) -> Found | None:
    """Match exp(x − max(x)) / sum(exp(x − max(x))), with or without the maximum."""
    axes = view.axes(total)
    source, passed = (None, []) if total.inputs[0] is None else behind_casts(total.inputs[0])
    exponent = view.producer(source, "Exp")
    if exponent is None or axes is None or len(axes) != 1:
        return None
    end = _division(view, exponent.outputs[0], total.outputs[0])
    if end is None:
        return None
    x, shift = _shifted(view, exponent.inputs[0])
    nodes = view.sort([total, exponent, *passed, *end, *shift])
    output = end[-1].outputs[0]
    if x is None or not view.closed(nodes, output):
        return None
    return Found(
        kind=Kind.SOFTMAX,
        op="Softmax",
        nodes=nodes,
        reads=(x,),
        output=output,
        edges=edges_into(nodes, x),
        anchor=exponent,
        attributes={"axis": axes[0]},
    )


def _division(view: View, numerator: ir.Value, total: ir.Value) -> list[ir.Node] | None:
    node = view.only_user(total)
    nodes: list[ir.Node] = []
    while node is not None and node.op_type in ("Reciprocal", "Cast", "Identity"):
        nodes.append(node)
        total = node.outputs[0]
        node = view.only_user(total)
    inverse = any(step.op_type == "Reciprocal" for step in nodes)
    if node is None or node.op_type != ("Mul" if inverse else "Div"):
        return None
    others = [value for value in node.inputs if value is not total]
    if len(others) != 1 or others[0] is None or (not inverse and node.inputs[1] is not total):
        return None
    base, casts = behind_casts(others[0])
    return [*nodes, *casts, node] if base is numerator else None


def _shifted(view: View, value: ir.Value | None) -> tuple[ir.Value | None, list[ir.Node]]:
    """Return x and the nodes where the value is x − max(x); else the value itself."""
    node = view.producer(value, "Sub")
    if node is None or node.inputs[1] is None:
        return value, []
    largest, casts = behind_casts(node.inputs[1])
    reduce = view.producer(largest, "ReduceMax")
    if reduce is None or reduce.inputs[0] is not node.inputs[0]:
        return value, []
    return node.inputs[0], [node, reduce, *casts]
