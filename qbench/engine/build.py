"""Building an engine: the plan and the model in, a mixed-precision ONNX file out.

Same plan, same model, same bytes: nothing of the machine, the time or the folder goes in.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from qbench.backends import Backend, Variant, applicability, backend_named
from qbench.engine.sharing import share_tied
from qbench.errors import PlanError, unknown_name
from qbench.graph.content import drop_weights, release_weights
from qbench.graph.model import Model, save_graph
from qbench.graph.shapes import infer_shapes
from qbench.lowering import lowering_for, unusable_clips
from qbench.lowering.edit import LAYER_KEY
from qbench.lowering.faults import quantizer_faults
from qbench.lowering.fp32 import mark_wide
from qbench.lowering.islands import make_islands
from qbench.lowering.rounding import rewritten_in
from qbench.lowering.smooth import Readers, readers_of
from qbench.lowering.treated import treated
from qbench.records import Layer, Layers, Plan, PlanLayer, Rewritten, Status
from qbench.remedies import in_use

ENGINE_FILE = "engine.onnx"


def lower_graph(model: ir.Model, layers: Layers, plan: Plan) -> ir.Model:
    """Return a copy of the graph with every layer in the format that the plan gives it.

    Raises:
        PlanError: If a layer cannot take its format; the message says why.
    """
    graph = model.clone()
    high = backend_named(plan.backend).high_precision
    by_name = layers.by_name()
    for entry in plan.layers:
        if entry.name not in by_name:
            raise PlanError(unknown_name("layer", entry.name, by_name))
    if any(e.format != high for e in plan.layers):
        infer_shapes(graph)
    backend = backend_named(plan.backend)
    entries = {entry.name: entry for entry in plan.layers}
    for layer in layers.layers:  # in the model's order, whatever the plan's
        asked = entries.get(layer.name)
        if asked is not None and not _is_kept(asked.format, backend):
            readers = readers_of(layer, layers, plan, high) if in_use(asked) else None
            _lower(graph, layer, asked, backend, readers)
    if backend.variant is Variant.ISLANDS:
        _check_halves(graph, layers, {name for name, e in entries.items() if e.format == "fp16"})
        wide = [x for x in layers.layers if x.name in entries and entries[x.name].format == "fp32"]
        mark_wide(graph, [(layer, "planned") for layer in wide])
        formats = {layer.name: high for layer in layers.layers} | plan.formats()
        make_islands(graph, layers, formats, whole=high == "fp16")
    common_passes.RemoveUnusedNodesPass()(graph)
    share_tied(graph, layers)
    faults = () if backend.contrib else quantizer_faults(graph)
    if faults:
        raise PlanError(f"{backend.name} would misread the graph: {'; '.join(faults[:3])}")
    return graph


def _check_halves(graph: ir.Model, layers: Layers, names: set[str]) -> None:
    """Refuse layers whose weights fp16 cannot hold, before they are made islands."""
    for layer in layers.layers:
        refusal = lowering_for("fp16").requires(graph, layer) if layer.name in names else None
        if refusal is not None and refusal.status is Status.INVALID:
            raise PlanError(f"layer {layer.name!r} cannot be fp16: {refusal.reason}")


def _is_kept(format_name: str, backend: Backend) -> bool:
    """Whether a layer is left alone until islands are made: the floats that need no Q/DQ."""
    floats = ("fp16", "fp32") if backend.variant is Variant.ISLANDS else ()
    return format_name in (backend.high_precision, *floats)


def _lower(
    graph: ir.Model, layer: Layer, entry: PlanLayer, backend: Backend, readers: Readers | None
) -> None:
    """Give one layer its format in place, or raise ``PlanError`` with its name and the reason."""
    status, reason = applicability(layer.kind, entry.format, backend)
    if status is not Status.OK:
        raise PlanError(f"layer {entry.name!r} cannot be {entry.format}: {reason}")
    plain = lowering_for(entry.format, entry.block, backend)
    lowering = treated(plain, in_use(entry), readers)
    refusal = lowering.requires(graph, layer)
    if refusal is not None:
        raise PlanError(f"layer {entry.name!r} cannot be {entry.format}: {refusal.reason}")
    unusable = unusable_clips(layer, entry.clips) if lowering.format.needs_range else {}
    if unusable:
        why = "; ".join(f"{tensor!r} {words}" for tensor, words in unusable.items())
        raise PlanError(f"layer {entry.name!r} cannot be {entry.format}: {why}")
    lowering.apply(graph, layer, entry.clips)
    release_weights(graph)
    wrong = lowering.ensures(graph, layer)
    if wrong:
        raise PlanError(f"layer {entry.name!r} did not become {entry.format}: {wrong}")


def label_nodes(model: ir.Model, layers: Layers) -> None:
    """Put layer names into the names of nodes and of the tensors that they give, in place.

    Graph inputs and outputs keep their names.
    """
    owner = {name: layer for layer in layers.layers for name in layer.nodes}
    taken = {str(node.name) for node in model.graph} | set(model.graph.initializers)
    taken |= {str(v.name) for node in model.graph.all_nodes() for v in node.outputs}
    taken |= {str(v.name) for v in model.graph.inputs}
    for node in model.graph:
        layer = owner.get(str(node.name))
        if layer is None or LAYER_KEY in node.metadata_props:
            continue
        node.metadata_props[LAYER_KEY] = layer.name
        node.name = _free(f"{layer.name}/{node.op_type}", taken)
        for index, value in enumerate(node.outputs):
            if not value.is_graph_output() and value.name:
                value.name = _free(f"{node.name}:{index}", taken)


def _free(stem: str, taken: set[str]) -> str:
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}_{number}"
    taken.add(name)
    return name


def write_engine(
    model: Model, layers: Layers, plan: Plan, plan_sha256: str, folder: Path
) -> tuple[Path, ir.Model]:
    """Build the plan's engine into ``folder`` and return its file and its graph, as stored.

    Raises:
        PlanError: If a layer cannot take its format.
    """
    graph = lower_graph(model.ir, layers, plan)
    label_nodes(graph, layers)
    _forget(graph)
    graph.metadata_props["qbench.plan_sha256"] = plan_sha256
    graph.metadata_props["qbench.model_sha256"] = model.sha256
    graph.producer_name, graph.producer_version = "qbench", "1"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ENGINE_FILE
    save_graph(graph, path)
    drop_weights(graph)
    return path, ir.load(path)  # its weights are mapped: what was lowered need not stay in memory


def _forget(graph: ir.Model) -> None:
    """Remove all that says where a graph comes from: remarks, and metadata but layer names."""
    things: list[Any] = [graph, graph.graph, *graph.graph.inputs]
    things += graph.graph.initializers.values()
    for node in graph.graph.all_nodes():
        things += [node, *node.outputs]
    for thing in things:
        thing.doc_string = None
        layer = thing.metadata_props.get(LAYER_KEY)
        thing.metadata_props.clear()
        if layer is not None:
            thing.metadata_props[LAYER_KEY] = layer


def _files_of(path: Path) -> list[Path]:
    return [file for file in (path, path.with_name(f"{path.name}.data")) if file.is_file()]


def file_bytes(path: Path) -> int:
    """Return the bytes of an ONNX file together with its external data."""
    return sum(file.stat().st_size for file in _files_of(path))


def file_facts(path: Path) -> tuple[int, str]:
    """Return the bytes and the sha256 of an ONNX file together with its external data."""
    digest, size = hashlib.sha256(), 0
    for file in _files_of(path):
        size += file.stat().st_size
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    return size, digest.hexdigest()


def rewritten_constants(layers: Layers, plan: Plan) -> tuple[Rewritten, ...]:
    """Return the constants of masks that the plan's engine takes as the least of a format."""
    known = layers.by_name()
    return tuple(
        item
        for entry in plan.layers
        if entry.name in known
        for item in rewritten_in(known[entry.name], entry.format)
    )


def asked_formats(plan: Plan) -> dict[str, int]:
    """Return the number of layers by format."""
    counts: dict[str, int] = {}
    for entry in plan.layers:
        counts[entry.format] = counts.get(entry.format, 0) + 1
    return counts
