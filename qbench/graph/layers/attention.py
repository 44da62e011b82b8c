"""Attention: scores, softmax and context of each head group, and the K and V tensors it reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from qbench.graph.layers.found import Claims, Found, Scalar, plain_attributes
from qbench.graph.layers.operators import (
    ATTENTIONS,
    CASTS,
    MATMULS,
    TO_CONTEXT,
    TO_SCORES,
    VIEWS,
)
from qbench.graph.layers.view import View, swaps_last_axes
from qbench.records import Kind

SCALE = "scale of attention scores"
MASK = "addition of the attention mask or position bias"
_PRODUCTS = MATMULS | {"Einsum"}


@dataclass
class _Read:
    """A place where a tensor is read: input ``index`` of ``node``."""

    node: ir.Node
    index: int

    @property
    def value(self) -> ir.Value:
        value = self.node.inputs[self.index]
        assert value is not None
        return value


def find_attention(view: View, claims: Claims) -> None:
    """Claim scores, context, K and V around every softmax; call it after the weighted layers."""
    for softmax in claims.of(Kind.SOFTMAX):
        products, passed = _scores(view, claims, softmax)
        for product in products:
            _claim_scores(view, claims, product)
        if products:
            claims.swap(softmax, replace(softmax, role="softmax"))
            _explain(view, claims, products, passed)
            _claim_context(view, claims, softmax)
    for node in view.nodes:
        if node.op_type in ATTENTIONS:
            _claim_fused(view, claims, node)


def _activations(view: View, node: ir.Node) -> bool:
    """Whether a product is one of two tensors that both depend on the model's input."""
    reads = [value for value in node.inputs[:2] if value is not None]
    return (
        node.op_type in _PRODUCTS
        and len(reads) == 2
        and not any(view.static(value) for value in reads)
    )


def _scores(view: View, claims: Claims, softmax: Found) -> tuple[list[ir.Node], list[ir.Node]]:
    """Return the products that reach a softmax, and the nodes passed on the way back."""
    products: list[ir.Node] = []
    passed: list[ir.Node] = []
    queue, seen = [softmax.reads[0]], set[int]()
    while queue:
        value = queue.pop()
        node = None if value is None else value.producer()
        if value is None or node is None or node not in view.position or id(value) in seen:
            continue
        seen.add(id(value))
        owner = claims.owner(node)
        if owner is not None and owner.kind not in (Kind.ATTENTION_SCORES, Kind.ACTIVATION):
            continue
        if _activations(view, node):
            products.append(node)
        elif node.op_type in TO_SCORES:
            passed.append(node)
            reads = node.inputs[1:] if node.op_type == "Where" else node.inputs
            queue += [read for read in reads if not view.static(read)]
    return products, passed


def _claim_scores(view: View, claims: Claims, node: ir.Node) -> None:
    if claims.owner(node) is not None:
        return
    attributes: dict[str, Scalar] = plain_attributes(node)
    claims.add(
        Found(
            kind=Kind.ATTENTION_SCORES,
            op=node.op_type,
            nodes=(node,),
            reads=tuple(node.inputs),
            output=node.outputs[0],
            edges=((node, 0),),
            anchor=node,
            role="scores",
            attributes=attributes,
        )
    )
    _claim_kv(view, claims, _Read(node, 1), "k", node)


def _explain(view: View, claims: Claims, products: list[ir.Node], passed: list[ir.Node]) -> None:
    """Say of the nodes between scores and softmax why they are in no layer."""
    below = 0
    for product in products:
        below |= view.descendants[view.position[product]]
    for node in passed:
        if not below >> view.position[node] & 1 or claims.owner(node) is not None:
            continue
        if node.op_type in ("Mul", "Div"):
            claims.say([node], SCALE)
        elif node.op_type not in VIEWS | {"Concat"}:
            claims.say([node], MASK)


def _claim_context(view: View, claims: Claims, softmax: Found) -> None:
    queue, seen = [softmax.output], set[int]()
    while queue:
        value = queue.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for user, index in view.users(value):
            if user not in view.position or claims.owner(user) is not None:
                continue
            if _activations(view, user) and index < 2:
                _add_context(view, claims, user, index)
            elif user.op_type in TO_CONTEXT:
                if user.op_type in ("Where", "Mul"):
                    claims.say([user], "mask of attention probabilities")
                queue += [*user.outputs]


def _add_context(view: View, claims: Claims, node: ir.Node, index: int) -> None:
    claims.add(
        Found(
            kind=Kind.ATTENTION_CONTEXT,
            op=node.op_type,
            nodes=(node,),
            reads=tuple(node.inputs),
            output=node.outputs[0],
            edges=((node, index),),
            anchor=node,
            role="context",
            attributes=plain_attributes(node),
        )
    )
    _claim_kv(view, claims, _Read(node, 1 - index), "v", node)


def _claim_kv(view: View, claims: Claims, read: _Read, role: str, anchor: ir.Node) -> None:
    place = _walk_back(view, claims, read)
    claims.add(
        Found(
            kind=Kind.KV,
            op="Identity",
            nodes=(),
            reads=(place.value,),
            output=place.value,
            edges=((place.node, place.index),),
            anchor=anchor,
            role=role,
        )
    )


def _walk_back(view: View, claims: Claims, read: _Read) -> _Read:
    """Follow K or V back to the tensor after rotary and before transposition and repetition."""
    while True:
        node = read.value.producer()
        if node is None or node not in view.position or claims.owner(node) is not None:
            return read
        step = _step_back(view, node)
        if step is None:
            return read
        if node.op_type in ("Mul", "Div"):
            claims.say([node], SCALE)
        read = step


def _step_back(view: View, node: ir.Node) -> _Read | None:
    op = node.op_type
    if op in CASTS or (op == "Transpose" and swaps_last_axes(node)):
        return _Read(node, 0)
    if op in ("Mul", "Div"):
        for index in (0, 1) if op == "Mul" else (0,):
            other = node.inputs[1 - index]
            if view.static(other) and not view.static(node.inputs[index]) and _is_scalar(other):
                return _Read(node, index)
        return None
    return _before_repetition(view, node)


def _is_scalar(value: ir.Value | None) -> bool:
    return value is not None and (
        value.shape is None
        or value.shape.rank() == 0
        or (value.shape.is_static() and all(size == 1 for size in value.shape.numpy()))
    )


def _before_repetition(view: View, node: ir.Node) -> _Read | None:
    """Step over Unsqueeze → Expand → Reshape, Expand → Reshape, or Tile."""
    if node.op_type == "Reshape":
        inner = view.producer(node.inputs[0], "Expand", "Tile", "Concat", "Transpose")
        step = None if inner is None else _before_repetition(view, inner)
        return step
    if node.op_type in ("Expand", "Tile"):
        before = view.producer(node.inputs[0], "Unsqueeze", "Reshape")
        if before is not None and (before.op_type == "Unsqueeze" or _adds_axis(before)):
            return _Read(before, 0)
        return _Read(node, 0)
    if node.op_type == "Concat" and len({id(value) for value in node.inputs}) == 1:
        before = view.producer(node.inputs[0], "Unsqueeze")
        return _Read(before, 0) if before is not None else _Read(node, 0)
    return None


def _adds_axis(node: ir.Node) -> bool:
    """Whether a Reshape only puts in an axis of size one."""
    before = None if node.inputs[0] is None else node.inputs[0].shape
    after = node.outputs[0].shape
    return (
        before is not None
        and after is not None
        and len(after) == len(before) + 1
        and (1 in list(after))
    )


def _claim_fused(view: View, claims: Claims, node: ir.Node) -> None:
    """Claim K and V of a fused attention operator; the operator itself is in no layer."""
    claims.say(
        [node], "fused attention operator: scores, softmax and context are no tensors of the graph"
    )
    if node.op_type == "Attention" and node.domain:
        return
    for role, index in (("k", 1), ("v", 2)):
        if index < len(node.inputs) and node.inputs[index] is not None:
            _claim_kv(view, claims, _Read(node, index), role, node)
