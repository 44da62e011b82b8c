"""Export of Hugging Face models: loaded without code of their own, wrapped, and given to torch.

A model is wrapped so that the graph gives the one tensor that a task scores: logits of a
classifier, or the pooled (and normalised) embedding of an encoder.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qbench.errors import ModelError, unknown_name
from qbench.graph.export import Exported, export_module, quiet
from qbench.graph.folders import (
    POOLINGS,
    max_length_of,
    pooling_of,
    read_config,
    resolve_folder,
    revision_of,
)


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What of a Hugging Face model the graph gives.

    Attributes:
        head: ``embedding``, ``classification``, or ``any``: what the model's own class says.
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
    if options.pooling is not None and options.pooling not in POOLINGS:
        raise ModelError(unknown_name("pooling", options.pooling, POOLINGS))
    folder = resolve_folder(source, options.revision)
    config = read_config(folder)
    _check_remote_code(folder, config, options)
    classifies = options.head == "classification" or (
        options.head != "embedding" and _is_classifier(config)
    )
    head = _classification() if classifies else _embedding(folder, options)
    module = _load(folder, config, classifies, options.trust_remote_code)
    feeds = _feeds_for(module, samples or default_samples(module.config))
    exported = export_module(_wrapped(module, head), feeds, output=head["output"], strict=True)
    card: dict[str, Any] = {
        "kind": "hf",
        "tokenizer": str(folder),
        "revision": options.revision or revision_of(folder),
        "max_length": max_length_of(folder),
        "pad_id": int(getattr(module.config, "pad_token_id", 0) or 0),
        "architecture": type(module).__name__,
        **head,
    }
    labels = getattr(module.config, "id2label", None) if classifies else None
    if labels:
        card["id2label"] = {str(key): str(value) for key, value in labels.items()}
    return Exported(exported.graph, card, exported.checks)


def load_torch(source: str, options: HeadOptions) -> Any:
    """Return a Hugging Face folder or hub id as its torch module, in evaluation mode.

    Args:
        source: Local folder, or hub id.
        options: Which head it has.

    Raises:
        ModelError: If it cannot be loaded.
    """
    folder = resolve_folder(source, options.revision)
    config = read_config(folder)
    _check_remote_code(folder, config, options)
    classifies = options.head == "classification" or (
        options.head != "embedding" and _is_classifier(config)
    )
    return _load(folder, config, classifies, options.trust_remote_code)


def _is_classifier(config: Mapping[str, Any]) -> bool:
    return "ForSequenceClassification" in _named(config)


def _named(config: Mapping[str, Any]) -> str:
    return " ".join(str(name) for name in config.get("architectures") or ())


def _classification() -> dict[str, Any]:
    return {"output": "logits", "head": "classification"}


def _embedding(folder: Path, options: HeadOptions) -> dict[str, Any]:
    declared, normalised = pooling_of(folder, options.pooling)
    pooling = declared or "mean"
    normalize = options.normalize if options.normalize is not None else bool(normalised)
    return {
        "output": "last_hidden_state" if pooling == "none" else "sentence_embedding",
        "head": "embedding",
        "pooling": pooling,
        "normalize": normalize and pooling != "none",
    }


def _check_remote_code(folder: Path, config: Mapping[str, Any], options: HeadOptions) -> None:
    from transformers import CONFIG_MAPPING

    known = config.get("model_type") in CONFIG_MAPPING
    if "auto_map" in config and not known and not options.trust_remote_code:
        raise ModelError(
            f"{str(folder)!r} comes with code of its own; it runs only where you say so: "
            "trust_remote_code: true, or --trust-remote-code"
        )


def _load(folder: Path, config: Mapping[str, Any], classifies: bool, trust: bool) -> Any:
    import torch
    import transformers

    if classifies:
        auto: Any = transformers.AutoModelForSequenceClassification
    elif config.get("is_encoder_decoder") or "EncoderModel" in _named(config):
        auto = transformers.AutoModelForTextEncoding
    else:
        auto = transformers.AutoModel
    kind = "a classification" if classifies else "an embedding"
    try:
        with quiet():
            module, told = auto.from_pretrained(
                str(folder),
                attn_implementation="eager",
                trust_remote_code=trust,
                local_files_only=True,
                dtype=torch.float32,
                weights_only=True,
                output_loading_info=True,
            )
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{str(folder)!r} keeps its weights in a pickle with more than plain tensors, which "
            "could run code; it is not read. Save it as safetensors where you trust it"
        ) from error
    except Exception as error:  # transformers raises ValueError, OSError, KeyError, ImportError …
        raise ModelError(
            f"{str(folder)!r} cannot be loaded as {kind} model "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        ) from error
    _check_weights(folder, module, told, classifies)
    if getattr(module.config, "use_cache", False):
        module.config.use_cache = False
    return module.eval()


def _check_weights(folder: Path, module: Any, told: Mapping[str, Any], classifies: bool) -> None:
    """Refuse weights that are not in the folder, which would be random, and such that are NaN."""
    import torch

    missing = sorted(k for k in told["missing_keys"] if classifies or "pooler." not in k)
    if missing:
        raise ModelError(
            f"{str(folder)!r} lacks the weights {', '.join(missing[:5])}"
            f"{' and others' if len(missing) > 5 else ''} of {type(module).__name__}, which would "
            f"be random; it {'is no trained classifier' if classifies else 'is another model'}"
        )
    bad = [name for name, weight in module.named_parameters() if not torch.isfinite(weight).all()]
    if bad:
        raise ModelError(
            f"{str(folder)!r} has NaN or infinite weights in {', '.join(bad[:5])}"
            f"{' and others' if len(bad) > 5 else ''}: nothing can be measured; repair the model"
        )


def _wrapped(module: Any, head: Mapping[str, Any]) -> Any:
    from qbench.graph.wrappers import Classifier, Embedder

    if head["head"] == "classification":
        return Classifier(module)
    return Embedder(module, head["pooling"], head["normalize"])


def default_samples(config: Any) -> dict[str, np.ndarray]:
    """Return feeds of arbitrary token ids, for where no text is at hand.

    Both arrays have the shape [3, 8]; the second row ends in padding.
    """
    vocabulary = int(getattr(config, "vocab_size", 0) or 100)
    pad = int(getattr(config, "pad_token_id", 0) or 0)
    ids = np.random.default_rng(0).integers(0, vocabulary, (3, 8), dtype=np.int64)
    ids[ids == pad] = (pad + 1) % vocabulary
    mask = np.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": np.where(mask == 1, ids, pad), "attention_mask": mask}


def _feeds_for(module: Any, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    accepted = inspect.signature(module.forward).parameters
    if "input_ids" not in accepted:
        wanted = ", ".join(list(accepted)[:4])
        raise ModelError(
            f"{type(module).__name__} reads {wanted} and no input_ids: it is no text model; export "
            "it to ONNX yourself and give the file"
        )
    ids = feeds["input_ids"]
    vocabulary = int(getattr(module.config, "vocab_size", 0) or 0)
    if vocabulary and int(ids.max()) >= vocabulary:
        raise ModelError(
            f"the tokenizer gives token id {int(ids.max())}, and {type(module).__name__} knows "
            f"{vocabulary} tokens: the tokenizer belongs to another model"
        )
    own = {"input_ids": ids, "attention_mask": feeds.get("attention_mask", np.ones_like(ids))}
    kinds = int(getattr(module.config, "type_vocab_size", 0) or 0)
    if "token_type_ids" in accepted and kinds > 1:
        own["token_type_ids"] = feeds.get("token_type_ids", np.zeros_like(ids))
    return own
