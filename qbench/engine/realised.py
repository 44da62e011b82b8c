"""What the runtime made of an engine: formats read back from its optimised graph."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from qbench.backends import backend_named
from qbench.lowering.edit import LAYER_KEY
from qbench.records import Fallback, Kind, Layers, Plan
from qbench.runtime.ort import SessionSettings, open_session

#: Operators of the optimised graph that show a linear layer really runs in a format.
_PROOF: Mapping[str, frozenset[str]] = {
    "int8": frozenset({"MatMulIntegerToFloat", "QLinearMatMul", "QGemm"}),
    "int8_dynamic": frozenset({"DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulInteger"}),
    "w8a16": frozenset({"MatMulNBits"}),
    "w4a16": frozenset({"MatMulNBits"}),
}


@dataclass(frozen=True, slots=True)
class Realised:
    """What runs.

    Attributes:
        formats: Number of layers by the format that they really run in.
        kernels: Operators of the optimised graph, counted.
        fallbacks: Layers that run in another format than asked.
    """

    formats: Mapping[str, int]
    kernels: Mapping[str, int]
    fallbacks: tuple[Fallback, ...]


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
    optimised = _optimised(path, settings)
    kernels = Counter(_operator(node) for node in optimised.graph.all_nodes())
    seen = _operators_by_layer(graph, optimised)
    kinds = {layer.name: layer.kind for layer in layers.layers}
    high = backend_named(plan.backend).high_precision
    fallbacks: list[Fallback] = []
    formats: Counter[str] = Counter()
    for entry in plan.layers:
        found = seen.get(entry.name, frozenset())
        proof = _PROOF.get(entry.format) if kinds[entry.name] is Kind.LINEAR else None
        if proof is None or not found or found & proof:
            formats[entry.format] += 1
            continue
        formats[high] += 1
        reason = (
            f"the runtime computes it with {', '.join(sorted(found))}: its weight is stored in "
            f"{entry.format} and expanded to {high} before the product"
        )
        fallbacks.append(Fallback(entry.name, entry.format, high, reason))
    return Realised(dict(formats), dict(sorted(kernels.items())), tuple(fallbacks))


def _optimised(path: Path, settings: SessionSettings) -> ir.Model:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "optimised.onnx"
        entries = {
            **settings.entries,
            "session.optimized_model_external_initializers_file_name": "optimised.data",
            "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        }
        saving = replace(settings, entries=entries, optimised_path=target)
        open_session(path, saving).close()
        return ir.load(target)


def _operator(node: ir.Node) -> str:
    return node.op_type


def _operators_by_layer(graph: ir.Model, optimised: ir.Model) -> dict[str, frozenset[str]]:
    """Return the optimised operators that give a tensor which the layer's products gave."""
    products = {"MatMul", "Gemm", "MatMulInteger", "Mul", "Add"}
    owner = {
        str(value.name): node.metadata_props[LAYER_KEY]
        for node in graph.graph
        if node.metadata_props.get(LAYER_KEY) and node.op_type in products
        for value in node.outputs
    }
    found: dict[str, set[str]] = {}
    heavy = frozenset().union(*_PROOF.values()) | {"MatMul", "Gemm", "FusedMatMul", "FusedGemm"}
    for node in optimised.graph.all_nodes():
        if node.op_type not in heavy:
            continue
        for value in node.outputs:
            name = owner.get(str(value.name)) or _owner_by_reader(value, owner)
            if name:
                found.setdefault(name, set()).add(node.op_type)
    return {name: frozenset(ops) for name, ops in found.items()}


def _owner_by_reader(value: ir.Value, owner: Mapping[str, str]) -> str | None:
    """Return the layer of the element-wise node that reads a fused product, if one does."""
    for node, _ in value.uses():
        for output in node.outputs:
            if str(output.name) in owner:
                return owner[str(output.name)]
    return None
