from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest


class Words:
    """A tokenizer of words: case does not matter, ids are given as words come."""

    name, pad_id, max_length = "words", 0, 8

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[Mapping[str, list[int]]]:
        both = [
            f"{text} {pair}" for text, pair in zip(texts, pairs or [""] * len(texts), strict=True)
        ]
        return [
            {"input_ids": [self.ids.setdefault(w, len(self.ids) + 1) for w in t.lower().split()]}
            for t in both
        ]


@pytest.fixture
def words() -> Words:
    return Words()
