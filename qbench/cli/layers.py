"""``qbench layers``: the layers of a model, and the nodes that are in none."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qbench.cli.answers import Answer, answering
from qbench.cli.options import layer_globs, model_options
from qbench.errors import ModelError

if TYPE_CHECKING:
    from rich.console import Console

    from qbench.records import Layer, Layers

_include, _exclude = layer_globs()


@click.command(
    "layers",
    epilog="""\b
Examples:
  qbench layers model.onnx
  qbench layers sentence-transformers/all-MiniLM-L6-v2 --include '*.query'
  qbench layers ./my-classifier --json
""",
)
@click.argument("model")
@model_options
@_include
@_exclude
@answering()
def command(
    model: str, include: tuple[str, ...], exclude: tuple[str, ...], **options: Any
) -> Answer:
    """List the layers of a model, and the nodes that are in none.

    MODEL is an ONNX file, a Hugging Face folder or hub id, or package:NAME/PATH.
    """
    from qbench.graph.layers import find_layers, select_layers
    from qbench.runtime.loading import LoadOptions, load_model

    given = {key: value for key, value in options.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(model, Path(folder), LoadOptions(**given))
        found = find_layers(loaded.ir)
        if not found.layers:
            raise ModelError(
                f"{model!r} has no layer that could take a lower precision: its "
                f"{len(found.unlayered)} nodes hold no product with a weight, no lookup, no "
                "normalisation"
            )
        chosen = select_layers(found, include, exclude)
        counts = Counter(str(layer.kind) for layer in chosen)
    content = {
        "source": model,
        "sha256": loaded.sha256,
        "counts": dict(counts),
        "layers": list(chosen),
        "unlayered": list(found.unlayered),
    }
    return Answer(content, lambda console: _show(console, chosen, found))


def _show(console: Console, chosen: tuple[Layer, ...], found: Layers) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "kind", "weight", "parameters"):
        table.add_column(
            heading, justify="right" if heading == "parameters" else "left", overflow="fold"
        )
    for layer in chosen:
        shape = " × ".join(str(d) for d in layer.weight_shape)
        uses = f" (×{len(layer.occurrences)})" if len(layer.occurrences) > 1 else ""
        count = f"{layer.parameters:,}" if layer.parameters else ""
        table.add_row(layer.name + uses, str(layer.kind), shape, count)
    console.print(table)
    kinds = Counter(str(layer.kind) for layer in chosen)
    console.print(f"{len(chosen)} layers: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()))
    reasons = Counter(node.reason for node in found.unlayered)
    console.print(f"{len(found.unlayered)} nodes in no layer: ", end="", markup=False)
    console.print(", ".join(f"{n} {reason}" for reason, n in reasons.most_common()), markup=False)
