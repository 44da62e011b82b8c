"""Residual additions: a tensor added to what layers made of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import onnx_ir as ir

from qbench.graph.layers.found import Claims, Found
from qbench.graph.layers.operators import ATTENTIONS, SAME_STREAM
from qbench.graph.layers.view import View
from qbench.records import Kind

_PATH = (
    Kind.LINEAR,
    Kind.CONV,
    Kind.LAYERNORM,
    Kind.ATTENTION_SCORES,
    Kind.ATTENTION_CONTEXT,
)
EMBEDDED = "sum of embeddings"
PARALLEL = "sum of parallel branches"
#: Branches beside one another that one residual stream may take in.
_BRANCHES = 3


def find_residuals(view: View, claims: Claims) -> None:
    """Claim every residual addition; call it last."""
    working = view.mask(node for layer in claims.of(*_PATH) for node in layer.nodes)
    working |= view.mask(node for node in view.nodes if node.op_type in ATTENTIONS)
    for node in view.nodes:
        if node.op_type not in ("Add", "Sum") or node.domain:
            continue
        reads = [value for value in node.inputs if value is not None and not view.origin(value)]
        free = claims.owner(node) is None and node not in claims.reasons
        if not free or len(reads) < 2 or not view.is_float(node.outputs[0]):
            continue
        if _is_residual(view, claims, reads, working):
            claims.add(_layer(node))
        elif reason := _why_not(view, claims, reads, working):
            claims.say([node], reason)


def _layer(node: ir.Node) -> Found:
    return Found(
        kind=Kind.RESIDUAL_ADD,
        op=node.op_type,
        nodes=(node,),
        reads=tuple(node.inputs),
        output=node.outputs[0],
        edges=tuple((node, index) for index in range(len(node.inputs))),
        anchor=node,
    )


def _is_residual(view: View, claims: Claims, reads: Sequence[ir.Value], working: int) -> bool:
    """Whether one operand, or a summand of it, is what layers made another operand from."""
    return any(
        not view.static(first) and _leads_to(view, start, end, working)
        for first, second in itertools.permutations(reads, 2)
        for end in [_upstream(view, second)]
        for start in _summands(view, claims, first)
    )


def _upstream(view: View, value: ir.Value) -> int:
    node = value.producer()
    if node is None or node not in view.position:
        return 0
    return view.ancestors[view.position[node]]


def _leads_to(view: View, start: ir.Value, upstream: int, working: int) -> bool:
    return bool(view.after(start) & upstream & working)


def _summands(view: View, claims: Claims, value: ir.Value) -> list[ir.Value]:
    """Return a value, what it is a view of, and the summands of residual additions in it."""
    found: list[ir.Value] = []
    queue = [(value, 0)]
    while queue:
        value, depth = queue.pop(0)
        found.append(value)
        node = value.producer()
        if node is None or node.domain:
            continue
        owner = claims.owner(node)
        if owner is None:
            queue += [(read, depth) for read in _seen_through(view, node)]
        elif owner.kind is Kind.RESIDUAL_ADD and depth < _BRANCHES:
            queue += [(read, depth + 1) for read in node.inputs if read is not None]
    return found


def _seen_through(view: View, node: ir.Node) -> list[ir.Value]:
    if node.op_type in SAME_STREAM and node.inputs[0] is not None:
        return [node.inputs[0]]
    if node.op_type in ("Mul", "Div"):
        moving = [read for read in node.inputs if read is not None and not view.static(read)]
        return moving if len(moving) == 1 else []
    return []


def _why_not(view: View, claims: Claims, reads: Sequence[ir.Value], working: int) -> str:
    if all(_is_embedded(view, claims, value) for value in reads):
        return EMBEDDED
    if all(_upstream(view, value) & working for value in reads):
        return PARALLEL
    return ""


def _is_embedded(view: View, claims: Claims, value: ir.Value) -> bool:
    """Whether a value is an embedding, a sum of them, or a view of either."""
    node = value.producer()
    while node is not None and node.op_type in SAME_STREAM and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    owner = claims.owner(node)
    if owner is not None:
        return owner.kind is Kind.EMBEDDING
    return node is not None and claims.reasons.get(node) == EMBEDDED
