"""Q/DQ pairs on tensor edges: int8 for layers that hold no matrix.

Every reader gets a pair of its own: a pair shared by several halves what ONNX Runtime fuses.

NOTE: a sum of one term stands behind these pairs. ONNX Runtime moves a DequantizeLinear past the
Transpose of keys, makes the numbers unsigned there and not their type, and refuses the graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from qbench.lowering.base import Refusal
from qbench.lowering.edit import GraphEditor
from qbench.lowering.rounding import give_out
from qbench.records import Layer, Occurrence, Status

#: What a softmax gives lies between 0 and 1.
SOFTMAX_CLIP = 1.0


def require_edges(model: ir.Model, layer: Layer) -> Refusal | None:
    """Return why the tensors that a layer reads cannot be quantized, or ``None``."""
    nodes = {str(node.name): node for node in model.graph}
    values = [nodes[edge.node].inputs[edge.index] for edge in layer.edges if edge.node in nodes]
    if not values:
        return Refusal(Status.NOT_APPLICABLE, "no tensor of the graph carries its format")
    for value in values:
        if value is not None and value.dtype not in (None, ir.DataType.FLOAT):
            return Refusal(
                Status.NOT_YET,
                f"it computes in {value.dtype}; layers that compute in float32 are quantized",
                "export the model in float32",
            )
    return None


def require_softmax(model: ir.Model, layer: Layer) -> Refusal | None:
    """Return why what a softmax gives cannot be quantized, or ``None``."""
    odd = {use.op for use in layer.occurrences} - {"Softmax"}
    if odd:
        reason = f"{sorted(odd)[0]} gives numbers without a lower end, not probabilities"
        return Refusal(Status.NOT_APPLICABLE, reason)
    return require_edges(model, layer)


def quantized(
    editor: GraphEditor, anchor: ir.Node, value: ir.Value, clip: float, after: bool = False
) -> ir.Value:
    """Return a value rounded to int8, per tensor, by nodes right before or after ``anchor``."""
    scale = editor.constant("x_scale", np.array((clip or 1.0) / 127, np.float32))
    zero = editor.constant("x_zero", np.array(0, np.int8))
    inputs = [value, scale, zero]
    narrow = editor.op(anchor, "QuantizeLinear", inputs, "quantize", after=after)[0]
    if after:
        anchor = narrow.producer() or anchor
    return editor.op(anchor, "DequantizeLinear", [narrow, scale, zero], "dequantize", after=after)[
        0
    ]


def rounded(
    editor: GraphEditor,
    anchor: ir.Node,
    value: ir.Value,
    clip: float,
    after: bool = False,
    bare: bool = False,
) -> ir.Value:
    """Return a value rounded to int8 by a pair that the runtime leaves where it is.

    ``bare`` leaves the pair alone, for a runtime that is to fuse it.
    """
    if bare:
        return quantized(editor, anchor, value, clip, after=after)
    back = quantized(editor, anchor, value, clip, after=after)
    if after:
        anchor = back.producer() or anchor
    return editor.op(anchor, "Sum", [back], "rounded", after=after)[0]


def quantize_edges(
    editor: GraphEditor, use: Occurrence, clips: Mapping[str, float], bare: bool = False
) -> None:
    """Put a pair on each edge of a use.

    Args:
        editor: The graph.
        use: The use.
        clips: Clipping magnitude by tensor.
        bare: Whether nothing but the pair is put there.

    Raises:
        KeyError: If an edge tensor has no clip.
    """
    done: dict[ir.Value, ir.Value] = {}
    for edge in use.edges:
        node = editor.nodes.get(edge.node)
        value = None if node is None else node.inputs[edge.index]
        if node is None or value is None:
            continue
        if value not in done:  # a pattern that spells out one operator reads it once, as that does
            done[value] = rounded(editor, node, value, clips[edge.tensor], bare=bare)
        node.replace_input_with(edge.index, done[value])
    if not use.nodes:  # keys and values are no operator: the tensor itself is the layer
        _give_out(editor, done)


def _give_out(editor: GraphEditor, done: Mapping[ir.Value, ir.Value]) -> None:
    outputs = {id(value) for value in editor.graph.outputs}
    give_out(editor, {value: new for value, new in done.items() if id(value) in outputs})


def quantize_output(editor: GraphEditor, use: Occurrence, clip: float, bare: bool = False) -> None:
    """Put a pair between what a use gives and each of its readers."""
    made = {str(v.name): v for name in use.nodes for v in _outputs(editor, name)}
    value = made.get(use.output)
    if value is None:
        return
    producer = value.producer()
    assert producer is not None
    readers = list(value.uses())
    for reader, index in readers:
        reader.replace_input_with(index, rounded(editor, reader, value, clip, bare=bare))
    if value.is_graph_output():
        first = {node for node, _ in value.uses()}
        given = rounded(editor, producer, value, clip, after=True, bare=bare)
        mine = [node for node, _ in value.uses() if node not in first]
        editor.replace_uses(value, given, keep=[*first, *mine])


def _outputs(editor: GraphEditor, name: str) -> tuple[ir.Value, ...]:
    node = editor.nodes.get(name)
    return () if node is None else tuple(node.outputs)
