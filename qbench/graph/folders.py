"""Hugging Face folders: where a model lies, and what its configuration files say about it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qbench.errors import ModelError

POOLINGS = ("mean", "cls", "max", "last", "none")

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

#: What of a hub repository a model needs; copies in other formats are left where they are.
_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.py")
_UNWANTED = ("onnx/*", "openvino/*", "*.onnx.json", "tf/*", "flax/*", "coreml/*", "original/*")

#: Ends of names that are files and no hub ids.
_FILE_ENDS = (".onnx", ".pt", ".pth", ".bin", ".safetensors", ".gguf", ".json", ".yaml", ".yml")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file that belongs to a model.

    Raises:
        ModelError: If the file is missing or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # decoding errors are ValueErrors
        raise ModelError(
            f"{str(path)!r} cannot be read as JSON ({type(error).__name__}: {str(error)[:200]}); "
            "copy the model folder again"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return a model folder's ``config.json``.

    Raises:
        ModelError: If it is missing, or is no JSON object.
    """
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise ModelError(f"{str(folder / 'config.json')!r} must hold one JSON object")
    return config


def resolve_folder(source: str, revision: str | None) -> Path:
    """Return the local folder of a model's weights and configuration.

    That is the folder itself; its first stage, where a sentence-embedding folder keeps that apart;
    or a hub snapshot: from the cache where it is there, downloaded where it is not.

    Raises:
        ModelError: If there is neither.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _transformer_folder(path)
    looks_local = source.startswith((".", "/", "~", os.sep)) or source.count("/") > 1
    if looks_local or path.suffix.lower() in _FILE_ENDS:
        raise ModelError(
            f"model {source!r} does not exist; give a folder, an ONNX file or a hub id"
        )
    return _transformer_folder(_snapshot(source, revision))


def _transformer_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    for stage, path in _stages(folder):
        if stage == "Transformer" and (path / "config.json").is_file():
            return path
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.onnx"))[:5]
    hint = f"; it holds {', '.join(files)}: name the file itself" if files else ""
    raise ModelError(
        f"folder {str(folder)!r} has no config.json; give a Hugging Face model folder, a hub id, "
        f"or an ONNX file{hint}"
    )


def _snapshot(source: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    reason: Exception | None = None
    for offline in (True, False):
        for wanted in (_WANTED, (*_WANTED, "*.bin")):
            try:
                found = Path(
                    snapshot_download(
                        source,
                        revision=revision,
                        local_files_only=offline,
                        allow_patterns=list(wanted),
                        ignore_patterns=list(_UNWANTED),
                    )
                )
            except Exception as error:  # hub, HTTP, validation and OS errors share no base
                reason = error
                break
            if any(found.rglob("*.safetensors")) or any(found.rglob("*.bin")):
                return found
    why = "no weights are in it" if reason is None else _one_line(reason)
    raise ModelError(
        f"model {source!r}{f' at revision {revision!r}' if revision else ''} is neither a local "
        f"folder nor in the hub's cache, and could not be downloaded ({why}); check the name and "
        "the network, or download it first and give its folder"
    ) from reason


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def revision_of(folder: Path) -> str | None:
    """Return the commit of a snapshot in a hub cache, or ``None`` for any other folder."""
    parts = folder.absolute().parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else None


def pooling_of(folder: Path, given: str | None = None) -> tuple[str | None, bool | None]:
    """Return pooling and normalisation that a sentence-embedding folder declares, if it does.

    Args:
        folder: The model's folder, or the folder of its first stage.
        given: The pooling that the user chose; it goes before the folder's.

    Raises:
        ModelError: If it declares a stage that is not supported.
    """
    root = next((f for f in (folder, folder.parent) if _declares(f, folder)), None)
    if root is None:
        return given, None
    pooling, normalize = given, False
    for stage, path in _stages(root):
        if stage == "Pooling":
            pooling = given or _pooling_mode(path / "config.json")
        elif stage == "Normalize":
            normalize = True
        elif stage != "Transformer":
            raise ModelError(
                f"{str(root)!r} declares a {stage!r} stage; supported: Transformer, Pooling, "
                "Normalize. Export the whole model to ONNX yourself and give the file"
            )
    return pooling, normalize


def _declares(root: Path, folder: Path) -> bool:
    return any(path.resolve() == folder.resolve() for s, path in _stages(root) if s)


def _stages(root: Path) -> Sequence[tuple[str, Path]]:
    """Return the stages of ``modules.json``: their class, and the folder of each."""
    if not (root / "modules.json").is_file():
        return ()
    modules = read_json(root / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise ModelError(f"{str(root / 'modules.json')!r} must hold a list of stages")
    return [
        (str(m.get("type", "")).rsplit(".", 1)[-1], root / str(m.get("path", ""))) for m in modules
    ]


def _pooling_mode(config: Path) -> str:
    settings = read_json(config)
    named = {"mean": "mean", "cls": "cls", "max": "max", "lasttoken": "last"}
    said = settings.get("pooling_mode")
    if isinstance(said, str) and said in named:
        return named[said]
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
    asked = ", ".join(chosen) or said or "no pooling"
    raise ModelError(
        f"{str(config)!r} asks for {asked}; supported: one of {', '.join(POOLINGS)}. Name one with "
        "--pooling only if that is what the model was trained with"
    )


def max_length_of(folder: Path) -> int | None:
    """Return the longest text in tokens that a model folder states, or ``None``."""
    sentence = folder / "sentence_bert_config.json"
    if sentence.is_file():
        length = read_json(sentence).get("max_seq_length")
        if isinstance(length, int):
            return length
    config = read_config(folder)
    length = config.get("max_position_embeddings", config.get("n_positions"))
    if not isinstance(length, int) or length <= 0:
        return None
    if config.get("model_type") in _OFFSET_POSITIONS:
        pad = config.get("pad_token_id")
        return length - (1 if pad is None else int(pad)) - 1
    return length
