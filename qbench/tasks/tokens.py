"""Tokenizers: from a Hugging Face folder or id, a ``tokenizer.json``, or a user's callable."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench.errors import ModelError
from qbench.tasks.base import Tokenizer
from qbench.tasks.callables import accepts, load_callable, names_callable

DEFAULT_MAX_LENGTH = 512
_PAD_TOKENS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FILES = "tokenizer.json", "tokenizer_config.json", "vocab.txt", "tokenizer.model", "vocab.json"

Encoded = list[Mapping[str, list[int]]]


@dataclass(frozen=True, eq=False)
class HuggingFaceTokenizer:
    """A tokenizer of ``transformers``."""

    inner: Any
    name: str
    pad_id: int
    max_length: int

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Encoded:
        """Return ``input_ids``, ``attention_mask`` and ``token_type_ids`` of each text."""
        if not texts:
            return []
        encoded = self.inner(
            list(texts),
            None if pairs is None else list(pairs),
            truncation=True,
            max_length=self.max_length,
            padding=False,
            return_attention_mask=True,
            return_token_type_ids=True,
        )
        return [{key: encoded[key][row] for key in encoded} for row in range(len(texts))]


@dataclass(frozen=True, eq=False)
class JsonTokenizer:
    """A bare ``tokenizer.json``."""

    inner: Any
    name: str
    pad_id: int
    max_length: int

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Encoded:
        """Return ``input_ids``, ``attention_mask`` and ``token_type_ids`` of each text."""
        batch = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        return [
            {
                "input_ids": found.ids,
                "attention_mask": found.attention_mask,
                "token_type_ids": found.type_ids,
            }
            for found in self.inner.encode_batch(batch)
        ]


@dataclass(frozen=True, eq=False)
class CallableTokenizer:
    """A user's function ``(texts, pairs=None) -> list`` of token ids or of mappings of them.

    Ids longer than ``max_length`` are cut at the end, unless the function takes ``max_length``
    itself.
    """

    function: Callable[..., Any]
    name: str
    keywords: Mapping[str, Any]
    pad_id: int
    max_length: int

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Encoded:
        """Return what the function gives for each text, checked and cut."""
        if not texts:
            return []
        arguments = (list(texts),) if pairs is None else (list(texts), list(pairs))
        found = list(self.function(*arguments, **self.keywords))
        if len(found) != len(texts):
            raise ModelError(
                f"tokenizer {self.name}: got {len(found)} encodings of {len(texts)} texts"
            )
        return [self._checked(item) for item in found]

    def _checked(self, item: Any) -> Mapping[str, list[int]]:
        fields = dict(item) if isinstance(item, Mapping) else {"input_ids": item}
        if "input_ids" not in fields:
            raise ModelError(
                f"tokenizer {self.name}: an encoding has {', '.join(map(repr, fields))} and no"
                " 'input_ids'"
            )
        try:
            encoding = {str(k): [int(v) for v in ids] for k, ids in fields.items()}
        except (TypeError, ValueError):
            raise ModelError(
                f"tokenizer {self.name}: an encoding must be a list of token ids, or a mapping of"
                f" such lists; got {str(item)[:80]!r}"
            ) from None
        if len({len(ids) for ids in encoding.values()}) > 1:
            sizes = ", ".join(f"{key}: {len(ids)}" for key, ids in encoding.items())
            raise ModelError(f"tokenizer {self.name}: lists of one encoding differ ({sizes})")
        return {key: ids[: self.max_length] for key, ids in encoding.items()}


def load_tokenizer(
    spec: str | Path,
    max_length: int | None = None,
    *,
    model_dir: str | Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """Load a tokenizer.

    Args:
        spec: A folder (of a Hugging Face tokenizer, or with a ``tokenizer.json`` only), a
            ``tokenizer.json``, ``module:callable``, ``path/file.py:callable`` or a hub id.
            A folder is read without the network.
        max_length: Longest encoding in tokens; by default what the tokenizer states, else 512.
        model_dir: Folder of the model, given to a callable that takes ``model_dir``.
        revision: Revision of a hub id.
        trust_remote_code: Whether code of a hub id or folder may run.

    Raises:
        ModelError: If there is no tokenizer there, or it cannot be read.
        InputError: If a callable does not exist.
    """
    text, path = str(spec), Path(spec)
    if path.is_file():
        if path.suffix != ".json":
            raise ModelError(f"tokenizer {text!r}: a file must be a tokenizer.json or a .py:name")
        return _json_tokenizer(path, text, max_length)
    if path.is_dir():
        if (path / "tokenizer.json").is_file() and not _has_config(path):
            return _json_tokenizer(path / "tokenizer.json", text, max_length)
        if not any((path / name).is_file() for name in _FILES):
            raise ModelError(
                f"tokenizer folder {text!r} has none of {', '.join(_FILES)}: give the folder of"
                " a tokenizer (--tokenizer DIR), or a callable (--tokenizer file.py:callable)"
            )
        return _hugging_face(text, max_length, local_files_only=True, trust=trust_remote_code)
    if names_callable(text):
        return _callable_tokenizer(text, max_length, model_dir)
    if not _HUB_ID.fullmatch(text):
        raise ModelError(
            f"tokenizer {text!r}: no such folder; allowed: a folder, a hub id, module:callable or"
            " path/file.py:callable"
        )
    return _hugging_face(text, max_length, revision=revision, trust=trust_remote_code)


def _has_config(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer_config.json", "config.json"))


def _hugging_face(
    source: str, max_length: int | None, *, trust: bool, **options: Any
) -> HuggingFaceTokenizer:
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(source, trust_remote_code=trust, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelError(
            f"tokenizer {source!r} cannot be loaded: {reason}. Give a local folder, module:callable"
            " or path/file.py:callable (--tokenizer)"
        ) from error
    stated = int(min(inner.model_max_length, 1_000_000))
    default = stated if stated < 1_000_000 else DEFAULT_MAX_LENGTH
    longest = min(max_length or default, stated)
    return HuggingFaceTokenizer(inner, source, inner.pad_token_id or 0, longest)


def _json_tokenizer(path: Path, name: str, max_length: int | None) -> JsonTokenizer:
    from tokenizers import Tokenizer as RustTokenizer

    try:
        inner = RustTokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(f"tokenizer {str(path)!r} cannot be read: {error}") from error
    padding = inner.padding or {}
    ids = [inner.token_to_id(token) for token in _PAD_TOKENS]
    pad = padding.get("pad_id", next((i for i in ids if i is not None), 0))
    longest = max_length or DEFAULT_MAX_LENGTH
    inner.no_padding()
    inner.enable_truncation(longest)
    return JsonTokenizer(inner, name, int(pad), longest)


def _callable_tokenizer(
    spec: str, max_length: int | None, model_dir: str | Path | None
) -> CallableTokenizer:
    function = load_callable(spec, "tokenizer")
    longest = max_length or int(getattr(function, "max_length", DEFAULT_MAX_LENGTH))
    offered = {"model_dir": model_dir and Path(model_dir), "max_length": longest}
    keywords = {key: value for key, value in offered.items() if accepts(function, key)}
    if keywords.get("model_dir", model_dir) is None and "model_dir" in keywords:
        raise ModelError(
            f"tokenizer {spec}: it asks for the model's folder (model_dir), and this model has none"
        )
    return CallableTokenizer(function, spec, keywords, int(getattr(function, "pad_id", 0)), longest)
