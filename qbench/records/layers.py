"""What a model is made of: layers, their occurrences, and nodes in none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What a layer is."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    CONV = "conv"
    LAYERNORM = "layernorm"
    SOFTMAX = "softmax"
    ATTENTION_SCORES = "attention_scores"
    ATTENTION_CONTEXT = "attention_context"
    KV = "kv"
    ACTIVATION = "activation"
    RESIDUAL_ADD = "residual_add"


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor edge that carries a format: input ``index`` of node ``node`` reads ``tensor``."""

    node: str
    index: int
    tensor: str


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask's fill that reaches a layer: a constant that fp16 cannot hold.

    Attributes:
        tensor: The tensor of the layer that carries it.
        constant: Name of the initializer, or of the node that holds the constant.
        value: Its element of largest magnitude.
        guarded: Whether rows that are nothing but fill are caught behind the layer (by IsNaN).
    """

    tensor: str
    constant: str
    value: float
    guarded: bool = False

    @property
    def kept(self) -> bool:
        """Whether it stays as it is: an infinity, with rows of nothing else caught behind."""
        return self.guarded and math.isinf(self.value)


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One use of a layer in the graph.

    Attributes:
        op: Canonical operator (``MatMul``, ``Gemm``, ``Gather``, ``Conv``, ``LayerNormalization``,
            ``RMSNormalization``, ``Softmax``, ``Gelu``, ``Add``, ``Identity`` for ``kv``, or the
            operator's own name). A decomposed pattern has the operator that it spells out.
        nodes: Names of the nodes that compute it, in topological order.
        inputs: Tensors that the canonical operator reads, in its order; absent ones are "".
        output: The tensor that it gives; the local error is measured there.
        attributes: Attributes of the canonical operator.
        edges: Tensor edges that carry the layer's format.
    """

    op: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    output: str
    edges: tuple[Edge, ...] = ()
    attributes: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layer:
    """A named group of graph nodes that takes one format.

    Attributes:
        name: Unique name, a module path where the graph tells one.
        kind: What it is.
        occurrences: Its uses; more than one where a model shares a layer.
        module: Module path from the exporter, or "".
        weight: Name of the weight initializer, or "".
        weight_shape: Shape of the weight as stored.
        weight_bytes: Bytes of the weight as stored.
        parameters: Number of weight and bias elements.
        tie: Name shared by layers whose weight is one storage, or "".
        masks: Fills of masks that reach it, beyond what fp16 can hold.
    """

    name: str
    kind: Kind
    occurrences: tuple[Occurrence, ...]
    module: str = ""
    weight: str = ""
    weight_shape: tuple[int, ...] = ()
    weight_bytes: int = 0
    parameters: int = 0
    tie: str = ""
    masks: tuple[Mask, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes of the layer."""
        return tuple(node for use in self.occurrences for node in use.nodes)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All tensor edges that carry the layer's format."""
        return tuple(edge for use in self.occurrences for edge in use.edges)


@dataclass(frozen=True, slots=True)
class Unlayered:
    """A node that belongs to no layer, and why."""

    node: str
    op: str
    reason: str


@dataclass(frozen=True, slots=True)
class Layers:
    """Every layer of a graph in topological order, and every node that is in none."""

    layers: tuple[Layer, ...]
    unlayered: tuple[Unlayered, ...]

    def by_name(self) -> dict[str, Layer]:
        """Return the layers by name."""
        return {layer.name: layer for layer in self.layers}
