"""Retrieval metrics of score matrices, with ties ranked fairly.

Candidates whose score is within ``TIE`` of a right answer's are tied with it. Ties are ranked by
expectation over all orders of the tied candidates, so neither the place of a candidate in the pool
nor rounding decides a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qbench.tasks.base import Array

TIE = 1e-6
DEPTH = 10


@dataclass(frozen=True, slots=True, eq=False)
class Rights:
    """The right candidates of each query.

    Attributes:
        query: Query of each right pair, ascending, every query at least once, ``[pairs]``.
        candidate: Candidate of each right pair, ``[pairs]``.
    """

    query: Array
    candidate: Array

    def between(self, start: int, stop: int) -> Rights:
        """Return the pairs of queries ``start`` to ``stop``, counted from ``start``."""
        first, last = np.searchsorted(self.query, (start, stop))
        return Rights(self.query[first:last] - start, self.candidate[first:last])


def reciprocal_ranks(scores: Array, rights: Rights) -> Array:
    """Return the expected reciprocal rank ``[n]`` of the best right candidate.

    Args:
        scores: Scores ``[n, candidates]``, higher is better.
        rights: The right candidates.
    """
    right = scores[rights.query, rights.candidate]
    starts = np.searchsorted(rights.query, np.arange(len(scores)))
    best = np.maximum.reduceat(right, starts)
    above = (scores > best[:, None] + TIE).sum(axis=1)
    tied = (np.abs(scores - best[:, None]) <= TIE).sum(axis=1)
    right_tied = np.add.reduceat((right >= best[rights.query] - TIE).astype(np.int64), starts)
    expected = 1.0 / (above + 1.0)
    for query in np.flatnonzero(tied > right_tied):
        expected[query] = _expected_reciprocal(above[query], tied[query], right_tied[query])
    return np.asarray(expected)


def _expected_reciprocal(above: int, tied: int, right: int) -> float:
    """Return E[1 / rank of the first right] for ``right`` among ``tied`` after ``above``.

    The first right one stands at position j with probability
    ``Π_{i<j-1} (tied - right - i) / (tied - i) · right / (tied - j + 1)``.
    """
    wrong = np.arange(tied - right)
    none_yet = np.concatenate(([1.0], np.cumprod((tied - right - wrong) / (tied - wrong))))
    position = np.arange(1, tied - right + 2)
    return float((none_yet * right / (tied - position + 1) / (above + position)).sum())


def discounted_gains(scores: Array, rights: Rights) -> Array:
    """Return the expected nDCG at depth 10 ``[n]``, with gain 1 for each right candidate."""
    rows = scores[rights.query]
    right = rows[np.arange(len(rows)), rights.candidate][:, None]
    above = (rows > right + TIE).sum(axis=1)
    tied = (np.abs(rows - right) <= TIE).sum(axis=1)
    total = _cumulative_discount(scores.shape[1])
    gain = (total[above + tied] - total[above]) / tied
    count = np.bincount(rights.query, minlength=len(scores))
    return np.bincount(rights.query, gain, minlength=len(scores)) / total[count]


def _cumulative_discount(length: int) -> Array:
    """Return the sum of discounts of the first 0, 1, … ``length`` positions, ``[length + 1]``."""
    position = np.arange(1, length + 1)
    discount = np.where(position <= DEPTH, 1.0 / np.log2(position + 1.0), 0.0)
    return np.concatenate(([0.0], np.cumsum(discount)))


def best_candidates(scores: Array) -> Array:
    """Return the best candidate ``[n]`` of each query; of tied ones the first in the pool."""
    return np.asarray(np.argmax(scores >= scores.max(axis=1, keepdims=True) - TIE, axis=1))
