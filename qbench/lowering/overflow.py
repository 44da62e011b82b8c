"""Layers that fp16 cannot hold: known from their weights and from the ranges that were seen.

Running them does not show it everywhere: ONNX Runtime on a CPU computes fp16 in fp32. Where fp16 is
the high precision such layers are kept in fp32, whatever a plan gives the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx_ir as ir

from qbench.backends import Backend, Variant
from qbench.graph.intermediates import MOVEMENT, implicit_of, nodes_by_name, tensors_of
from qbench.graph.lint import FP16_MAX
from qbench.lowering.constants import is_constant
from qbench.lowering.fp16 import Fp16Lowering
from qbench.lowering.fp32 import mark_wide
from qbench.records import Layer, Layers, Status, TensorRange

#: How many times what calibration saw other data may reach.
ROOM = 2.0


def overflow_of(
    nodes: Mapping[str, ir.Node],
    layer: Layer,
    ranges: Mapping[str, TensorRange],
    room: float = 1.0,
) -> str:
    """Return in words which tensor of a layer passes fp16's largest number, or "".

    Looked at are its edges, what its nodes read and compute, and what lies inside of them.

    Args:
        nodes: The nodes of the main graph by name.
        layer: The layer.
        ranges: What calibration saw, by tensor.
        room: How many times what calibration saw in a tensor other data may reach. What lies
            inside an operator counts as it was seen: most kernels sum it in fp32.
    """
    own = [nodes[name] for name in layer.nodes if name in nodes]
    names = [*tensors_of(layer, nodes), *(item.name for item in implicit_of(layer))]
    names += [name for node in own for value in node.inputs for name in _sources(value)]
    for seen in (ranges[name] for name in dict.fromkeys(names) if name in ranges):
        if seen.absmax * (1.0 if seen.implicit else room) > FP16_MAX:
            what = "an intermediate inside it" if seen.implicit else "its tensor"
            reached = f"{what} {seen.tensor!r} reaches {seen.absmax:.6g}"
            if seen.absmax > FP16_MAX:
                return f"fp16 overflows: {reached}, beyond 65504"
            return f"fp16 may overflow: {reached} on calibration data, and others may pass 65504"
    return ""


def find_overflow(model: ir.Model, layers: Layers, ranges: Iterable[TensorRange]) -> dict[str, str]:
    """Return why fp16 cannot hold a layer, for each layer of which that is so.

    What calibration saw is what some samples reach: a layer that comes within a factor of ``ROOM``
    of fp16's largest number counts too. A weight is known to the last digit.

    Args:
        model: The graph, nothing lowered.
        layers: Its layers.
        ranges: What calibration saw.
    """
    by_tensor = {seen.tensor: seen for seen in ranges}
    nodes = nodes_by_name(model.graph)
    found: dict[str, str] = {}
    for layer in layers.layers:
        refusal = Fp16Lowering().requires(model, layer)
        if refusal is not None and refusal.status is Status.INVALID:
            found[layer.name] = f"fp16 overflows: {refusal.reason}"
        elif words := overflow_of(nodes, layer, by_tensor, ROOM):
            found[layer.name] = words
    return found | _tied(layers, found)


def _tied(layers: Layers, found: Mapping[str, str]) -> dict[str, str]:
    """Return the layers that share a weight with one that was found: it is stored once, in fp32."""
    first = {x.tie: x.name for x in reversed(layers.layers) if x.tie and x.name in found}
    return {
        x.name: f"it shares {x.tie!r} with {first[x.tie]!r}, which fp16 cannot hold"
        for x in layers.layers
        if x.tie in first and x.name not in found
    }


def keep_overflowing(
    model: ir.Model, layers: Layers, ranges: Iterable[TensorRange], backend: Backend
) -> ir.Model:
    """Return a graph in which layers that fp16 cannot hold stay in fp32 when islands are made.

    It is a copy; the graph itself where no layer is such, or the backend makes no islands.
    """
    if backend.variant is not Variant.ISLANDS:
        return model
    found = find_overflow(model, layers, ranges)
    if not found:
        return model
    known, kept = layers.by_name(), model.clone()
    mark_wide(kept, [(known[name], why) for name, why in found.items()])
    return kept


def _sources(value: ir.Value | None) -> Iterator[str]:
    """Yield the names of a tensor and of those that it was moved from."""
    while value is not None and not is_constant(value):
        yield str(value.name)
        node = value.producer()
        if node is None or node.op_type not in MOVEMENT:
            return
        value = node.inputs[0]
