"""Retrieval: each query ranks the pool of candidate answers by the cosine of embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qbench.tasks.base import Array, Encoding, Metric, Scores, Text, Tokenizer
from qbench.tasks.metrics import MRR, NDCG
from qbench.tasks.outputs import as_vectors, kl_divergence, normalised
from qbench.tasks.ranking import Rights, best_candidates, discounted_gains, reciprocal_ranks

if TYPE_CHECKING:
    import pandas

TEMPERATURE = 0.05
"""Scores are divided by it before the softmax of the divergence: cosines differ by hundredths."""

_CHUNK = 4_000_000  # scores held at a time


@dataclass(frozen=True, eq=False)
class Retrieval:
    """Queries over a pool of candidates; items are the queries, then the candidates.

    Queries with equal token ids are one sample with all their right answers, and candidates with
    equal token ids are one candidate: a model cannot tell them apart.
    """

    ids: tuple[str, ...]
    texts: tuple[Text, ...]
    encoded: tuple[Encoding, ...]
    rights: Rights
    metrics: tuple[Metric, ...] = (MRR, NDCG)
    name: str = "retrieval"

    @property
    def n(self) -> int:
        """Number of queries."""
        return len(self.ids)

    @property
    def items(self) -> int:
        """Number of queries and candidates."""
        return len(self.texts)

    def score(self, outputs: Array, reference: Array | None = None) -> Scores:
        """Return reciprocal ranks and nDCG@10 of embeddings ``[items, width]``."""
        ranks, gains, answers = [], [], []
        for start, stop, scores in self._pools(outputs):
            rights = self.rights.between(start, stop)
            ranks.append(reciprocal_ranks(scores, rights))
            gains.append(discounted_gains(scores, rights))
            answers.append(best_candidates(scores))
        payloads = {
            MRR.name: np.concatenate(ranks)[:, None],
            NDCG.name: np.concatenate(gains)[:, None],
        }
        return Scores(payloads, np.concatenate(answers))

    def divergence(self, reference: Array, outputs: Array) -> Array:
        """Return KL of the score distributions over the pool ``[n]``, in nats.

        Each distribution is ``softmax(cosine / 0.05)`` over all candidates.
        """
        pools = zip(self._pools(reference), self._pools(outputs), strict=True)
        parts = [
            kl_divergence(before / TEMPERATURE, after / TEMPERATURE)
            for (_, _, before), (_, _, after) in pools
        ]
        return np.concatenate(parts)

    def _pools(self, outputs: Array) -> Iterator[tuple[int, int, Array]]:
        unit = normalised(as_vectors(outputs, self.items))
        queries, candidates = unit[: self.n], unit[self.n :]
        step = max(1, _CHUNK // len(candidates))
        for start in range(0, self.n, step):
            stop = min(start + step, self.n)
            yield start, stop, queries[start:stop] @ candidates.T


def make_retrieval(rows: pandas.DataFrame, tokenizer: Tokenizer) -> Retrieval:
    """Return the task of a split with columns ``id``, ``query`` and ``answer``."""
    queries, answers = list(rows["query"]), list(rows["answer"])
    query_codes, query_texts = _merge(queries, tokenizer)
    answer_codes, answer_texts = _merge(answers, tokenizer)
    first = np.unique(query_codes, return_index=True)[1]
    pairs = np.unique(np.stack([query_codes, answer_codes], axis=1), axis=0)
    texts = query_texts + answer_texts
    return Retrieval(
        ids=tuple(str(rows["id"].iloc[int(row)]) for row in first),
        texts=tuple((text, None) for text in texts),
        encoded=tuple(tokenizer(texts)),
        rights=Rights(pairs[:, 0], pairs[:, 1]),
    )


def _merge(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[Array, list[str]]:
    """Return the code of each text and the texts by code; equal token ids share a code."""
    distinct = list(dict.fromkeys(texts))
    code_of_ids: dict[tuple[int, ...], int] = {}
    kept: list[str] = []
    code_of_text: dict[str, int] = {}
    for text, encoding in zip(distinct, tokenizer(distinct), strict=True):
        ids = tuple(encoding["input_ids"])
        if ids not in code_of_ids:
            code_of_ids[ids] = len(kept)
            kept.append(text)
        code_of_text[text] = code_of_ids[ids]
    return np.array([code_of_text[text] for text in texts], np.int64), kept
