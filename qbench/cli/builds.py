"""Which formats a backend's builder really builds here, tried on a tiny encoder."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path

from qbench.backends import BACKENDS, Kernel
from qbench.errors import QbenchError

#: Clipping magnitude of the tiny model's activations: only building is tried.
_CLIP = 8.0


@functools.cache
def refused_formats(backend_name: str) -> Mapping[str, str]:
    """Return why each format of a backend does not build; "" where it does.

    One engine holds all formats at once; where it does not build, each is tried alone.
    """
    formats = BACKENDS[backend_name].formats
    if not _refusal(backend_name, formats):
        return dict.fromkeys(formats, "")
    return {name: _refusal(backend_name, (name,)) for name in formats}


def _refusal(backend_name: str, formats: tuple[str, ...]) -> str:
    from qbench.engine.build import label_nodes, lower_graph
    from qbench.engine.shapes import Sizes, profile_of
    from qbench.engine.tensorrt import refusal_words
    from qbench.graph.layers import find_layers
    from qbench.graph.model import TensorSpec, save_graph
    from qbench.records import Plan, PlanLayer
    from qbench.runtime.tensorrt import build_serialized
    from qbench.testing.graphs import tiny_encoder

    backend, model = BACKENDS[backend_name], tiny_encoder(layers=1, hidden=64)
    layers = find_layers(model)
    rows = []
    for index, layer in enumerate(layers.layers):
        offered = [f for f in formats if backend.kernel(layer.kind, f) is not Kernel.NONE]
        form = offered[index % len(offered)] if offered else backend.high_precision
        clips = {edge.tensor: _CLIP for edge in layer.edges}
        rows.append(PlanLayer(layer.name, layer.kind, form, clips=clips))
    inputs = tuple(
        TensorSpec(name, "int64", ("batch", "sequence")) for name in ("input_ids", "attention_mask")
    )
    sizes = {"batch": Sizes(1, 2, 4), "sequence": Sizes(2, 8, 16)}
    try:
        graph = lower_graph(model, layers, Plan(1, backend_name, "", "0" * 64, tuple(rows)))
        label_nodes(graph, layers)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tiny.onnx"
            save_graph(graph, file)
            profile = profile_of(inputs, sizes)
            outcome = build_serialized(file, Path(folder) / "tiny.plan", backend, profile)
    except QbenchError as error:
        return str(error)
    if outcome.missing:
        return outcome.missing
    return refusal_words(outcome.problems, graph, backend) if outcome.problems else ""
