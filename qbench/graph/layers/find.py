"""Finding the layers of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from qbench.graph.layers.activations import find_activations
from qbench.graph.layers.attention import find_attention
from qbench.graph.layers.found import Claims, Found, name_of
from qbench.graph.layers.groups import Owners, group_uses, tied_names
from qbench.graph.layers.names import Namer
from qbench.graph.layers.norms import find_norms
from qbench.graph.layers.reasons import explain
from qbench.graph.layers.residuals import find_residuals
from qbench.graph.layers.softmaxes import find_softmaxes
from qbench.graph.layers.view import View
from qbench.graph.layers.weights import find_weighted
from qbench.graph.masks import mark_masks
from qbench.records import Layer, Layers


def find_layers(model: ir.Model) -> Layers:
    """Return every layer of a graph, and every node that is in none with the reason.

    Structure alone decides what is a layer; names come from metadata, weights and nodes. The
    graph is not changed, and no weight is read but constants of fewer than 4096 elements and
    what is added, picked or scaled as a mask.

    Args:
        model: A graph with unique node names and unique value names.

    Returns:
        Layers in topological order of their first use.
    """
    view = View(model)
    claims = Claims()
    for finder in (
        find_norms,
        find_softmaxes,
        find_activations,
        find_weighted,
        find_attention,
        find_residuals,
    ):
        finder(view, claims)
    groups = group_uses(view, claims)
    namer = Namer(view, Owners(view, claims), groups)
    named = [(*namer.name(uses[0]), uses) for uses in groups]
    ties = tied_names((name, uses[0]) for name, _, uses in named)
    layers = tuple(
        replace(_layer(name, module, uses), tie=ties.get(name, "")) for name, module, uses in named
    )
    return Layers(mark_masks(model, layers), explain(view, claims))


def _layer(name: str, module: str, uses: Sequence[Found]) -> Layer:
    first = uses[0]
    tensor = None if first.weight is None else first.weight.tensor
    parameters = sum(
        origin.tensor.size for origin in (first.weight, first.bias) if origin is not None
    )
    return Layer(
        name=name,
        kind=first.kind,
        occurrences=tuple(use.occurrence() for use in uses),
        module=module,
        weight="" if first.weight is None else name_of(first.weight.value),
        weight_shape=() if tensor is None else tuple(int(n) for n in tensor.shape.numpy()),
        weight_bytes=0 if tensor is None else tensor.nbytes,
        parameters=parameters,
    )
