"""Segments: cutting a graph at the narrow places of its data flow.

A cut is a position in the topological order. What is *live* there is every tensor that was
produced before it and is read at or after it. Replaying a changed layer needs the live tensors
at one cut only, so cuts go where few bytes are live.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import extract

from qbench.records import Layers

#: Metadata key of a segment's output that the whole graph does not give out.
BORDER_KEY = "qbench.border"


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes ``start … stop`` of the topological order, and the tensors that cross its borders.

    Attributes:
        index: Position among the segments.
        nodes: Names of its nodes.
        inputs: Tensors that it reads from before it (graph inputs included).
        outputs: Tensors that it gives and that something after it reads, or graph outputs.
    """

    index: int
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorFact:
    """What one real run told of a tensor: its element type, its rank and its bytes."""

    dtype: str
    rank: int
    nbytes: int


def node_costs(model: ir.Model, facts: Mapping[str, TensorFact]) -> list[float]:
    """Return an estimate of each node's work: bytes it writes times the length of its sums."""
    return [_cost_of(node, facts) for node in model.graph]


def _cost_of(node: ir.Node, facts: Mapping[str, TensorFact]) -> float:
    written = float(sum(_nbytes(v, facts) for v in node.outputs))
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if node.op_type not in ("MatMul", "Gemm", "Conv") or weight is None:
        return written
    if weight.shape is None or weight.const_value is None:
        return written * 64.0  # a product of two activations sums over a head or a sequence
    dims = [int(d) for d in weight.const_value.shape.numpy()]
    if node.op_type == "Conv":
        return written * float(np.prod(dims[1:]))
    transposed = node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1
    return written * float(dims[-1] if transposed else dims[-2] if len(dims) > 1 else dims[-1])


def _nbytes(value: ir.Value | None, facts: Mapping[str, TensorFact]) -> int:
    fact = facts.get(value.name or "") if value is not None else None
    return fact.nbytes if fact else 0


def live_sets(model: ir.Model) -> list[frozenset[str]]:
    """Return the live tensors before each node and after the last: ``len(nodes) + 1`` sets.

    Graph inputs and initializers are never live: a segment can always be given them.
    """
    nodes = list(model.graph)
    produced = {v.name: i for i, n in enumerate(nodes) for v in n.outputs if v.name}
    last_use: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in read_names(node):
            if name in produced:
                last_use[name] = index
    for value in model.graph.outputs:
        if value.name in produced:
            last_use[str(value.name)] = len(nodes)
    sets: list[frozenset[str]] = []
    live: set[str] = set()
    for index, node in enumerate(nodes):
        live = {name for name in live if last_use[name] >= index}
        sets.append(frozenset(live))
        live |= {v.name for v in node.outputs if v.name and last_use.get(v.name, -1) > index}
    sets.append(frozenset(name for name in live if last_use[name] >= len(nodes)))
    return sets


def read_names(node: ir.Node) -> list[str]:
    """Return the tensors that a node reads, those that its subgraphs read from outside included."""
    names = [v.name for v in node.inputs if v is not None and v.name]
    for graph in _subgraphs(node):
        own = {str(v.name) for v in (*graph.inputs, *graph.initializers.values())}
        own |= {str(v.name) for inner in graph for v in inner.outputs}
        read = [name for inner in graph for name in read_names(inner)]
        read += [v.name for v in graph.outputs if v.name]
        names += [name for name in read if name not in own]
    return names


def _subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def inside_layers(model: ir.Model, layers: Layers) -> frozenset[int]:
    """Return the positions that lie strictly inside a layer: a cut there would split it."""
    position = {str(node.name): index for index, node in enumerate(model.graph)}
    inner: set[int] = set()
    for layer in layers.layers:
        for use in layer.occurrences:
            names = [*use.nodes, *(edge.node for edge in use.edges)]
            own = [position[name] for name in names if name in position]
            inner.update(range(min(own) + 1, max(own) + 1) if own else ())
    return frozenset(inner)


def choose_cuts(
    costs: Sequence[float],
    live_bytes: Sequence[float],
    forbidden: Collection[int] = (),
    max_segments: int = 32,
) -> list[int]:
    """Return the positions of cuts, ascending, the ends left out.

    A position qualifies where it is a local minimum of live bytes and at most a quarter wider
    than the narrowest quarter of such minima. Among those that qualify, positions are taken so
    that no segment has less than ``1 / max_segments`` of all work.

    Args:
        costs: Work of each node, shape [nodes].
        live_bytes: Bytes live before each node and after the last, shape [nodes + 1].
        forbidden: Positions where no cut may be.
        max_segments: Most segments to make.
    """
    total = sum(costs) or 1.0
    inner = range(1, len(costs))
    minima = [
        i
        for i in inner
        if live_bytes[i] <= live_bytes[i - 1] and live_bytes[i] <= live_bytes[i + 1]
    ]
    minima = [i for i in minima if live_bytes[i] > 0 and i not in forbidden]
    minima = [i for i in minima if not _has_twin_after(i, live_bytes, minima)]
    if not minima:
        return []
    by_width = sorted(live_bytes[i] for i in minima)
    limit = 1.25 * by_width[len(by_width) // 4]
    done, cuts, before = 0.0, [], 0.0
    position = 0
    for index in minima:
        done += sum(costs[position:index])
        position = index
        if live_bytes[index] > limit or total - done < total / (2 * max_segments):
            continue
        if done - before >= total / max_segments:
            cuts.append(index)
            before = done
    return cuts


def _has_twin_after(index: int, live_bytes: Sequence[float], minima: Collection[int]) -> bool:
    """Whether the next position is a minimum as narrow: the last one of a plateau is taken.

    A normalisation after a sum keeps the width; a cut between the two would split what runtimes
    fuse.
    """
    return index + 1 in minima and live_bytes[index + 1] <= live_bytes[index]


def unknown_borders(live: Sequence[Collection[str]], known: Collection[str]) -> frozenset[int]:
    """Return the positions where something is live that is no plain tensor: no cut may be there.

    Args:
        live: Live tensors before each node and after the last.
        known: Tensors whose element type and rank are known from a run.
    """
    return frozenset(i for i, names in enumerate(live) if any(n not in known for n in names))


def make_segments(model: ir.Model, cuts: Sequence[int]) -> tuple[Segment, ...]:
    """Split the graph's nodes at ``cuts`` into segments with their border tensors.

    Nodes between two cuts that give nothing to anything after them make no segment.
    """
    nodes = list(model.graph)
    borders = [0, *cuts, len(nodes)]
    initializers = set(model.graph.initializers)
    graph_outputs = [v.name for v in model.graph.outputs if v.name]
    last_read = {name: i for i, node in enumerate(nodes) for name in read_names(node)}
    last_read |= dict.fromkeys(graph_outputs, len(nodes))
    segments: list[Segment] = []
    for start, stop in zip(borders, borders[1:], strict=False):
        own = nodes[start:stop]
        made = dict.fromkeys(str(v.name) for n in own for v in n.outputs if v.name)
        reads = dict.fromkeys(name for n in own for name in read_names(n))
        inputs = tuple(r for r in reads if r not in made and r not in initializers)
        outputs = tuple(name for name in made if last_read.get(name, -1) >= stop)
        if outputs:
            names = tuple(str(n.name) for n in own)
            segments.append(Segment(len(segments), names, inputs, outputs))
    return tuple(segments)


def segment_model(model: ir.Model, segment: Segment) -> ir.Model:
    """Return one segment as a model of its own; its weights are shared, its nodes are copies."""
    graph = extract(model.graph, list(segment.inputs), list(segment.outputs))
    graph.opset_imports.update(model.graph.opset_imports)
    given = {v.name for v in model.graph.outputs}
    for value in graph.outputs:
        if value.name not in given:
            value.metadata_props[BORDER_KEY] = "1"
    return ir.Model(graph, ir_version=model.ir_version)
