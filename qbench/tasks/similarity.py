"""Pair similarity: the cosine of two embeddings ranks pairs as people do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qbench.tasks.base import Array, Encoding, Metric, Scores, Text, Tokenizer
from qbench.tasks.metrics import SPEARMAN
from qbench.tasks.outputs import as_vectors, normalised

if TYPE_CHECKING:
    import pandas

ANSWER_STEP = 0.1
"""Cosines are rounded to it to say whether the answer to a pair changed."""


@dataclass(frozen=True, eq=False)
class Similarity:
    """Pairs of texts with a human score; items are all first texts, then all second texts."""

    ids: tuple[str, ...]
    texts: tuple[Text, ...]
    encoded: tuple[Encoding, ...]
    scores: Array
    metrics: tuple[Metric, ...] = (SPEARMAN,)
    name: str = "similarity"

    @property
    def n(self) -> int:
        """Number of pairs."""
        return len(self.ids)

    @property
    def items(self) -> int:
        """Number of texts: two a pair."""
        return len(self.texts)

    def score(self, outputs: Array, reference: Array | None = None) -> Scores:
        """Return the cosine beside the human score of each pair, for embeddings [items, width]."""
        cosine = self._cosine(outputs)
        payload = np.stack([cosine, self.scores], axis=1)
        answers = np.rint(cosine / ANSWER_STEP).astype(np.int64)
        return Scores({SPEARMAN.name: payload}, answers)

    def divergence(self, reference: Array, outputs: Array) -> Array:
        """Return the squared change of the cosine of each pair ``[n]``."""
        return np.asarray(np.square(self._cosine(reference) - self._cosine(outputs)))

    def _cosine(self, outputs: Array) -> Array:
        unit = normalised(as_vectors(outputs, self.items))
        return np.asarray((unit[: self.n] * unit[self.n :]).sum(axis=1))


def make_similarity(rows: pandas.DataFrame, tokenizer: Tokenizer) -> Similarity:
    """Return the task of a split with columns ``id``, ``text``, ``text_pair`` and ``score``."""
    texts = [*rows["text"], *rows["text_pair"]]
    return Similarity(
        ids=tuple(map(str, rows["id"])),
        texts=tuple((text, None) for text in texts),
        encoded=tuple(tokenizer(texts)),
        scores=rows["score"].to_numpy(np.float64),
    )
