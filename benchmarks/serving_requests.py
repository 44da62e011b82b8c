"""The requests of the serving benchmark: token ids of the demo's own texts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from qbench import judging
from qbench.serving.request import Encoded
from qbench.workbench import Workbench

REQUESTS = 400


def draw_requests(work: Workbench, low: int, high: int, seed: int) -> list[np.ndarray]:
    """Return token ids of the demo's own texts, run together and cut to uniform lengths."""
    rng = np.random.default_rng(seed)
    encoded = judging.encoder(work)(list(work.task("sweep").texts))
    ids = [one["input_ids"] for one in encoded]
    first, last = ids[0][0], ids[0][-1]
    stream = itertools.cycle([token for one in ids for token in one[1:-1]])
    lengths = rng.integers(low, high + 1, REQUESTS)
    return [
        np.array([first, *itertools.islice(stream, int(length) - 2), last], np.int64)
        for length in lengths
    ]


def encode_ids(ids: np.ndarray, inputs: Sequence[str]) -> Encoded:
    """Return token ids as a request of the batcher."""
    values = {name: np.ones_like(ids) if "mask" in name else 0 * ids for name in inputs}
    return {name: array.tolist() for name, array in (values | {"input_ids": ids}).items()}


def sample_lengths(ids: Sequence[np.ndarray]) -> list[int]:
    """Return some 64 of the lengths, from the shortest to the longest."""
    return sorted(map(len, ids))[:: max(len(ids) // 64, 1)]
