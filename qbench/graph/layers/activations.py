"""Activations: the operators, and GELU, SiLU and their kin written out in primitives.

A written-out activation is recognised by what it computes: the argument of the inner function
and the result are expanded as polynomials and compared by coefficient, so that neither the order
of operands nor the place of a factor matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from qbench.graph.layers.found import Claims, Found, Scalar, edges_into, plain_attributes
from qbench.graph.layers.operators import ACTIVATIONS, CASTS
from qbench.graph.layers.view import View
from qbench.records import Kind

#: Exponents of (x, inner function) → coefficient.
Polynomial = dict[tuple[int, int], float]

_TOLERANCE = 2e-3
_DEPTH = 8


@dataclass(frozen=True, slots=True)
class _Rule:
    """An activation: ``result`` in x and inner(argument); ``None`` takes any slope."""

    inner: str
    argument: Mapping[int, float] | None
    result: Polynomial
    op: str
    attributes: Mapping[str, Scalar]


_HALVES: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}
_ROOT = math.sqrt(2 / math.pi)
_RULES = (
    _Rule("Erf", {1: math.sqrt(0.5)}, _HALVES, "Gelu", {"approximate": "none"}),
    _Rule("Tanh", {1: _ROOT, 3: 0.044715 * _ROOT}, _HALVES, "Gelu", {"approximate": "tanh"}),
    _Rule("Sigmoid", None, {(1, 1): 1.0}, "Swish", {}),
    _Rule("HardSigmoid", {1: 1.0}, {(1, 1): 1.0}, "HardSwish", {}),
)


def find_activations(view: View, claims: Claims) -> None:
    """Claim every activation of the graph; call it after the normalisations."""
    for node in view.nodes:
        for rule in _RULES:
            layer = _written_out(view, node, rule) if node.op_type == rule.inner else None
            if layer is not None and claims.add(layer):
                break
    for node in view.nodes:
        mish = _mish(view, node)
        if mish is not None:
            claims.add(mish)
    for node in view.nodes:
        if claims.owner(node) is None and _is_operator(view, node):
            claims.add(_operator(view, node))


def _is_operator(view: View, node: ir.Node) -> bool:
    if node.op_type == "Clip" and len(node.inputs) == 3:
        return [view.number(value) for value in node.inputs[1:]] == [0.0, 6.0]
    return node.op_type in ACTIVATIONS and view.is_float(node.outputs[0])


def _operator(view: View, node: ir.Node) -> Found:
    defaults: dict[str, Scalar] = {"approximate": "none"} if node.op_type == "Gelu" else {}
    return Found(
        kind=Kind.ACTIVATION,
        op=node.op_type,
        nodes=(node,),
        reads=tuple(node.inputs),
        output=node.outputs[0],
        edges=((node, 0),),
        anchor=node,
        attributes=defaults | plain_attributes(node),
    )


def _written_out(view: View, inner: ir.Node, rule: _Rule) -> Found | None:
    argument = inner.inputs[0]
    if argument is None or view.static(argument):
        return None
    for x in _candidates(view, argument):
        arranged = _expand(view, argument, {id(x): (1, 0)})
        slope = None if arranged is None else _fits(arranged[0], rule)
        if arranged is None or slope is None:
            continue
        end = _find_result(view, inner.outputs[0], x, rule.result)
        if end is None:
            continue
        nodes = view.sort([inner, *arranged[1], *end[1]])
        if not view.closed(nodes, end[0]):
            continue
        attributes = rule.attributes or ({"alpha": slope} if rule.op == "Swish" else {})
        return Found(
            kind=Kind.ACTIVATION,
            op=rule.op,
            nodes=nodes,
            reads=(x,),
            output=end[0],
            edges=edges_into(nodes, x),
            anchor=inner,
            attributes=attributes,
        )
    return None


def _candidates(view: View, value: ir.Value) -> Iterator[ir.Value]:
    """Yield a value and what it is computed from by arithmetic, nearest first."""
    queue, seen = [(value, 0)], {id(value)}
    while queue:
        value, depth = queue.pop(0)
        yield value
        node = view.producer(value, "Mul", "Div", "Add", "Pow", *CASTS)
        for read in () if node is None or depth >= 5 else node.inputs:
            if read is not None and id(read) not in seen and not view.static(read):
                seen.add(id(read))
                queue.append((read, depth + 1))


def _fits(polynomial: Polynomial, rule: _Rule) -> float | None:
    """Return the slope at zero if an argument fits the rule."""
    by_power = {power: factor for (power, _), factor in polynomial.items()}
    if rule.argument is None:
        slope = by_power.get(1, 0.0)
        return slope if set(by_power) == {1} and slope > 0 else None
    return by_power.get(1) if _close(by_power, rule.argument) else None


def _close(first: Mapping[int, float], second: Mapping[int, float]) -> bool:
    return first.keys() == second.keys() and all(
        math.isclose(value, second[key], rel_tol=_TOLERANCE) for key, value in first.items()
    )


def _find_result(
    view: View, inner: ir.Value, x: ir.Value, target: Polynomial
) -> tuple[ir.Value, list[ir.Node]] | None:
    value: ir.Value = inner
    for _ in range(5):
        node = view.only_user(value)
        if node is None or node.op_type not in ("Mul", "Add", "Div", *CASTS):
            return None
        value = node.outputs[0]
        expanded = _expand(view, value, {id(x): (1, 0), id(inner): (0, 1)})
        if expanded is None:
            continue
        polynomial, nodes = expanded
        if polynomial.keys() == target.keys() and all(
            math.isclose(polynomial[key], target[key], rel_tol=_TOLERANCE) for key in target
        ):
            return value, nodes
    return None


def _expand(
    view: View, value: ir.Value | None, variables: Mapping[int, tuple[int, int]], depth: int = 0
) -> tuple[Polynomial, list[ir.Node]] | None:
    """Return a value as a polynomial in the variables, and the nodes that compute it."""
    if value is None or depth > _DEPTH:
        return None
    if id(value) in variables:
        return {variables[id(value)]: 1.0}, []
    number = view.number(value)
    if number is not None:
        return {(0, 0): number}, []
    node = view.producer(value, "Mul", "Div", "Add", "Sub", "Pow", "Neg", *CASTS)
    if node is None:
        return None
    unary = node.op_type in CASTS or node.op_type == "Neg"
    parts = [_expand(view, read, variables, depth + 1) for read in node.inputs[: 1 if unary else 2]]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    result = _combine(node.op_type, [polynomial for polynomial, _ in known])
    if result is None or len(result) > 8:
        return None
    return result, [node, *(inner for _, nodes in known for inner in nodes)]


def _combine(op: str, parts: list[Polynomial]) -> Polynomial | None:
    first, second = parts[0], parts[-1]
    if op in CASTS:
        return first
    if op == "Neg":
        return _scale(first, -1.0)
    if op in ("Add", "Sub"):
        return _add(first, second if op == "Add" else _scale(second, -1.0))
    if op == "Mul":
        return _multiply(first, second)
    constant = second.get((0, 0))
    if constant is None or len(second) != 1 or constant == 0:
        return None
    if op == "Div":
        return _scale(first, 1 / constant)
    if constant not in (1.0, 2.0, 3.0):
        return None
    result = first
    for _ in range(int(constant) - 1):
        result = _multiply(result, first)
    return result


def _scale(polynomial: Polynomial, factor: float) -> Polynomial:
    return {key: value * factor for key, value in polynomial.items()}


def _add(first: Polynomial, second: Polynomial) -> Polynomial:
    total = dict(first)
    for key, value in second.items():
        total[key] = total.get(key, 0.0) + value
    return total


def _multiply(first: Polynomial, second: Polynomial) -> Polynomial:
    product: Polynomial = {}
    for (a, b), x in first.items():
        for (c, d), y in second.items():
            product[a + c, b + d] = product.get((a + c, b + d), 0.0) + x * y
    return product


def _mish(view: View, node: ir.Node) -> Found | None:
    """Match x · tanh(softplus(x))."""
    soft = view.producer(node.inputs[0], "Softplus") if node.op_type == "Tanh" else None
    end = None if soft is None else view.only_user(node.outputs[0])
    if soft is None or end is None or end.op_type != "Mul" or soft.inputs[0] not in end.inputs:
        return None
    nodes = view.sort([soft, node, end])
    x = soft.inputs[0]
    if x is None or not view.closed(nodes, end.outputs[0]):
        return None
    return Found(
        kind=Kind.ACTIVATION,
        op="Mish",
        nodes=nodes,
        reads=(x,),
        output=end.outputs[0],
        edges=edges_into(nodes, x),
        anchor=node,
    )
