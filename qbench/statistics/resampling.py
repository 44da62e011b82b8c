"""Shared random draws: one set of resamples for each (n, seed), made in blocks of bounded memory.

Cells of one sweep are measured on the same samples, so they share their resamples too: the draws
are made once, kept, and each further cell costs one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]

#: Elements of one block of draws (12 MB of float64); a larger n takes more blocks, not more memory.
BLOCK_ELEMENTS = 1_500_000
#: Payload elements that one call of a statistic gets: it may make a dozen temporaries of them.
CHUNK_ELEMENTS = 500_000


@lru_cache(maxsize=4)
def _index_block(n: int, seed: int, start: int, rows: int) -> NDArray[np.int32]:
    rng = np.random.default_rng([seed, n, start])
    block = rng.integers(0, n, size=(rows, n), dtype=np.int32)
    block.setflags(write=False)
    return block


@lru_cache(maxsize=4)
def _count_block(n: int, seed: int, start: int, rows: int) -> Floats:
    offsets = np.arange(rows, dtype=np.int64)[:, None] * n
    flat = (_index_block(n, seed, start, rows) + offsets).ravel()
    block = np.bincount(flat, minlength=rows * n).reshape(rows, n).astype(np.float64)
    block.setflags(write=False)
    return block


@lru_cache(maxsize=4)
def _simplex_block(n: int, seed: int, start: int, rows: int) -> Floats:
    rng = np.random.default_rng([seed, n, start, 1])
    block = rng.standard_exponential(size=(rows, n + 1))
    block /= block.sum(axis=1, keepdims=True)
    block.setflags(write=False)
    return block


def _spans(n: int, resamples: int) -> Iterator[tuple[int, int]]:
    rows = max(1, min(resamples, BLOCK_ELEMENTS // max(n, 1)))
    for start in range(0, resamples, rows):
        yield start, min(rows, resamples - start)


def index_blocks(n: int, seed: int, resamples: int) -> Iterator[NDArray[np.int32]]:
    """Yield bootstrap indices [rows, n] until ``resamples`` rows are given."""
    for start, rows in _spans(n, resamples):
        yield _index_block(n, seed, start, rows)


def count_blocks(n: int, seed: int, resamples: int) -> Iterator[Floats]:
    """Yield how often each bootstrap resample holds each sample [rows, n]; same draws as indices.

    The mean of a resample is a product with these counts, divided by n.
    """
    for start, rows in _spans(n, resamples):
        yield _count_block(n, seed, start, rows)


def simplex_blocks(n: int, seed: int, resamples: int) -> Iterator[Floats]:
    """Yield uniform draws from the simplex of n + 1 weights [rows, n + 1]; each row sums to 1."""
    for start, rows in _spans(n, resamples):
        yield _simplex_block(n, seed, start, rows)


def replicate(statistic: Statistic, payload: Floats, seed: int, resamples: int) -> Floats:
    """Return ``statistic`` of each bootstrap resample of ``payload`` [n, k] → [resamples]."""
    n, k = payload.shape
    rows = max(1, CHUNK_ELEMENTS // max(1, n * k))
    parts = [
        np.asarray(statistic(payload[block[at : at + rows]]), dtype=np.float64)
        for block in index_blocks(n, seed, resamples)
        for at in range(0, len(block), rows)
    ]
    return np.concatenate(parts)


def leave_out(statistic: Statistic, payload: Floats, groups: list[NDArray[np.intp]]) -> Floats:
    """Return ``statistic`` of ``payload`` [n, k] without each group of rows → [groups]."""
    keep = np.ones(len(payload), dtype=bool)
    values = np.empty(len(groups))
    for at, group in enumerate(groups):
        keep[group] = False
        values[at] = float(statistic(payload[keep]))
        keep[group] = True
    return values
