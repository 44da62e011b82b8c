"""Why a node is in no layer, in words."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from qbench.graph.layers.attention import MASK
from qbench.graph.layers.found import Claims, name_of
from qbench.graph.layers.operators import (
    ARITHMETIC,
    LENGTHS,
    MOVES,
    POOLS,
    QUANTIZED,
)
from qbench.graph.layers.residuals import PARALLEL
from qbench.graph.layers.view import View
from qbench.graph.layers.weights import ALREADY
from qbench.records import Kind, Unlayered

#: Inputs that are a shape, axes, or places to cut: input index at and after which they stand.
_SHAPE_INPUTS = {
    "Reshape": 1, "Expand": 1, "Tile": 1, "Slice": 1, "Range": 0, "ConstantOfShape": 0, "Pad": 1,
    "Resize": 1, "Split": 1, "Unsqueeze": 1, "Squeeze": 1, "EyeLike": 0,
}  # fmt: skip
_FIXED = {
    "EmbedLayerNormalization": "fused embeddings and normalisation: cannot be told apart",
    "BatchNormalization": "batch normalisation: folds into the convolution before it",
    "Constant": "constant",
    "IsNaN": "guard against NaN",
    "Einsum": "Einsum: not lowered by this version",
    "LSTM": "recurrent operator: no layer kind covers it",
    "GRU": "recurrent operator: no layer kind covers it",
    "RNN": "recurrent operator: no layer kind covers it",
}
_SHAPE = "shape computation"
_MASK_WORK = "attention mask arithmetic"
_INDEX = "token or position indices"
_ROTARY = "rotary position arithmetic"
_MOVE = "reshape/transpose: data movement"


def explain(view: View, claims: Claims) -> tuple[Unlayered, ...]:
    """Return every node that is in no layer, with its reason, in topological order."""
    scene = _Scene(view, claims)
    found = [
        Unlayered(name_of(node), node.op_type, scene.reason(node))
        for node in view.nodes
        if claims.owner(node) is None
    ]
    inside = [
        Unlayered(name_of(node), node.op_type, "inside a control-flow body: not analysed")
        for node in view.model.graph.all_nodes()
        if node not in view.position
    ]
    return (*found, *inside)


class _Scene:
    """What the unlayered nodes are for, and what lies before and after them."""

    def __init__(self, view: View, claims: Claims) -> None:
        self._view = view
        self._claims = claims
        self._layered = view.mask(node for use in claims.found for node in use.nodes)
        self._turned = self._rotary_cone()
        self._uses: dict[ir.Node, set[str]] = {}
        for node in reversed(view.nodes):
            self._uses[node] = self._purposes(node)
        self._tail_reductions = [
            node
            for node in view.nodes
            if (node.op_type.startswith("Reduce") or node.op_type in LENGTHS)
            and self._is_tail(node)
        ]

    def _purposes(self, node: ir.Node) -> set[str]:
        """Return what the results of an unlayered node are used for."""
        return {
            purpose
            for value in node.outputs
            for user, index in self._view.users(value)
            for purpose in self._purpose(user, index)
        }

    def _purpose(self, user: ir.Node, index: int) -> Iterable[str]:
        start = _SHAPE_INPUTS.get(user.op_type)
        if start is not None and index >= start:
            return (_SHAPE,)
        owner = self._claims.owner(user)
        if owner is not None:
            return (_INDEX,) if owner.kind is Kind.EMBEDDING else ("data",)
        if self._claims.reasons.get(user) == MASK:
            return (_MASK_WORK,)
        if user in self._turned:
            return (_ROTARY,)
        return self._uses.get(user, ())

    def _rotary_cone(self) -> set[ir.Node]:
        """Return Cos, Sin and what is computed from them before the next layer."""
        cone: set[ir.Node] = set()
        view = self._view
        for node in view.nodes:
            if self._claims.owner(node) is not None:
                continue
            starts = (
                node.op_type in ("Cos", "Sin", "RotaryEmbedding")
                or self._claims.reasons.get(node) == _ROTARY
            )
            if starts or any(view.nodes[parent] in cone for parent in view.parents(node)):
                cone.add(node)
        return cone

    def _is_tail(self, node: ir.Node) -> bool:
        """Whether no layer lies after a node."""
        return not self._view.descendants[self._view.position[node]] & self._layered

    def reason(self, node: ir.Node) -> str:
        """Return why a node is in no layer."""
        said = self._claims.reasons.get(node)
        if said == PARALLEL and node in self._turned:
            return _ROTARY
        return said or self._by_operator(node) or self._by_purpose(node) or self._by_place(node)

    def _by_operator(self, node: ir.Node) -> str:
        if node.op_type in QUANTIZED or self._view.dtype(node.outputs[0]) in (
            ir.DataType.INT8,
            ir.DataType.UINT8,
            ir.DataType.INT4,
            ir.DataType.UINT4,
        ):
            return ALREADY
        if any(attr.type is ir.AttributeType.GRAPH for attr in node.attributes.values()):
            return "control flow: its body is not analysed"
        if node.op_identifier() in self._view.model.functions:
            return "call of a local function: its body is not analysed"
        return _FIXED.get(node.op_type, "")

    def _by_purpose(self, node: ir.Node) -> str:
        uses = self._uses[node]
        is_float = self._view.is_float(node.outputs[0])
        after_layer = bool(self._view.ancestors[self._view.position[node]] & self._layered)
        if node.op_type in ("Shape", "Size") or (uses == {_SHAPE} and not is_float):
            return _SHAPE
        if _MASK_WORK in uses:
            return _of_mask(node, after_layer)
        if node in self._turned or _ROTARY in uses:
            return _MOVE if node.op_type in MOVES and after_layer else _ROTARY
        if not is_float:
            for purpose in (_INDEX, _SHAPE, _MASK_WORK):
                if purpose in uses:
                    return purpose
        if self._view.static(node.outputs[0]):
            return _constant_reason(self._view, node)
        return ""

    def _by_place(self, node: ir.Node) -> str:
        if node.op_type in POOLS:
            return "pooling"
        if self._is_tail(node) and (reason := self._of_tail(node)):
            return reason
        if not self._view.is_float(node.outputs[0]):
            return "not a float tensor"
        if node.op_type in ("Cast", "CastLike"):
            return "cast"
        return _MOVE if node.op_type in MOVES else self._of_arithmetic(node)

    def _of_tail(self, node: ir.Node) -> str:
        """Tell pooling from normalisation of the output by the reductions around a node."""
        index = self._view.position[node]
        upstream, downstream = self._view.ancestors[index], self._view.descendants[index]
        before = [n for n in self._tail_reductions if upstream >> self._view.position[n] & 1]
        after = [n for n in self._tail_reductions if downstream >> self._view.position[n] & 1]
        if any(other.op_type in LENGTHS for other in before):
            return "output normalisation"
        if node.op_type in MOVES and not before and self._view.is_float(node.outputs[0]):
            return ""
        return "pooling" if before or after else ""

    def _of_arithmetic(self, node: ir.Node) -> str:
        op = node.op_type
        constants = any(self._view.origin(value) is not None for value in node.inputs)
        if op == "MatMul":
            return "product of two activations outside attention"
        if op in ("Mul", "Div") and constants:
            return "scaling by a constant"
        if op in ("Add", "Sub") and constants:
            return "addition of a constant"
        if op == "Mul":
            return "product of two branches"
        if op.startswith("Reduce"):
            return "reduction outside any pattern"
        if op in ARITHMETIC:
            return f"{op}: arithmetic outside any pattern"
        return f"{op}: no layer kind covers it"


def _of_mask(node: ir.Node, after_layer: bool) -> str:
    if not after_layer:
        return _MASK_WORK
    return _MOVE if node.op_type in MOVES else MASK


def _constant_reason(view: View, node: ir.Node) -> str:
    if view.origin(node.outputs[0]) is not None:
        return "constant: a weight is rearranged or cast before it is read"
    return "constant: depends on weights and shapes alone"
