"""The same items in other batches: what an answer owes to its batch-mates and to padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from qbench.tasks.base import Encoding
from qbench.tasks.batches import Batch, InputSpec, batches_sha256, make_batches
from qbench.tasks.padding import can_pad

SMALLER, LARGER, SHUFFLED, PADDED = "smaller batches", "larger batches", "other mates", "padded"


def recompose(
    encoded: Sequence[Encoding],
    specs: Sequence[InputSpec],
    *,
    max_tokens: int,
    pad_id: int = 0,
    seed: int = 0,
) -> dict[str, tuple[Batch, ...]]:
    """Return the items in other compositions, by name; those that change nothing are left out.

    ``smaller batches`` have a quarter of the budget, ``larger batches`` four times as much,
    ``other mates`` shuffles items of equal length, and ``padded`` (where the graph reads a mask)
    mixes lengths at random.

    Args:
        encoded: Token ids, and what else the tokenizer gives, of each item.
        specs: Inputs of the graph.
        max_tokens: Budget of the composition that these are compared with.
        pad_id: Token id of padded positions.
        seed: Seed of the shuffles.
    """
    order = np.random.default_rng([seed, len(encoded), 4]).permutation(len(encoded))

    def made(budget: int, rows: np.ndarray, equal: bool = True) -> tuple[Batch, ...]:
        items = [encoded[row] for row in rows]
        batches = make_batches(items, specs, max_tokens=budget, equal_length=equal, pad_id=pad_id)
        return tuple(replace(batch, rows=rows[batch.rows]) for batch in batches)

    def mixed() -> tuple[Batch, ...]:
        longest = max(len(item["input_ids"]) for item in encoded)
        pieces = -(-len(order) // max(2, max_tokens // longest))
        return tuple(
            batch
            for piece in np.array_split(order, pieces)
            for batch in made(max_tokens * longest, piece, equal=False)
        )

    own = np.arange(len(encoded))
    wanted: dict[str, Callable[[], tuple[Batch, ...]]] = {
        SMALLER: lambda: made(max(1, max_tokens // 4), own),
        LARGER: lambda: made(4 * max_tokens, own),
        SHUFFLED: lambda: made(max_tokens, order),
    }
    if can_pad(specs):
        wanted[PADDED] = mixed
    known = {batches_sha256(made(max_tokens, own))}
    found: dict[str, tuple[Batch, ...]] = {}
    for name, make in wanted.items():
        batches = make()
        sha256 = batches_sha256(batches)
        if sha256 not in known:
            known.add(sha256)
            found[name] = batches
    return found
