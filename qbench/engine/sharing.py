"""Tied weights are stored once where the lowerings of one storage made the same numbers of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from qbench.lowering.edit import LAYER_KEY
from qbench.records import Layers

#: Constants below this many bytes are not worth a node.
_LEAST_BYTES = 64


def share_tied(graph: ir.Model, layers: Layers) -> int:
    """Make tied layers read one constant where theirs are equal or transposed, in place.

    A word table and an output projection that share a weight take one format, and each lowering
    stores its own copy: [V, K] for the lookup, [K, V] for the product. Where the numbers are the
    same the second becomes a transposition of the first, which the runtime folds when it loads.

    Args:
        graph: A lowered graph.
        layers: Layers of the model.

    Returns:
        The bytes that are stored no more.
    """
    groups: dict[str, list[str]] = {}
    for layer in layers.layers:
        if layer.tie:
            groups.setdefault(layer.tie, []).append(layer.name)
    saved = 0
    for names in groups.values():
        made = [_made(graph, name) for name in names]
        kept: list[ir.Value] = []
        for values in made:
            for value in values:
                saved += _share(graph, value, kept)
    return saved


def _made(graph: ir.Model, layer: str) -> list[ir.Value]:
    """Return the larger constants that a layer's lowering stored, or that its nodes read."""
    return [
        value
        for name, value in graph.graph.initializers.items()
        if (name.startswith(f"{layer}/") or _is_read_by(value, layer))
        and value.const_value is not None
        and value.const_value.nbytes >= _LEAST_BYTES
    ]


def _is_read_by(value: ir.Value, layer: str) -> bool:
    return any(use.node.metadata_props.get(LAYER_KEY) == layer for use in value.uses())


def _share(graph: ir.Model, value: ir.Value, kept: list[ir.Value]) -> int:
    """Let the readers of a constant read one that is kept; return the bytes saved."""
    own = value.const_value
    assert own is not None
    for other in kept:
        stored = other.const_value
        assert stored is not None
        if stored.dtype != own.dtype or stored.nbytes != own.nbytes:
            continue
        a, b = _bits(stored), _bits(own)
        if a.shape == b.shape and np.array_equal(a, b):
            _read(graph, value, other)
            return own.nbytes
        if a.ndim == b.ndim == 2 and a.T.shape == b.shape and np.array_equal(a.T, b):
            _read(graph, value, other, perm=(1, 0))
            return own.nbytes
    kept.append(value)
    return 0


def _bits(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return a tensor's numbers so that they compare bit for bit."""
    array = np.ascontiguousarray(tensor.numpy())
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _read(
    graph: ir.Model, value: ir.Value, kept: ir.Value, perm: Sequence[int] | None = None
) -> None:
    readers = list(value.uses())
    source = kept
    if perm is not None:
        first = readers[0].node
        node = ir.node("Transpose", [kept], attributes={"perm": list(perm)})
        node.name = f"{value.name}/shared"
        if LAYER_KEY in first.metadata_props:
            node.metadata_props[LAYER_KEY] = first.metadata_props[LAYER_KEY]
        node.outputs[0].name = f"{value.name}/shared:0"
        node.outputs[0].shape, node.outputs[0].type = value.shape, value.type
        first_in_order = min((use.node for use in readers), key=list(graph.graph).index)
        graph.graph.insert_before(first_in_order, node)
        source = node.outputs[0]
    for use in readers:
        use.node.replace_input_with(use.idx, source)
    graph.graph.initializers.pop(str(value.name))
