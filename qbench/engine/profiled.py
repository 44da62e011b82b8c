"""Whose time a node's time is: the profile of an engine, by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qbench.lowering.edit import LAYER_KEY
from qbench.records import Layers
from qbench.runtime.profiling import NodeTime

#: The name under which the time of nodes in no layer is summed.
REST = ""


def layer_times(
    profile: Sequence[Sequence[Sequence[NodeTime]]], graph: ir.Model, layers: Layers
) -> dict[str, NDArray[np.float64]]:
    """Return each layer's time in every batch, ms, shape [batches]: the best of its repeats.

    A node is its layer's by the layer name in its own: so are the casts, quantizers and
    dequantizers that a lowering inserts. What the runtime itself made (a fused operator, a
    reformat) and named anew belongs to the layer whose node ran before it. Nodes of the graph in
    no layer are summed under ``REST``.

    Args:
        profile: Node times by batch and repeat.
        graph: The engine's labelled graph, as written.
        layers: Layers of the model.
    """
    owner = {str(n.name): n.metadata_props.get(LAYER_KEY, REST) for n in graph.graph.all_nodes()}
    names = sorted((layer.name for layer in layers.layers), key=len, reverse=True)
    found: dict[str, str] = {}
    totals = {name: np.zeros(len(profile)) for name in (*reversed(names), REST)}
    for batch, repeats in enumerate(profile):
        sums = [_sum(run, owner, names, found) for run in repeats]
        for name, total in totals.items():
            total[batch] = min((own.get(name, 0.0) for own in sums), default=0.0)
    return totals


def _sum(
    run: Iterable[NodeTime], owner: dict[str, str], names: Sequence[str], found: dict[str, str]
) -> dict[str, float]:
    sums: dict[str, float] = {}
    before = REST
    for node in run:
        if node.node not in found:
            found[node.node] = owner.get(node.node) or _by_prefix(node.node, names)
        own = found[node.node]
        if not own and node.node not in owner:
            own = before
        before = own or before
        sums[own] = sums.get(own, 0.0) + node.ms
    return sums


def _by_prefix(node: str, names: Sequence[str]) -> str:
    return next((name for name in names if node.startswith(f"{name}/")), REST)
