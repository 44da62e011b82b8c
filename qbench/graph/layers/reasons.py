"""Why a node is in no layer, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import onnx_ir as ir

from qbench.graph.layers.attention import MASK, SCALE
from qbench.graph.layers.found import Claims, Found, name_of
from qbench.graph.layers.view import CASTS, View
from qbench.graph.layers.weights import QUANTIZED
from qbench.records import Kind, Unlayered

_MOVES = frozenset(
    "Reshape Transpose Squeeze Unsqueeze Flatten Identity Expand Tile Slice Split Concat Gather "
    "GatherElements GatherND ScatterND ScatterElements Pad DepthToSpace SpaceToDepth Dropout "
    "Compress ReverseSequence".split()
)
_QUANTIZED = frozenset(
    "QuantizeLinear DequantizeLinear DynamicQuantizeLinear MatMulInteger ConvInteger QLinearMatMul "
    "QLinearConv MatMulNBits MatMulBnb4 MatMulIntegerToFloat DynamicQuantizeMatMul QAttention "
    "QLinearAdd QLinearMul QGemm QOrderedMatMul GatherBlockQuantized".split()
)
_POOLS = frozenset(
    "GlobalAveragePool GlobalMaxPool GlobalLpPool AveragePool MaxPool LpPool MaxRoiPool".split()
)
_NORMS = frozenset({"ReduceL2", "ReduceL1", "LpNormalization", "ReduceSumSquare"})
_ARITHMETIC = frozenset("Add Sub Mul Div Neg Pow Sqrt Exp Log Min Max Clip Abs Reciprocal".split())
#: Inputs that are a shape, axes, or places to cut: input index at and after which they stand.
_SHAPE_INPUTS = {
    "Reshape": 1, "Expand": 1, "Tile": 1, "Slice": 1, "Range": 0, "ConstantOfShape": 0, "Pad": 1,
    "Resize": 1, "Split": 1, "Unsqueeze": 1, "Squeeze": 1, "EyeLike": 0,
}  # fmt: skip
_FIXED = {
    "EmbedLayerNormalization": "fused embeddings and normalisation: cannot be told apart",
    "BatchNormalization": "batch normalisation: folds into the convolution before it",
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
        self._uses: dict[ir.Node, set[str]] = defaultdict(set)
        for node in reversed(view.nodes):
            self._uses[node] = self._purposes(node)
        self._turned = self._rotary_cone()
        self._tail = [node for node in view.nodes if self._is_tail(node)]

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
        if user.op_type in ("Cos", "Sin"):
            return (_ROTARY,)
        return self._uses.get(user, ())

    def _rotary_cone(self) -> set[ir.Node]:
        """Return Cos, Sin and what is computed from them before the next layer."""
        cone: set[ir.Node] = set()
        for node in self._view.nodes:
            if self._claims.owner(node) is not None:
                continue
            starts = (
                node.op_type in ("Cos", "Sin", "RotaryEmbedding")
                or self._claims.reasons.get(node) == _ROTARY
            )
            if starts or any(parent in cone for parent in self._parents(node)):
                cone.add(node)
        return cone

    def _parents(self, node: ir.Node) -> Iterable[ir.Node]:
        for value in node.inputs:
            parent = None if value is None else value.producer()
            if parent is not None:
                yield parent

    def _is_tail(self, node: ir.Node) -> bool:
        """Whether layers lie before a node and none after it."""
        index = self._view.position[node]
        return bool(self._view.ancestors[index] & self._layered) and not bool(
            self._view.descendants[index] & self._layered
        )

    def reason(self, node: ir.Node) -> str:
        """Return why a node is in no layer."""
        said = self._claims.reasons.get(node)
        return said or self._by_operator(node) or self._by_purpose(node) or self._by_place(node)

    def _by_operator(self, node: ir.Node) -> str:
        if node.op_type in _QUANTIZED or self._view.dtype(node.outputs[0]) in (
            ir.DataType.INT8,
            ir.DataType.UINT8,
            ir.DataType.INT4,
            ir.DataType.UINT4,
        ):
            return QUANTIZED
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
        if _MASK_WORK in uses and not after_layer:
            return _MASK_WORK
        if node in self._turned or _ROTARY in uses:
            return _MOVE if node.op_type in _MOVES and after_layer else _ROTARY
        if self._view.static(node.outputs[0]):
            return _SHAPE if uses == {_SHAPE} else "constant: depends on shapes alone"
        if not is_float:
            for purpose in (_INDEX, _SHAPE, _MASK_WORK):
                if purpose in uses:
                    return purpose
        return "" if is_float else "not a float tensor"

    def _by_place(self, node: ir.Node) -> str:
        if node.op_type in _POOLS:
            return "pooling"
        if node in self._tail or self._only_feeds_tail(node):
            reason = self._of_tail(node)
            if reason:
                return reason
        if node.op_type in CASTS and node.op_type.startswith("Cast"):
            return "cast"
        if node.op_type in _MOVES:
            return _MOVE
        return self._of_arithmetic(node)

    def _only_feeds_tail(self, node: ir.Node) -> bool:
        return not self._view.descendants[self._view.position[node]] & self._layered

    def _of_tail(self, node: ir.Node) -> str:
        """Tell pooling from normalisation of the output by the reductions around a node."""
        index = self._view.position[node]
        near = [
            other
            for other in self._view.nodes
            if self._only_feeds_tail(other)
            and (other.op_type.startswith("Reduce") or other.op_type in _NORMS)
        ]
        mask = self._view.ancestors[index]
        before = [other for other in near if mask >> self._view.position[other] & 1]
        if any(other.op_type in _NORMS for other in before) or (
            node.op_type in ("Sqrt", "Pow") and near
        ):
            return "output normalisation"
        if node.op_type in _MOVES and not before:
            return ""
        after = self._view.descendants[index]
        if before or any(after >> self._view.position[other] & 1 for other in near):
            return "pooling"
        return ""

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
        if op in _ARITHMETIC:
            return f"{op}: arithmetic outside any pattern"
        return f"{op}: no layer kind covers it"


__all__ = ["MASK", "SCALE", "Found", "explain"]
