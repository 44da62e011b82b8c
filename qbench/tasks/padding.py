"""Batches of a given size: of requests in the order in which they came, or to be timed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qbench.tasks.base import Array, Encoding
from qbench.tasks.batches import Batch, InputSpec, make_batches

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


def sized_batches(
    encoded: Sequence[Encoding],
    specs: Sequence[InputSpec],
    size: int,
    count: int,
    pad_id: int = 0,
) -> tuple[Batch, ...]:
    """Return at most ``count`` batches of ``size`` items each, spread evenly over the lengths.

    The items of a batch are neighbours in length. Where the graph reads no mask one item is
    repeated, and where there are fewer than ``size`` items all of them are.

    Args:
        encoded: Token ids, and what else the tokenizer gives, of each item.
        specs: Inputs of the graph.
        size: Items of a batch.
        count: Most batches.
        pad_id: Token id of padded positions.
    """
    order = np.argsort([len(item["input_ids"]) for item in encoded], kind="stable")
    padded = can_pad(specs)
    last = max(len(order) - (size if padded else 1), 0)
    made: list[Batch] = []
    for start in sorted({round(at) for at in np.linspace(0, last, count)}):
        rows = np.resize(order[start : start + size], size) if padded else order[[start] * size]
        items = [encoded[row] for row in rows]
        made += make_batches(
            items, specs, max_tokens=_NO_LIMIT, equal_length=not padded, pad_id=pad_id
        )
    return tuple(made)
