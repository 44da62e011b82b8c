"""Export of torch models to ONNX: once, with dynamic batch and sequence, and checked.

A Hugging Face model is wrapped so that the graph gives the one tensor that a task scores: logits
of a classifier, or the pooled (and normalised) embedding of an encoder.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from qbench.errors import ModelError, did_you_mean

POOLINGS = ("mean", "cls", "max", "last", "none")
OPSET = 21

#: Model types whose positions are counted from ``pad_token_id + 1``.
_OFFSET_POSITIONS = frozenset(
    {
        "roberta",
        "xlm-roberta",
        "camembert",
        "mpnet",
        "longformer",
        "xlm-roberta-xl",
        "data2vec-text",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """A graph that torch exported.

    Attributes:
        graph: The graph, as the exporter gave it.
        card: What it is: head, pooling, tokenizer, longest text.
        feeds: The inputs that it was traced with.
        expected: What torch gave for them.
    """

    graph: ir.Model
    card: dict[str, Any]
    feeds: Mapping[str, np.ndarray]
    expected: np.ndarray


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What of a Hugging Face model the graph gives.

    Attributes:
        head: ``embedding`` or ``classification``.
        pooling: One of ``POOLINGS``, or ``None`` to take the folder's own or ``mean``.
        normalize: Whether the embedding is scaled to length 1; ``None``: the folder's own.
        revision: Revision of a hub model.
        trust_remote_code: Whether code that comes with the model may run.
    """

    head: str = "embedding"
    pooling: str | None = None
    normalize: bool | None = None
    revision: str | None = None
    trust_remote_code: bool = False


def pooling_of(folder: Path) -> tuple[str | None, bool | None]:
    """Return pooling and normalisation that a sentence-embedding folder declares, if it does.

    Raises:
        ModelError: If it declares a stage that is not supported.
    """
    modules = folder / "modules.json"
    if not modules.is_file():
        return None, None
    pooling, normalize = None, False
    for module in json.loads(modules.read_text(encoding="utf-8")):
        stage = str(module.get("type", "")).rsplit(".", 1)[-1]
        if stage == "Pooling":
            pooling = _pooling_mode(folder / str(module["path"]) / "config.json")
        elif stage == "Normalize":
            normalize = True
        elif stage != "Transformer":
            raise ModelError(
                f"{str(folder)!r} declares a {stage!r} stage; supported: Transformer, Pooling, "
                "Normalize. Export the whole model to ONNX yourself and give the file"
            )
    return pooling, normalize


def _pooling_mode(config: Path) -> str:
    settings = json.loads(config.read_text(encoding="utf-8"))
    named = {"mean": "mean", "cls": "cls", "max": "max", "lasttoken": "last"}
    if isinstance(settings.get("pooling_mode"), str):
        mode = str(settings["pooling_mode"])
        if mode in named:
            return named[mode]
    keys = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_lasttoken": "last",
    }
    chosen = [
        key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True
    ]
    if len(chosen) == 1 and chosen[0] in keys:
        return keys[chosen[0]]
    raise ModelError(
        f"{str(config)!r} asks for pooling {chosen or settings}; supported: {', '.join(POOLINGS)}"
    )


def export_hf(
    source: str, options: HeadOptions, samples: Mapping[str, np.ndarray] | None = None
) -> Exported:
    """Export a Hugging Face folder or hub id.

    Args:
        source: Local folder, or hub id.
        options: What the graph gives.
        samples: Feeds of real samples for the check, shape [batch, sequence] each.

    Raises:
        ModelError: If it cannot be loaded or exported.
    """
    folder = resolve_folder(source, options.revision)
    declared, normalised = pooling_of(folder)
    module, config = _load_module(folder, options)
    wrapper, head = _wrap(module, options, declared, normalised)
    feeds = dict(samples) if samples else default_samples(config)
    feeds = _feeds_for(module, feeds)
    exported = export_module(wrapper, feeds, output=head["output"])
    labels = getattr(config, "id2label", None) if options.head == "classification" else None
    card: dict[str, Any] = {
        "kind": "hf",
        "tokenizer": str(folder),
        "revision": options.revision or _revision_of(folder),
        "max_length": max_length_of(folder),
        "pad_id": int(getattr(config, "pad_token_id", 0) or 0),
        "architecture": type(module).__name__,
        **head,
    }
    if labels:
        card["id2label"] = {str(key): str(value) for key, value in labels.items()}
    return Exported(exported.graph, card, feeds, exported.expected)


def resolve_folder(source: str, revision: str | None) -> Path:
    """Return the local folder of a model: the folder itself, or a hub snapshot (from the cache
    where it is there, downloaded where it is not).

    Raises:
        ModelError: If there is neither.
    """
    if Path(source).is_dir():
        if not (Path(source) / "config.json").is_file():
            raise ModelError(
                f"folder {source!r} has no config.json; give a Hugging Face model folder, a hub "
                "id, or an ONNX file"
            )
        return Path(source)
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or Path(source).suffix:
        raise ModelError(
            f"model {source!r} does not exist; give a folder, an ONNX file or a hub id"
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.bin", "*.txt", "*.model", "*/config.json", "*.py"]
    for offline in (True, False):
        try:
            return Path(
                snapshot_download(
                    source, revision=revision, local_files_only=offline, allow_patterns=patterns
                )
            )
        except Exception as error:  # hub, HTTP, validation and OS errors share no base
            reason = error
    raise ModelError(
        f"model {source!r} is neither a local folder nor in the hub's cache, and could not be "
        f"downloaded ({type(reason).__name__}: {str(reason)[:200]}); check the name, or download it first"
    ) from reason


def _revision_of(folder: Path) -> str | None:
    parts = folder.resolve().parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else None


def _load_module(folder: Path, options: HeadOptions) -> tuple[Any, Any]:
    import torch
    import transformers

    wants_code = "auto_map" in (folder / "config.json").read_text(encoding="utf-8")
    if wants_code and not options.trust_remote_code and not _known_type(folder):
        raise ModelError(
            f"{str(folder)!r} comes with code of its own; it runs only where you say so: "
            "trust_remote_code: true, or --trust-remote-code"
        )
    auto = (
        transformers.AutoModelForSequenceClassification
        if options.head == "classification"
        else transformers.AutoModel
    )
    try:
        with quiet():
            module = auto.from_pretrained(
                str(folder),
                attn_implementation="eager",
                trust_remote_code=options.trust_remote_code,
                local_files_only=True,
                dtype=torch.float32,
                weights_only=True,
            )
    except Exception as error:  # transformers raises ValueError, OSError, KeyError, ImportError …
        raise ModelError(
            f"{str(folder)!r} cannot be loaded as a {options.head} model "
            f"({type(error).__name__}: {str(error)[:300]})"
        ) from error
    return module.eval(), module.config


def _known_type(folder: Path) -> bool:
    from transformers import CONFIG_MAPPING

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("model_type") in CONFIG_MAPPING


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the chatter of torch and transformers off the terminal."""
    import transformers

    before = transformers.logging.get_verbosity()
    level = logging.root.manager.disable
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        transformers.logging.set_verbosity(before)
        logging.disable(level)


def _wrap(
    module: Any, options: HeadOptions, declared: str | None, normalised: bool | None
) -> tuple[Any, dict[str, Any]]:
    from qbench.graph.wrappers import Classifier, Embedder

    if options.head == "classification":
        return Classifier(module), {"output": "logits", "head": "classification"}
    pooling = options.pooling or declared or "mean"
    if pooling not in POOLINGS:
        raise ModelError(
            f"unknown pooling {pooling!r}{did_you_mean(pooling, POOLINGS)}; "
            f"allowed: {', '.join(POOLINGS)}"
        )
    normalize = options.normalize if options.normalize is not None else bool(normalised)
    normalize = normalize and pooling != "none"
    output = "last_hidden_state" if pooling == "none" else "sentence_embedding"
    facts = {"output": output, "head": "embedding", "pooling": pooling, "normalize": normalize}
    return Embedder(module, pooling, normalize), facts


def default_samples(config: Any) -> dict[str, np.ndarray]:
    """Return feeds of arbitrary token ids, for where no text is at hand: shape [2, 8]."""
    vocabulary = int(getattr(config, "vocab_size", 100))
    ids = np.random.default_rng(0).integers(0, vocabulary, (2, 8), dtype=np.int64)
    return {"input_ids": ids}


def _feeds_for(module: Any, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    import inspect

    accepted = inspect.signature(module.forward).parameters
    ids = feeds["input_ids"]
    own = {"input_ids": ids, "attention_mask": feeds.get("attention_mask", np.ones_like(ids))}
    vocabulary = int(getattr(module.config, "type_vocab_size", 0) or 0)
    if "token_type_ids" in accepted and vocabulary > 1:
        own["token_type_ids"] = feeds.get("token_type_ids", np.zeros_like(ids))
    return own


def max_length_of(folder: Path) -> int | None:
    """Return the longest text in tokens that a model folder states, or ``None``."""
    sentence = folder / "sentence_bert_config.json"
    if sentence.is_file():
        length = json.loads(sentence.read_text(encoding="utf-8")).get("max_seq_length")
        if isinstance(length, int):
            return length
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or length <= 0:
        return None
    if config.get("model_type") in _OFFSET_POSITIONS:
        return length - int(config.get("pad_token_id") or 0) - 1
    return length


def export_module(
    module: Any,
    feeds: Mapping[str, np.ndarray],
    output: str = "output",
    dynamic: Sequence[str] = ("batch", "sequence"),
) -> Exported:
    """Export a torch module that takes ``feeds`` by keyword and gives one tensor.

    Args:
        module: The module, in evaluation mode.
        feeds: Sample inputs; the first axes of each are dynamic.
        output: Name of the output.
        dynamic: Names of the dynamic axes, the first axis first.

    Raises:
        ModelError: If it cannot be exported.
    """
    import torch

    module = module.eval()
    example = {name: torch.from_numpy(np.array(array)) for name, array in feeds.items()}
    dims = [torch.export.Dim.DYNAMIC for _ in dynamic]
    shapes = {n: {i: dims[i] for i in range(min(len(dims), t.ndim))} for n, t in example.items()}
    with torch.no_grad(), quiet():
        try:
            expected = module(**example)
            program = torch.onnx.export(
                module,
                kwargs=example,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=shapes,
                input_names=list(example),
                output_names=[output],
                verbose=False,
            )
        except Exception as error:  # the exporter raises its own, torch's and plain errors
            raise ModelError(
                f"torch.onnx.export refused {type(module).__name__}: "
                f"{type(error).__name__}: {str(error)[:400]}"
            ) from error
    if program is None or not isinstance(expected, torch.Tensor):
        raise ModelError(
            f"{type(module).__name__} must give one tensor, and gives {type(expected).__name__}; "
            "wrap it in a module that returns the tensor to score"
        )
    graph = program.model
    _name_axes(graph, dynamic)
    card = {"kind": "torch", "output": output, "architecture": type(module).__name__}
    return Exported(graph, card, dict(feeds), expected.numpy())


def _name_axes(graph: ir.Model, dynamic: Sequence[str]) -> None:
    for value in graph.graph.inputs:
        if value.shape is not None:
            dims = [
                dynamic[i] if i < len(dynamic) and not isinstance(d, int) else d
                for i, d in enumerate(value.shape)
            ]
            value.shape = ir.Shape(dims)
