"""Smoothing: what is hard to quantize in an activation goes over to the weight.

``x @ W`` is ``(x / s) @ (s · W)`` for any positive s of one number a channel. The division is
folded into the normalisation that gives x, where all that read x are products whose weights can
take the scale; else it is a Mul in front of the product.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qbench.formats import FORMATS
from qbench.lowering.constants import constant_of, is_constant
from qbench.lowering.edit import LAYER_KEY, GraphEditor
from qbench.lowering.linear import (
    LinearForm,
    linear_forms,
    present,
)
from qbench.records import Edge, Kind, Layer, Layers, Occurrence, Plan, PlanLayer
from qbench.remedies import in_use

Vector = npt.NDArray[np.float32]

#: Metadata key of a tensor: which scale it was divided by already.
SMOOTHED_KEY = "qbench.smoothed"
_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")


@dataclass(frozen=True, slots=True)
class Readers:
    """What a fold may do to the other products that read the same activation.

    Attributes:
        kept: Names of nodes whose layers keep the high precision: their weights take the scale.
            ``None`` stands for every node.
        same: Names of nodes whose layers are smoothed by the same scale: they do it themselves.
    """

    kept: Collection[str] | None = None
    same: Collection[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class Smoothed:
    """What smoothing did.

    Attributes:
        layer: The layer as it is in the changed graph.
        folded: Whether the division went into a normalisation.
    """

    layer: Layer
    folded: bool


def readers_of(layer: Layer, layers: Layers, plan: Plan, high: str) -> Readers:
    """Return what smoothing one layer of a plan may do to the others.

    Args:
        layer: The layer.
        layers: All layers of the model.
        plan: The plan.
        high: Name of the high precision.
    """
    rows = {row.name: row for row in plan.layers}
    scale = _scale_of(rows[layer.name])
    kept: set[str] = set()
    same: set[str] = set()
    for other in layers.layers:
        row = rows.get(other.name)
        if other.kind is not Kind.LINEAR or row is None:
            continue
        if row.format == high and FORMATS[high].weight_bits == 32:  # it is lowered no further
            kept.update(other.nodes)
        elif scale is not None and _scale_of(row) == scale:
            same.update(other.nodes)
    return Readers(frozenset(kept), frozenset(same))


def _scale_of(row: PlanLayer) -> str | None:
    treatment = in_use(row)
    return None if treatment is None else treatment.vectors.get("scale")


def product_weight(model: ir.Model, layer: Layer) -> Vector | str:
    """Return W [K, N] of a layer that computes ``x @ W``, or why its x cannot be scaled.

    A vector of K scales goes along the last axis of x: x must be the left operand, as it is.
    """
    nodes = {str(node.name): node for node in model.graph}
    found: Vector | None = None
    for name in layer.nodes:
        node = nodes.get(name)
        if node is None or node.op_type not in ("MatMul", "Gemm"):
            continue
        array = constant_of(node.inputs[1])
        if array is None or array.ndim != 2 or node.attributes.get_int("transA", 0) == 1:
            return "its activation is not the left operand of a product with a matrix"
        found = np.asarray(array.T if _inner(node) else array, dtype=np.float32)
    return "it holds no product" if found is None else found


def smooth(
    model: ir.Model, layer: Layer, scale: Vector, readers: Readers | None = None
) -> Smoothed:
    """Divide the activation of a linear layer by ``scale`` and multiply its weight, in place.

    Args:
        model: The graph, whole or one segment.
        layer: The layer.
        scale: One positive number a channel of the activation, shape [K].
        readers: What a fold may do to other products; by default all may take the scale.

    Returns:
        The layer, its uses as ``x @ W`` products of the changed graph.
    """
    editor, folded = GraphEditor(model, layer.name), False
    label = hashlib.sha256(scale.tobytes()).hexdigest()[:16]
    uses: list[Occurrence] = []
    weight: ir.Value | None = None
    inverse: ir.Value | None = None
    for use in present(model, layer):
        for form in linear_forms(editor, [use]):
            if form.x.metadata_props.get(SMOOTHED_KEY) != label:
                if _fold(editor, form.node, form.x, scale, readers or Readers()):
                    form.x.metadata_props[SMOOTHED_KEY] = label
                    folded = True
                else:
                    if inverse is None:
                        half = form.x.dtype == ir.DataType.FLOAT16
                        dtype = np.float16 if half else np.float32
                        inverse = editor.constant("x_smooth", (1 / scale).astype(dtype))
                    x = editor.op(form.node, "Mul", [form.x, inverse], "smooth")[0]
                    x.shape, x.type = form.x.shape, form.x.type
                    form.node.replace_input_with(0, x)
            else:
                folded = True
            if weight is None:
                weight = editor.constant("smooth_weight", form.weight * scale[:, None])
            replace_weight(editor, form.node, weight)
            uses.append(as_product(form, use))
    return Smoothed(replace(layer, occurrences=tuple(uses)), folded)


def replace_weight(editor: GraphEditor, node: ir.Node, new: ir.Value) -> None:
    """Make a product read ``new`` as its right operand; drop what only the old one needed."""
    old = node.inputs[1]
    node.replace_input_with(1, new)
    producer = None if old is None else old.producer()
    if producer is not None:
        editor.drop_unused([producer])
    else:
        editor.drop_initializer(old)


def as_product(form: LinearForm, use: Occurrence) -> Occurrence:
    """Return a use of a layer as the ``x @ W`` product that it was rewritten to."""
    name = str(form.node.name)
    edges = (Edge(name, 0, form.tensor),)
    return replace(use, op="MatMul", nodes=(name,), edges=edges)


def _fold(editor: GraphEditor, own: ir.Node, x: ir.Value, scale: Vector, readers: Readers) -> bool:
    """Divide x where it is made, if all that read it can take the scale; say whether it was."""
    if x.is_graph_output() or not _is_scaled_norm(x, scale.size):
        return False
    others = [(node, index) for node, index in x.uses() if node is not own]
    if any(node.graph is not editor.graph for node, _ in others):
        return False  # a subgraph reads it
    waiting = [o for o in others if o[0].name not in readers.same]
    if not all(_takes(node, index, readers, scale.size) for node, index in waiting):
        return False
    for node, index in waiting:
        _compensate(editor, node, index, scale)
    _divide_norm(editor, x, scale)
    return True


def _takes(node: ir.Node, index: int, readers: Readers, size: int) -> bool:
    """Whether a node is a product x @ W in high precision whose weight may take the scale."""
    if node.op_type not in ("MatMul", "Gemm") or node.domain or index != 0:
        return False
    if readers.kept is not None and node.name not in readers.kept:
        return False
    if node.op_type == "Gemm" and node.attributes.get_int("transA", 0) == 1:
        return False
    weight = constant_of(node.inputs[1]) if is_constant(node.inputs[1]) else None
    if weight is None or weight.ndim != 2 or weight.dtype != np.float32:
        return False
    return bool(weight.shape[_inner(node)] == size)


def _inner(node: ir.Node) -> int:
    """Return the axis of the weight that a product sums over."""
    return 1 if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1 else 0


def _compensate(editor: GraphEditor, node: ir.Node, index: int, scale: Vector) -> None:
    weight = constant_of(node.inputs[1])
    assert weight is not None
    factor = scale if _inner(node) else scale[:, None]
    stored = editor.stored_bytes
    replace_weight(editor, node, editor.constant("neighbour", weight * factor))
    editor.stored_bytes = stored  # another layer's weight


def _is_scaled_norm(x: ir.Value, size: int) -> bool:
    return bool(_scaling_inputs(x, size))


def _scaling_inputs(x: ir.Value, size: int) -> Sequence[tuple[ir.Node, int]]:
    """Return the constant inputs, [size] each, that scale and shift a normalisation's output."""
    node = x.producer()
    if node is None or LAYER_KEY in node.metadata_props:  # a lowered norm keeps what it stores
        return ()
    if node.op_type in _NORMS:
        slots = [(node, i) for i in (1, 2) if i < len(node.inputs) and node.inputs[i] is not None]
        return slots if slots and all(_is_vector(n.inputs[i], size) for n, i in slots) else ()
    shift: list[tuple[ir.Node, int]] = []
    if node.op_type == "Add" and not node.domain:
        at = _vector_at(node, size)
        other = None if at is None else node.inputs[1 - at]
        if at is None or other is None or len(other.uses()) != 1 or other.is_graph_output():
            return ()
        shift, inner = [(node, at)], other.producer()
        if inner is None:
            return ()
        node = inner
    at = _vector_at(node, size) if node.op_type == "Mul" and not node.domain else None
    return () if at is None else [(node, at), *shift]


def _vector_at(node: ir.Node, size: int) -> int | None:
    return next((i for i in (0, 1) if _is_vector(node.inputs[i], size)), None)


def _is_vector(value: ir.Value | None, size: int) -> bool:
    if value is None or value.const_value is None:
        return False
    array = constant_of(value)
    return array is not None and array.dtype == np.float32 and array.shape == (size,)


def _divide_norm(editor: GraphEditor, x: ir.Value, scale: Vector) -> None:
    stored = editor.stored_bytes
    for node, index in _scaling_inputs(x, scale.size):
        old = node.inputs[index]
        array = constant_of(old)
        assert array is not None
        node.replace_input_with(index, editor.constant("norm", array / scale))
        editor.drop_initializer(old)
    editor.stored_bytes = stored  # it replaces as many numbers
