"""Items of tasks whose samples are single texts or pairs that the model reads together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qbench.tasks.base import Encoding, Text, Tokenizer

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Identity, text and encoding of each sample, ``[n]``."""

    ids: tuple[str, ...]
    texts: tuple[Text, ...]
    encoded: tuple[Encoding, ...]


def read_items(rows: pandas.DataFrame, tokenizer: Tokenizer) -> Items:
    """Return the items of rows with columns ``id``, ``text`` and maybe ``text_pair``."""
    texts = list(rows["text"])
    pairs = list(rows["text_pair"]) if "text_pair" in rows else None
    together: list[Text] = (
        [(text, None) for text in texts] if pairs is None else list(zip(texts, pairs, strict=True))
    )
    return Items(tuple(map(str, rows["id"])), tuple(together), tuple(tokenizer(texts, pairs)))
