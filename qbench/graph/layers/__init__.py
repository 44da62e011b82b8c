"""The layers of a graph: named groups of nodes that take one format each."""

from __future__ import annotations

from qbench.graph.layers.find import find_layers
from qbench.graph.layers.select import match_layers, select_layers

__all__ = ["find_layers", "match_layers", "select_layers"]
