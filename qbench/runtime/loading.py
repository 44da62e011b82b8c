"""Loading a model from wherever it is: hub id, folder, installed package, ONNX file, torch module.

What comes out is always the same: a graph in normal form with memory-mapped weights, checked
against torch where torch exported it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from qbench.backends import BACKENDS
from qbench.errors import ModelError, did_you_mean
from qbench.graph.export import POOLINGS, Exported, HeadOptions, export_hf, export_module
from qbench.graph.model import Model, normalise, read_onnx, store_model
from qbench.graph.pooling import add_pooling
from qbench.runtime.ort import open_session, settings_for

#: Largest difference between torch and the exported graph, relative to the largest output.
EXPORT_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class LoadOptions:
    """What a model source leaves open.

    Attributes:
        head: ``embedding``, ``classification``, ``output`` (whatever it gives, one output) or
            ``any`` (nothing is scored: several outputs are fine).
        pooling: Pooling of hidden states, or ``None`` for the model's own.
        normalize: Whether embeddings are scaled to length 1; ``None`` for the model's own.
        output: The output of an ONNX file that is scored.
        tokenizer: Folder or callable that turns texts into token ids.
        max_length: Longest text in tokens.
        revision: Revision of a hub model.
        trust_remote_code: Whether code that comes with a model may run.
        samples: Feeds of real samples, used for export and its check.
    """

    head: str = "any"
    pooling: str | None = None
    normalize: bool | None = None
    output: str | None = None
    tokenizer: str | None = None
    max_length: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    samples: Mapping[str, np.ndarray] = field(default_factory=dict)


def resolve_source(source: str) -> str:
    """Return a source with ``package:NAME/PATH`` replaced by the installed folder.

    Raises:
        ModelError: If the package is not installed or has no such path.
    """
    if not source.startswith("package:"):
        return source
    name, _, inner = source.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"package {name!r} is not installed; pip install {name.replace('_', '-')} "
            "(the demo's packages: pip install 'qbench[demo]')"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / inner
    if not path.exists():
        raise ModelError(f"package {name!r} has no {inner!r}")
    return str(path)


def load_model(source: Any, folder: Path, options: LoadOptions | None = None) -> Model:
    """Load a model, bring it to the normal form, check it and store it in ``folder``.

    Args:
        source: Hub id, local folder, ``package:NAME/PATH``, ONNX file, or ``torch.nn.Module``
            (``options.samples`` are then its keyword inputs).
        folder: Where the normal form is written.
        options: What the source leaves open.

    Raises:
        ModelError: If it cannot be loaded, exported or normalised; if a choice is missing; if
            torch and the graph disagree; if a weight is NaN.
    """
    options = options or LoadOptions()
    if not isinstance(source, str | Path):
        return _load_module(source, folder, options)
    text = resolve_source(str(source))
    if Path(text).suffix.lower() == ".onnx" or Path(text).is_file():
        return _load_onnx(Path(text), str(source), folder, options)
    head = HeadOptions(
        _head_of(Path(text), options.head),
        options.pooling,
        options.normalize,
        options.revision,
        options.trust_remote_code,
    )
    exported = export_hf(text, head, options.samples)
    card = dict(exported.card)
    if options.tokenizer:
        card["tokenizer"] = options.tokenizer
    if options.max_length:
        card["max_length"] = min(options.max_length, card.get("max_length") or options.max_length)
    return _store_exported(exported, card, str(source), folder)


def _head_of(folder: Path, head: str) -> str:
    """Return what a Hugging Face model gives where the task does not say."""
    if head in ("embedding", "classification"):
        return head
    config = folder / "config.json"
    words = config.read_text(encoding="utf-8") if config.is_file() else ""
    return "classification" if "ForSequenceClassification" in words else "embedding"


def _load_module(module: Any, folder: Path, options: LoadOptions) -> Model:
    if not hasattr(module, "forward") or not options.samples:
        raise ModelError(
            f"got {type(module).__name__}; give a path, a hub id, or a torch.nn.Module with "
            "samples=... (its keyword inputs as arrays)"
        )
    exported = export_module(module, options.samples)
    card = {**exported.card, "tokenizer": options.tokenizer, "max_length": options.max_length}
    return _store_exported(exported, card, type(module).__name__, folder)


def _store_exported(exported: Exported, card: dict[str, Any], source: str, folder: Path) -> Model:
    graph = normalise(exported.graph)
    model = store_model(graph, folder, source, card)
    check = check_export(model, exported)
    return store_card(model, {**card, "export_check": check})


def store_card(model: Model, card: Mapping[str, Any]) -> Model:
    """Write a changed card beside the stored model and return the model with it."""
    import json

    from qbench.graph.model import CARD_FILE

    facts = {"source": model.source, "sha256": model.sha256, "card": dict(card)}
    (model.folder / CARD_FILE).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return Model(model.ir, model.folder, model.sha256, model.source, dict(card))


def check_export(model: Model, exported: Exported) -> dict[str, float]:
    """Run the exported graph on torch's inputs and return how far it is from torch.

    Raises:
        ModelError: If the largest difference passes 0.1 % of the largest output.
    """
    wanted = {spec.name for spec in model.inputs}
    feeds = {name: array for name, array in exported.feeds.items() if name in wanted}
    with open_session(model.path, settings_for(BACKENDS["ort-cpu"])) as session:
        got = session.run(feeds)[model.output]
    top = float(np.abs(exported.expected).max())
    difference = float(np.abs(got - exported.expected).max())
    check = {
        "max_abs_diff": difference,
        "max_rel_diff": difference / top if top else difference,
        "samples": float(len(got)),
    }
    if not check["max_rel_diff"] <= EXPORT_TOLERANCE:
        raise ModelError(
            f"the exported graph disagrees with torch: largest difference {difference:.3g} where "
            f"outputs reach {top:.3g}; nothing is measured on a wrong graph"
        )
    return check


def _load_onnx(path: Path, source: str, folder: Path, options: LoadOptions) -> Model:
    raw = read_onnx(path)
    output = _choose_output(raw, options)
    graph = normalise(raw, output)
    rank = _rank(graph.graph.outputs[0])
    card: dict[str, Any] = {
        "kind": "onnx",
        "tokenizer": options.tokenizer,
        "max_length": options.max_length,
        "output": output,
        "head": options.head,
        "producer": f"{raw.producer_name or 'unknown'} {raw.producer_version or ''}".strip(),
    }
    if options.head == "embedding":
        card |= _pool_foreign(graph, rank, options)
    if options.head == "classification" and rank not in (None, 2):
        raise ModelError(
            f"output {output!r} has {rank} dimensions, and a classifier's has 2 [batch, classes]; "
            f"name another with --output: {', '.join(str(v.name) for v in raw.graph.outputs)}"
        )
    return store_model(graph, folder, source, card)


def _rank(value: ir.Value) -> int | None:
    return value.shape.rank() if value.shape is not None else None


def _choose_output(model: ir.Model, options: LoadOptions) -> str:
    names = [str(v.name) for v in model.graph.outputs]
    if options.output is not None:
        if options.output not in names:
            near = did_you_mean(options.output, names)
            raise ModelError(
                f"the graph has no output {options.output!r}{near}; outputs: {', '.join(names)}"
            )
        return options.output
    if len(names) > 1 and options.head != "any":
        shapes = ", ".join(f"{v.name} {_shape_text(v)}" for v in model.graph.outputs)
        raise ModelError(f"the graph has {len(names)} outputs; choose one with --output: {shapes}")
    return names[0]


def _shape_text(value: ir.Value) -> str:
    return "[" + ", ".join(str(d) for d in value.shape) + "]" if value.shape is not None else "[?]"


def _pool_foreign(graph: ir.Model, rank: int | None, options: LoadOptions) -> dict[str, Any]:
    pooling = options.pooling
    if pooling is not None and pooling not in POOLINGS:
        raise ModelError(
            f"unknown pooling {pooling!r}{did_you_mean(pooling, POOLINGS)}; "
            f"allowed: {', '.join(POOLINGS)}"
        )
    if rank == 2 and pooling in (None, "none"):
        return {"pooling": "none", "normalize": False}
    if pooling is None:
        shape = _shape_text(graph.graph.outputs[0])
        raise ModelError(
            f"output {graph.graph.outputs[0].name!r} has shape {shape}, one vector a token; say "
            f"how they become one vector a text with --pooling: {', '.join(POOLINGS)}"
        )
    if pooling == "none":
        return {"pooling": "none", "normalize": False}
    if rank == 2:
        raise ModelError(
            "the output already is one vector a text (2 dimensions): leave --pooling out"
        )
    normalize = bool(options.normalize)
    name = add_pooling(graph, pooling, normalize)
    return {"pooling": pooling, "normalize": normalize, "output": name}
