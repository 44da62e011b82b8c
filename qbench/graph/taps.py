"""Taps: a clone of a graph that also gives the tensors that somebody wants to see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from qbench.errors import ModelError, did_you_mean


@dataclass(frozen=True, slots=True)
class Tapped:
    """A clone with extra outputs.

    Attributes:
        model: The clone: the original outputs first and unchanged, then the taps. Its weights are
            the original's tensors, not copies.
        outputs: Name of the graph output that carries each tapped tensor.
    """

    model: ir.Model
    outputs: Mapping[str, str]


def with_taps(model: ir.Model, tensors: Sequence[str]) -> Tapped:
    """Return a clone of ``model`` whose outputs include ``tensors``.

    A tensor that is a graph output already is not given twice. A tensor that a node computes
    becomes an output under its own name; a graph input or an initializer, which may not be an
    output itself, goes through an ``Identity`` to a free name.

    Args:
        model: The graph; it is not changed.
        tensors: Names of tensors of the main graph; repeated names count once.

    Raises:
        ModelError: If a name is no tensor of the main graph; the message names all such tensors.
    """
    _refuse_unknown(model.graph, tensors)
    clone = model.clone()
    values = _values_by_name(clone.graph)
    taken = set(values) | _names_in_subgraphs(clone.graph)
    outputs = {str(value.name): str(value.name) for value in clone.graph.outputs}
    tapped: dict[str, str] = {}
    for tensor in dict.fromkeys(tensors):
        if tensor not in outputs:
            value = _as_output(clone.graph, values[tensor], taken)
            clone.graph.outputs.append(value)
            outputs[tensor] = str(value.name)
        tapped[tensor] = outputs[tensor]
    return Tapped(clone, tapped)


def free_name(wanted: str, taken: set[str]) -> str:
    """Return ``wanted``, or ``wanted_2``, ``wanted_3``, … if taken; the name is then taken."""
    name, attempt = wanted, 2
    while name in taken:
        name, attempt = f"{wanted}_{attempt}", attempt + 1
    taken.add(name)
    return name


def _as_output(graph: ir.Graph, value: ir.Value, taken: set[str]) -> ir.Value:
    if value.producer() is not None:
        return value
    copy = ir.Value(
        name=free_name(f"{value.name}_tap", taken),
        type=value.type,
        shape=value.shape.copy() if value.shape is not None else None,
    )
    graph.append(ir.Node("", "Identity", [value], outputs=[copy], name=f"{copy.name}_identity"))
    return copy


def _values_by_name(graph: ir.Graph) -> dict[str, ir.Value]:
    values: dict[str, ir.Value] = {}
    for value in _main_values(graph):
        if value.name:
            values[value.name] = value
    return values


def _main_values(graph: ir.Graph) -> Iterable[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _names_in_subgraphs(graph: ir.Graph) -> set[str]:
    names: set[str] = set()
    for inner in graph.subgraphs():
        names.update(str(value.name) for value in _main_values(inner) if value.name)
    return names


def _refuse_unknown(graph: ir.Graph, tensors: Sequence[str]) -> None:
    known = _values_by_name(graph)
    unknown = [name for name in dict.fromkeys(tensors) if name not in known]
    if not unknown:
        return
    inner = _names_in_subgraphs(graph)
    said = [
        repr(name)
        + (" (inside a subgraph of If or Loop)" if name in inner else did_you_mean(name, known))
        for name in unknown
    ]
    raise ModelError(
        f"the graph has no tensor {', '.join(said)} that can be tapped; allowed are the inputs, "
        "initializers and node outputs of the main graph"
    )
