"""Lint of constants: numbers that fp16 cannot hold, and weights that are no numbers at all.

Weights may be memory-mapped and larger than memory, so they are looked at in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from qbench.graph.content import WEIGHTED

#: Largest finite number of fp16.
FP16_MAX = 65504.0

_CHUNK = 1 << 22  # elements looked at at once


@dataclass(frozen=True, slots=True)
class Extreme:
    """A floating-point constant that leaves the range of fp16.

    Attributes:
        name: Name of the initializer; of the node where the constant is an attribute.
        value: Its element of largest magnitude; infinite where it holds infinities.
        min: Its smallest element.
        max: Its largest element.
        elements: Number of its elements.
        consumers: Names of the nodes that read it.
    """

    name: str
    value: float
    min: float
    max: float
    elements: int
    consumers: tuple[str, ...]

    @property
    def infinite(self) -> bool:
        """Whether it holds an infinity."""
        return math.isinf(self.value)


@dataclass(frozen=True, slots=True)
class _Constant:
    name: str
    tensor: ir.TensorProtocol
    readers: tuple[ir.Node, ...]


@dataclass(frozen=True, slots=True)
class _Extent:
    min: float
    max: float
    nan: bool


def find_extreme_constants(
    model: ir.Model, readers: Collection[str] | None = None
) -> tuple[Extreme, ...]:
    """Return the floating-point constants beyond ±65504, infinities included, in graph order.

    Mask constants such as −inf, −1e12 and the lowest float32 are among them, and so are weights
    that a cast to fp16 would saturate. Initializers and Constant nodes are looked at, in
    subgraphs too. NaN elements are passed over; see ``find_non_finite_weights``.

    Args:
        model: The graph.
        readers: Operators; constants that none of them reads are then not looked at.
    """
    return tuple(
        extreme
        for constant in _constants(model)
        if readers is None or any(node.op_type in readers for node in constant.readers)
        if (extreme := _extreme(constant)) is not None
    )


def find_non_finite_weights(model: ir.Model) -> tuple[str, ...]:
    """Return the names of constants that hold NaN, and of weights that hold infinities.

    An infinity is damage where a weighted operator (MatMul, Gemm, Conv, a normalisation) reads
    the constant; elsewhere it may be a mask, which ``find_extreme_constants`` lists.
    """
    return tuple(constant.name for constant in _constants(model) if _is_damaged(constant))


def _is_damaged(constant: _Constant) -> bool:
    extent = _extent(constant.tensor)
    weighted = any(node.op_type in WEIGHTED for node in constant.readers)
    return extent.nan or (weighted and (math.isinf(extent.min) or math.isinf(extent.max)))


def _extreme(constant: _Constant) -> Extreme | None:
    extent = _extent(constant.tensor)
    if extent.min > extent.max:  # no element but NaN
        return None
    value = extent.max if extent.max >= -extent.min else extent.min
    if abs(value) <= FP16_MAX:
        return None
    readers = tuple(dict.fromkeys(str(node.name) for node in constant.readers))
    return Extreme(constant.name, value, extent.min, extent.max, int(constant.tensor.size), readers)


def _extent(tensor: ir.TensorProtocol) -> _Extent:
    low, high, nan = math.inf, -math.inf, False
    flat = tensor.numpy().reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        piece = flat[start : start + _CHUNK]
        if piece.dtype not in (np.float32, np.float64):
            piece = piece.astype(np.float32)
        smallest = float(piece.min())
        if math.isnan(smallest):
            nan = True
            piece = piece[~np.isnan(piece)]
            if not piece.size:
                continue
            smallest = float(piece.min())
        low, high = min(low, smallest), max(high, float(piece.max()))
    return _Extent(low, high, nan)


def _constants(model: ir.Model) -> Iterator[_Constant]:
    """Yield floating-point initializers and Constant nodes of all graphs and functions."""
    graphs = [model.graph, *model.graph.subgraphs()]
    for graph in graphs:
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is not None and tensor.dtype.is_floating_point():
                yield _Constant(name, tensor, _readers(value))
    bodies = [*graphs, *model.functions.values()]
    for node in (node for body in bodies for node in body):
        tensor = attribute_tensor(node)
        if tensor is not None and tensor.dtype.is_floating_point():
            readers = tuple(reader for out in node.outputs for reader in _readers(out))
            yield _Constant(str(node.name), tensor, readers)


def _readers(value: ir.Value) -> tuple[ir.Node, ...]:
    return tuple(use.node for use in value.uses())


def attribute_tensor(node: ir.Node) -> ir.TensorProtocol | None:
    """Return the floating-point constant that a node carries as an attribute."""
    if node.op_type == "ConstantOfShape" and "value" in node.attributes:
        return node.attributes["value"].as_tensor()
    if node.op_type != "Constant":
        return None
    if "value" in node.attributes:
        return node.attributes["value"].as_tensor()
    if "value_float" in node.attributes:
        return ir.tensor(np.float32(node.attributes["value_float"].as_float()))
    if "value_floats" in node.attributes:
        return ir.tensor(np.array(node.attributes["value_floats"].as_floats(), np.float32))
    return None
