"""The model: an ONNX graph in one normal form, its weights memory-mapped from one data file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qbench.errors import ModelError
from qbench.graph.content import survey
from qbench.graph.reading import read_onnx

MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
CARD_FILE = "model.json"

#: Initializers below this size stay inside the ONNX file: shapes and scalars are read by value.
_EXTERNAL_BYTES = 1024


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a graph.

    Attributes:
        name: Name of the tensor.
        dtype: NumPy name of its element type.
        shape: Its dimensions: a number, a symbol, or ``None`` where unknown.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model in normal form.

    Attributes:
        ir: The graph: unique node and value names, constants as initializers, opset ≥ 21,
            weights memory-mapped from ``folder``.
        folder: Folder with the ONNX file and its external data.
        sha256: Hash of the graph and its weights; names of nodes and tensors count, metadata
            does not.
        source: What the user gave.
        card: Where it came from and what it needs: ``kind`` (``onnx``, ``hf``, ``torch``),
            ``tokenizer``, ``max_length``, ``id2label``, ``export_check`` and the like.
    """

    ir: ir.Model
    folder: Path
    sha256: str
    source: str
    card: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The graph's inputs, initializers left out."""
        return tuple(_spec_of(value) for value in self.ir.graph.inputs)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The graph's outputs."""
        return tuple(_spec_of(value) for value in self.ir.graph.outputs)

    @property
    def output(self) -> str:
        """Name of the one output that tasks score."""
        return str(self.card.get("output") or self.outputs[0].name)

    @property
    def path(self) -> Path:
        """The ONNX file of the normal form."""
        return self.folder / MODEL_FILE


def _spec_of(value: ir.Value) -> TensorSpec:
    dims: tuple[int | str | None, ...] = ()
    if value.shape is not None:
        dims = tuple(d if isinstance(d, int) else d.value for d in value.shape)
    dtype = "float32" if value.dtype is None else str(value.dtype.numpy())
    return TensorSpec(value.name or "", dtype, dims)


def store_model(model: ir.Model, folder: Path, source: str, card: Mapping[str, Any]) -> Model:
    """Write a normal-form graph to ``folder`` and return it with memory-mapped weights.

    The card is written last: a folder without one holds no model.

    Raises:
        ModelError: If a weight holds NaN or infinity, or its bytes do not fit its shape.
        OSError: If the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CARD_FILE).unlink(missing_ok=True)
    strip_traces(model)
    save_graph(model, folder / MODEL_FILE)
    stored = ir.load(folder / MODEL_FILE)
    found = survey(stored)
    if found.damaged:
        raise ModelError(
            f"{source!r} has NaN or infinite weights in {', '.join(found.damaged[:5])}"
            f"{' and others' if len(found.damaged) > 5 else ''}: nothing can be measured; repair "
            "the model"
        )
    return store_card(Model(stored, folder, found.sha256, source), card)


def store_card(model: Model, card: Mapping[str, Any]) -> Model:
    """Write a card beside the stored model and return the model with it."""
    facts = {"source": model.source, "sha256": model.sha256, "card": dict(card)}
    (model.folder / CARD_FILE).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return Model(model.ir, model.folder, model.sha256, model.source, dict(card))


def open_stored(folder: Path) -> Model:
    """Return the model that ``store_model`` wrote to ``folder``.

    Raises:
        ModelError: If the folder holds none, or its files were changed.
    """
    try:
        facts = json.loads((folder / CARD_FILE).read_text(encoding="utf-8"))
        sha256, source, card = facts["sha256"], facts["source"], facts["card"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{str(folder)!r} holds no stored model ({type(error).__name__}: {error}); load the "
            "model again"
        ) from error
    stored = read_onnx(folder / MODEL_FILE)
    if survey(stored).sha256 != sha256:
        raise ModelError(
            f"the stored model in {str(folder)!r} was changed after it was made; delete the folder "
            "and load the model again"
        )
    return Model(stored, folder, sha256, source, card)


def save_graph(model: ir.Model, path: Path) -> None:
    """Write a graph and its external data; weights are streamed, never held as one message."""
    ir.save(
        model,
        path,
        external_data=f"{path.name}.data",
        size_threshold_bytes=_EXTERNAL_BYTES,
    )


def strip_traces(model: ir.Model) -> None:
    """Remove what leaks paths of the exporting machine: stack traces and documentation strings."""
    for node in model.graph.all_nodes():
        node.doc_string = None
        for key in list(node.metadata_props):
            if "stack_trace" in key:
                del node.metadata_props[key]
