"""What calibration looks at: the tensors of each layer, and quantities computed from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from qbench.calibration.layout import Array, Layout
from qbench.graph.intermediates import (
    Implicit,
    Quantity,
    implicit_of,
    nodes_by_name,
    tensors_of,
)
from qbench.graph.lint import FP16_MAX
from qbench.records import Kind, Layers


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to observe.

    Attributes:
        name: Name of its range: the tensor's, or the implicit intermediate's.
        source: The tensor that is tapped.
        layer: The layer whose edge it is; else the layer that computes it.
        implicit: How it is computed from the tensor, where it is not the tensor itself.
        scores: Whether a softmax reads or computes it, or a mask's fill reaches it; what a mask
            filled in is then no value.
    """

    name: str
    source: str
    layer: str
    implicit: Implicit | None = None
    scores: bool = False

    def quantity_of(self, values: Array, layout: Layout) -> tuple[Array, Layout]:
        """Return what is observed, and its layout, given the values of the tapped tensor.

        Scores below −65504 become infinite, and so count apart: causal and padding masks fill in
        such numbers, and as an exponent they are zero in any format.
        """
        if self.implicit is not None:
            return _implicit_values(self.implicit, values, layout)
        if self.scores:
            values = np.where(values < -FP16_MAX, values.dtype.type(-np.inf), values)
        return values, layout


def targets_of(model: ir.Model, layers: Layers) -> tuple[Target, ...]:
    """Return what to observe, in the order of the layers, each tensor once."""
    nodes = nodes_by_name(model.graph)
    weights = set(model.graph.initializers)
    owners: dict[str, str] = {}
    for layer in layers.layers:
        for edge in layer.edges:
            owners.setdefault(edge.tensor, layer.name)
    scores = {
        tensor
        for layer in layers.layers
        if layer.kind is Kind.SOFTMAX
        for tensor in tensors_of(layer, nodes)
    } | {mask.tensor for layer in layers.layers for mask in layer.masks}
    found: dict[tuple[str, str], Target] = {}
    for layer in layers.layers:
        for tensor in tensors_of(layer, nodes):
            if tensor not in weights:
                owner = owners.get(tensor, layer.name)
                target = Target(tensor, tensor, owner, scores=tensor in scores)
                found.setdefault((tensor, tensor), target)
        for item in implicit_of(layer):
            target = Target(item.name, item.source, layer.name, item)
            found.setdefault((item.name, item.source), target)
    return tuple(found.values())


def _implicit_values(implicit: Implicit, values: Array, layout: Layout) -> tuple[Array, Layout]:
    wide = values.astype(np.float64)
    if implicit.quantity is Quantity.CUBE:
        return wide**3, layout
    first = implicit.axis % wide.ndim
    axes = tuple(range(first, wide.ndim))
    if implicit.centred:
        wide -= wide.mean(axis=axes, keepdims=True)
    return np.square(wide).sum(axis=axes), layout[:first]
