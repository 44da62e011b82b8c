"""Masks: where constants that fp16 cannot hold flow before they are an exponent.

A mask hides a position by a number so low that a softmax makes zero of it: −∞, the lowest float32,
−1e12. It comes as a constant tensor that is added, as a fill of Where, or as a factor of a mask
of zeros and ones, and then nothing in the graph is that number until it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from qbench.graph.lint import FP16_MAX, Extreme, find_extreme_constants
from qbench.records import Kind, Layer, Mask, Occurrence


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Operators that give on what their first operand holds, in another place, shape or type.
_PASSES = _words(
    "Cast Clip Concat Expand Flatten Gather Identity Neg Pad Reshape Slice Split Squeeze Tile "
    "Transpose Trilu Unsqueeze"
)
_ARITHMETIC = _words("Add Sub Mul Div Where Min Max ScatterND")
#: Operators that read weights too: a constant that they alone read is not looked at.
_READ_WEIGHTS = _words("Cast Gather Reshape Transpose")
#: Operators behind which a tensor is no mask any more, though it comes of integers.
_COMPUTES = _words(
    "MatMul Gemm Conv ConvTranspose Einsum Softmax LayerNormalization RMSNormalization"
)
#: Kinds of layers that read a mask.
_READERS = frozenset({Kind.SOFTMAX, Kind.ATTENTION_SCORES, Kind.RESIDUAL_ADD})


@dataclass(frozen=True, slots=True)
class _Fill:
    """A constant on its way.

    Attributes:
        constant: Its name.
        value: Its element of largest magnitude.
        everywhere: Whether every element is it: no mask until something picks elements.
    """

    constant: str
    value: float
    everywhere: bool


Carried = Mapping[str, tuple[_Fill, ...]]


def mark_masks(model: ir.Model, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return the layers with the fills of masks that reach them.

    A scale or a bias beyond fp16's range is no mask: what overflows by it does overflow.
    """
    carried = find_fills(model)
    if not carried:
        return layers
    guards = {
        str(node.inputs[0].name)
        for node in model.graph
        if node.op_type == "IsNaN" and node.inputs[0] is not None
    }
    return tuple(
        replace(layer, masks=_masks_of(layer, carried, guards)) if layer.kind in _READERS else layer
        for layer in layers
    )


def _masks_of(layer: Layer, carried: Carried, guards: set[str]) -> tuple[Mask, ...]:
    found: dict[tuple[str, str], Mask] = {}
    for use in layer.occurrences:
        guarded = layer.kind is Kind.SOFTMAX and use.output in guards
        for tensor in _tensors(use):
            for fill in carried.get(tensor, ()):
                mask = Mask(tensor, fill.constant, fill.value, guarded)
                found.setdefault((tensor, fill.constant), mask)
    return tuple(found.values())


def _tensors(use: Occurrence) -> list[str]:
    names = [*use.inputs, *(edge.tensor for edge in use.edges), use.output]
    return [name for name in dict.fromkeys(names) if name]


def find_fills(model: ir.Model) -> Carried:
    """Return the constants beyond ±65504 that each tensor of the main graph carries as a mask.

    They are followed through selection, arithmetic and changes of shape, up to what computes
    with them. A factor counts only where what it multiplies comes of integers or truth values
    (or of an input called a mask), and a summand only where some of its elements are ordinary.
    """
    graph = model.graph
    readers = (_ARITHMETIC | _PASSES) - _READ_WEIGHTS
    carried = _sources(graph, find_extreme_constants(model, readers))
    if not carried:
        return {}
    masks = _mask_like(graph)
    for node in graph:
        fills = () if node.domain else _passed_on(node, carried, masks)
        if fills:
            carried |= {str(v.name): fills for v in node.outputs if v.name}
    return carried


def _sources(graph: ir.Graph, extremes: tuple[Extreme, ...]) -> dict[str, tuple[_Fill, ...]]:
    by_node = {str(node.name): node for node in graph}
    carried: dict[str, tuple[_Fill, ...]] = {}
    for extreme in extremes:
        fill = _Fill(extreme.name, extreme.value, abs(extreme.min) > FP16_MAX < abs(extreme.max))
        if extreme.name in graph.initializers:
            carried[extreme.name] = (fill,)
        elif extreme.name in by_node:
            carried[str(by_node[extreme.name].outputs[0].name)] = (fill,)
    return carried


def _passed_on(node: ir.Node, carried: Carried, masks: frozenset[str]) -> tuple[_Fill, ...]:
    """Return the fills that a node's output carries."""
    names = ["" if value is None else str(value.name) for value in node.inputs]
    held = [carried.get(name, ()) for name in names]
    if node.op_type in ("Concat", "ScatterND"):
        return _merged(held, mixed=True)
    if node.op_type == "Trilu":
        return _merged(held[:1], mixed=True)
    if node.op_type in _PASSES:
        return _merged(held[:1])
    if node.op_type == "Where":
        return _merged(held[1:], mixed=True)
    if node.op_type in ("Add", "Sub", "Min", "Max"):
        return _merged([_mixed(fills) for fills in held])
    if node.op_type not in ("Mul", "Div") or len(names) != 2:
        return ()
    return _scaled(node, names, held, masks)


def _scaled(
    node: ir.Node, names: list[str], held: list[tuple[_Fill, ...]], masks: frozenset[str]
) -> tuple[_Fill, ...]:
    kept: list[tuple[_Fill, ...]] = []
    for index in (0, 1) if node.op_type == "Mul" else (0,):
        other = node.inputs[1 - index]
        if names[1 - index] in masks:
            kept.append(tuple(replace(fill, everywhere=False) for fill in held[index]))
        elif _is_constant(other):
            kept.append(held[index])
    return _merged(kept)


def _mixed(fills: tuple[_Fill, ...]) -> tuple[_Fill, ...]:
    return tuple(fill for fill in fills if not fill.everywhere)


def _merged(held: list[tuple[_Fill, ...]], mixed: bool = False) -> tuple[_Fill, ...]:
    """Return fills without repetition, by constant."""
    fills = {fill.constant: fill for part in reversed(held) for fill in reversed(part)}
    every = tuple(fills.values())[::-1]
    return tuple(replace(fill, everywhere=False) for fill in every) if mixed else every


def _mask_like(graph: ir.Graph) -> frozenset[str]:
    """Return the tensors that come of integers, truth values and inputs called a mask alone."""
    whole = {str(v.name) for v in graph.inputs if _is_mask_input(v)}
    known: set[str] = set(whole)
    for node in graph:
        reads = [v for v in node.inputs if v is not None]
        moving = [str(v.name) for v in reads if not _is_constant(v)]
        table = node.op_type == "Gather" and _is_float_constant(reads[0])
        if node.op_type in _COMPUTES or node.domain or table or not moving:
            continue
        if node.op_type in ("Shape", "Size") or all(name in known for name in moving):
            known |= {str(v.name) for v in node.outputs if v.name}
    return frozenset(known)


def _is_mask_input(value: ir.Value) -> bool:
    if value.dtype is None or not value.dtype.is_floating_point():
        return True
    return "mask" in str(value.name).lower()


def _is_constant(value: ir.Value | None) -> bool:
    if value is None:
        return False
    node = value.producer()
    return value.const_value is not None or (node is not None and node.op_type == "Constant")


def _is_float_constant(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.dtype.is_floating_point()
