"""Faults of quantized graphs that parsers let pass: wrong axes, wrong lengths, unsigned zeros.

A backend that reads Q/DQ alone (``contrib`` is false) builds such a graph without a word and
computes other numbers, or fails long after.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from qbench.lowering.channels import channel_axis
from qbench.lowering.constants import tensor_of

_QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})
#: Operators that compute on integers: such a backend makes them itself, out of pairs.
_INTEGER = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeLinear",
        "MatMulInteger",
        "QLinearConv",
        "QLinearMatMul",
    }
)
_SIGNED = frozenset({ir.DataType.INT8, ir.DataType.INT4, ir.DataType.FLOAT8E4M3FN})
#: Operators through which a weight keeps its axes.
_SAME_AXES = frozenset({"Cast", "Identity"})


def quantizer_faults(model: ir.Model) -> tuple[str, ...]:
    """Return what is wrong with the quantizers of a graph, in words, in its order.

    Scales must be as long as the axis that they are for, and that axis the output channel of the
    product that reads them; scales in blocks must cover their axis; zero points must be signed;
    nothing but QuantizeLinear and DequantizeLinear may compute on integers.
    """
    return tuple(fault for node in model.graph.all_nodes() for fault in _faults(node))


def _faults(node: ir.Node) -> Iterator[str]:
    name = f"{node.op_type} {node.name!r}"
    if node.domain:
        yield f"{name} is of the domain {node.domain!r}, which the backend does not read"
    elif node.op_type in _INTEGER:
        yield f"{name} computes on integers; the backend reads Q/DQ pairs"
    elif node.op_type in _QUANTIZERS:
        faults = (*_type_faults(node), *_zero_faults(node), *_scale_faults(node))
        yield from (f"{name}: {what}" for what in faults)


def _type_faults(node: ir.Node) -> Iterator[str]:
    """Yield where a dequantizer reads integers that the backend cannot import, such as UINT4."""
    data = node.inputs[0]
    if node.op_type != "DequantizeLinear" or data is None or data.dtype is None:
        return
    if data.dtype not in _SIGNED:
        yield f"it reads {data.dtype.name}; allowed: {', '.join(sorted(_names()))}"


def _zero_faults(node: ir.Node) -> Iterator[str]:
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    if zero is None:
        if node.op_type == "QuantizeLinear" and not node.attributes.get_int("output_dtype", 0):
            yield "it has no zero point, and so gives UINT8; write an int8 0"
        return
    if zero.dtype is not None and zero.dtype not in _SIGNED:
        yield f"its zero point is {zero.dtype.name}; allowed: {', '.join(sorted(_names()))}"
    tensor = tensor_of(zero)
    if tensor is not None and tensor.numpy().astype(float).any():
        yield "its zero point is not 0; the backend is symmetric"


def _names() -> list[str]:
    return [dtype.name for dtype in _SIGNED]


def _scale_faults(node: ir.Node) -> Iterator[str]:
    data, scale = node.inputs[0], node.inputs[1]
    tensor = None if scale is None else tensor_of(scale)
    if data is None or tensor is None or data.shape is None:
        return
    shape, scales = data.shape, [int(n) for n in tensor.shape.numpy()]
    rank, block = len(shape), node.attributes.get_int("block_size", 0)
    axis = node.attributes.get_int("axis", 1)
    axis = axis + rank if axis < 0 else axis
    if block:
        yield from _block_faults(list(shape), scales, axis, block)
    elif len(scales) == 1 and not (scales[0] == 1 and rank == 1):
        if not 0 <= axis < rank:
            yield f"its axis {axis} is none of the {rank} axes of what it reads"
            return
        if isinstance(shape[axis], int) and shape[axis] != scales[0]:
            yield f"it has {scales[0]} scales for axis {axis}, which is {shape[axis]} long"
        yield from _channel_faults(node, axis, rank)


def _block_faults(
    shape: list[int | ir.SymbolicDim], scales: list[int], axis: int, block: int
) -> Iterator[str]:
    if len(scales) != len(shape) or not 0 <= axis < len(shape):
        yield f"its scales have {len(scales)} axes, and what it reads has {len(shape)}"
        return
    for index, (length, given) in enumerate(zip(shape, scales, strict=True)):
        if not isinstance(length, int):
            continue
        if index != axis:
            wanted = length
        elif length % block:
            yield f"blocks of {block} do not divide axis {axis}, which is {length} long"
            continue
        else:
            wanted = length // block
        if given != wanted:
            yield f"its scales are {given} long on axis {index}; blocks of {block} want {wanted}"


def _channel_faults(node: ir.Node, axis: int, rank: int) -> Iterator[str]:
    """Yield where scales a channel lie along an axis that a product sums over."""
    if node.op_type != "DequantizeLinear":
        return
    for reader, index in _readers(node.outputs[0]):
        attributes = {k: a.value for k, a in reader.attributes.items()}
        known = {k: v for k, v in attributes.items() if isinstance(v, (int, float, str))}
        try:
            wanted = channel_axis(reader.op_type, known, rank, index)
        except ValueError:
            continue
        if wanted != axis:
            yield (
                f"its scales lie along axis {axis}, and the output channels of {reader.op_type} "
                f"{reader.name!r} along axis {wanted}"
            )


def _readers(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    for reader, index in value.uses():
        if reader.op_type in _SAME_AXES:
            yield from _readers(reader.outputs[0])
        elif reader.op_type in ("MatMul", "Gemm", "Conv", "ConvTranspose"):
            yield reader, index
