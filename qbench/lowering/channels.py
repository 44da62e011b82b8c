"""Which axis of a weight is the output channel: from what its operator computes.

Scales a channel belong to the output: the sum that a product takes runs along the other axes, so
a scale along one of those could not be taken out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from qbench.lowering.base import Refusal
from qbench.lowering.constants import constant_of, is_constant
from qbench.lowering.linear import require_float32
from qbench.records import Layer, Status

#: Convolutions whose weight is quantized.
CONVS = ("Conv", "ConvTranspose")


@dataclass(frozen=True, slots=True)
class Channels:
    """A weight and its output-channel axis.

    Attributes:
        weight: As the operator reads it, float32.
        axis: The axis of its output channels, ≥ 0.
    """

    weight: np.ndarray
    axis: int


def channel_axis(
    op_type: str, attributes: Mapping[str, float | int | str], rank: int, operand: int = 1
) -> int:
    """Return the output-channel axis of a constant operand.

    Args:
        op_type: ``MatMul``, ``Gemm``, ``Conv``, ``ConvTranspose`` or ``Gather``.
        attributes: Of the operator: ``transA``, ``transB``, ``axis``.
        rank: Dimensions of the operand.
        operand: Index of the operand; a MatMul or Gemm may have its weight on the left.

    Returns:
        The axis, ≥ 0. A transposed convolution stores the channels of one group on axis 1, and
        groups share their scales; a lookup along an axis gives what lies along the last other one.

    Raises:
        ValueError: If the operator has no such axis.
    """
    last = rank - 1
    match op_type:
        case "MatMul" if rank >= 2:
            return last if operand == 1 else last - 1
        case "Gemm":
            turned = bool(attributes.get("transB" if operand == 1 else "transA", 0))
            return int((operand == 1) != turned)
        case "Conv":
            return 0
        case "ConvTranspose":
            return 1
        case "Gather" if rank >= 2:
            looked_up = int(attributes.get("axis", 0)) % rank
            return last if looked_up != last else last - 1
    raise ValueError(f"{op_type} of rank {rank} has no output-channel axis")


def channels_of(node: ir.Node, weight: np.ndarray) -> Channels:
    """Return a convolution's weight with its output-channel axis."""
    axis = channel_axis(node.op_type, {}, weight.ndim)
    return Channels(weight.astype(np.float32), axis)


def quantize_channels(channels: Channels) -> tuple[np.ndarray, np.ndarray]:
    """Return a weight as int8 with one symmetric scale an output channel.

    Returns:
        The quantized weight, int8 in −127 … 127 of the weight's shape, and the scales, float32
        [channels].
    """
    weight, axis = channels.weight, channels.axis
    others = tuple(i for i in range(weight.ndim) if i != axis)
    scale = np.abs(weight).max(axis=others, keepdims=True) / np.float32(127)
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    quantized = np.clip(np.rint(weight / scale), -127, 127).astype(np.int8)
    return quantized, scale.reshape(-1)


def require_conv(model: ir.Model, layer: Layer) -> Refusal | None:
    """Return why a layer is not a convolution by one float32 constant, or ``None``."""
    odd = {use.op for use in layer.occurrences} - set(CONVS)
    if odd:
        remedy = "give the graph as exported, before a runtime fused its operators"
        reason = f"it is computed by the fused operator {sorted(odd)[0]}"
        return Refusal(Status.NOT_YET, reason, remedy)
    nodes = {str(node.name): node for node in model.graph}
    for name in layer.nodes:
        node = nodes.get(name)
        if node is None or node.op_type not in CONVS:
            continue
        kernel = node.inputs[1]
        if kernel is None or not is_constant(kernel) or constant_of(kernel) is None:
            return Refusal(Status.NOT_APPLICABLE, "its weight is no stored constant")
        refusal = require_float32(kernel)
        if refusal is not None:
            return refusal
    return None
