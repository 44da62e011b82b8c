"""What the runtime made of an engine: formats read back from its optimised graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from qbench.backends import Backend, backend_named
from qbench.lowering.edit import LAYER_KEY
from qbench.records import Fallback, Kind, Layers, Plan
from qbench.runtime.optimised import kernel_name, optimised_graph
from qbench.runtime.ort import SessionSettings
from qbench.runtime.profiling import profile_nodes

#: Operators that multiply by a layer's weight in an engine as written.
_PRODUCTS = frozenset({"MatMul", "Gemm", "MatMulInteger", "MatMulNBits"})


@dataclass(frozen=True, slots=True)
class Realised:
    """What runs.

    Attributes:
        formats: Number of layers by the format that they really run in.
        kernels: Operators of the optimised graph, counted.
        fallbacks: Layers that run in another format than asked.
        casts: Casts that the engine does not have and the runtime inserted.
    """

    formats: Mapping[str, int]
    kernels: Mapping[str, int]
    fallbacks: tuple[Fallback, ...]
    casts: int = 0


def read_realised(
    path: Path, graph: ir.Model, layers: Layers, plan: Plan, settings: SessionSettings
) -> Realised:
    """Let the runtime optimise an engine and read the formats back from what it saved.

    Args:
        path: The engine's file.
        graph: The engine's labelled graph, as written.
        layers: Layers of the model.
        plan: The plan that was built.
        settings: The plan's session settings.
    """
    optimised = optimised_graph(path, settings)
    kernels = Counter(kernel_name(node) for node in optimised.graph.all_nodes())
    backend = backend_named(plan.backend)
    seen = _operators_by_layer(graph, optimised, _heavy(backend))
    kinds = {layer.name: layer.kind for layer in layers.layers}
    high = backend.high_precision
    fallbacks: list[Fallback] = []
    formats: Counter[str] = Counter()
    for entry in plan.layers:
        found = seen.get(entry.name, frozenset())
        proof = _proof(backend, kinds[entry.name], entry.format)
        if not proof or (found and found <= proof):
            formats[entry.format] += 1
            continue
        formats[high] += 1
        fallbacks.append(Fallback(entry.name, entry.format, high, _why(entry.format, high, found)))
    own = {str(node.name) for node in graph.graph.all_nodes()}
    casts = sum(
        node.op_type == "Cast" and str(node.name) not in own for node in optimised.graph.all_nodes()
    )
    return Realised(dict(formats), dict(sorted(kernels.items())), tuple(fallbacks), casts)


def node_providers(
    path: Path, settings: SessionSettings, feeds: Mapping[str, np.ndarray]
) -> dict[str, int]:
    """Return how many nodes each execution provider really ran for a batch.

    A provider that cannot run a node leaves it to another without a word: this counts them.
    """
    ((nodes,),) = profile_nodes(path, settings, [feeds], repeats=1)
    counts = Counter(node.provider for node in nodes)
    return dict(sorted(counts.items()))


def _proof(backend: Backend, kind: Kind, format_name: str) -> frozenset[str]:
    """Return the operators that show a layer really runs in a format; none where none can."""
    support = backend.support(format_name)
    return support.proof if support is not None and kind is Kind.LINEAR else frozenset()


def _heavy(backend: Backend) -> frozenset[str]:
    """Return the operators that may multiply by a layer's weight in an optimised graph."""
    proofs = [support.proof for support in backend.supports]
    return frozenset[str]().union(*proofs) | {"MatMul", "Gemm", "FusedMatMul", "FusedGemm"}


def _why(asked: str, high: str, found: frozenset[str]) -> str:
    if not found:
        return f"no operator of the runtime's optimised graph shows that it is computed in {asked}"
    return (
        f"the runtime computes it with {', '.join(sorted(found))}: its weight is stored in {asked} "
        f"and expanded to {high} before the product"
    )


def _operators_by_layer(
    graph: ir.Model, optimised: ir.Model, heavy: frozenset[str]
) -> dict[str, frozenset[str]]:
    """Return the operators of the optimised graph that compute each layer's products.

    A fused operator keeps the name of the product that it grew from, or the name of the tensor
    that it gives; or else what reads it gives a tensor of the layer.
    """
    own = [n for n in graph.graph if n.metadata_props.get(LAYER_KEY)]
    products = {str(n.name): n.metadata_props[LAYER_KEY] for n in own if n.op_type in _PRODUCTS}
    tensors = {
        str(value.name): node.metadata_props[LAYER_KEY]
        for node in own
        if node.op_type in _PRODUCTS | {"Mul", "Add"}
        for value in node.outputs
    }
    found: dict[str, set[str]] = {}
    for node in optimised.graph.all_nodes():
        operator = kernel_name(node)
        if operator not in heavy:
            continue
        name = products.get(str(node.name)) or _owner_by_tensor(node.outputs[0], tensors)
        if name:
            found.setdefault(name, set()).add(operator)
    return {name: frozenset(ops) for name, ops in found.items()}


def _owner_by_tensor(value: ir.Value, owner: Mapping[str, str]) -> str | None:
    """Return the layer of a tensor, or of the tensors that its readers give."""
    given = [value, *(output for node, _ in value.uses() for output in node.outputs)]
    return next((owner[str(v.name)] for v in given if str(v.name) in owner), None)
