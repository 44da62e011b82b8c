"""One batch out of encoded requests in the order in which they came."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qbench.tasks.base import Array, Encoding
from qbench.tasks.batches import InputSpec, make_batches

_NO_LIMIT = 1 << 40


def can_pad(specs: Sequence[InputSpec]) -> bool:
    """Whether requests of different lengths may share a batch: the graph reads a mask."""
    return any(spec.name in ("attention_mask", "input_mask") for spec in specs)


def pad_batch(
    encoded: Sequence[Encoding], specs: Sequence[InputSpec], pad_id: int = 0
) -> dict[str, Array]:
    """Return the feeds of one batch, rows in the order given.

    Args:
        encoded: Token ids, and what else the tokenizer gives, of each request.
        specs: Inputs of the graph.
        pad_id: Token id of padded positions.

    Raises:
        ModelError: If lengths differ and the graph reads no mask.
    """
    batches = make_batches(
        encoded, specs, max_tokens=_NO_LIMIT, equal_length=not can_pad(specs), pad_id=pad_id
    )
    batch = batches[0]
    order = np.argsort(batch.rows)
    rest = np.arange(len(batch.rows), len(next(iter(batch.feeds.values()))))
    return {name: array[np.concatenate([order, rest])] for name, array in batch.feeds.items()}
