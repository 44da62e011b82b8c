"""Closed sub-pools: nested parts of a task that can be run, and diverge, on their own.

A cell that is run on a part of the samples needs the items of that part alone. Where a sample's
divergence depends on its own items, that is all there is to it. Retrieval is different: a query
ranks a pool, so its part is a *closed* pool: some queries, all their right answers, and fixed
distractors. Its divergence is another quantity than that of the full pool, which is why a cell is
stopped by it and never recorded as if it had been measured on the full pool.

How the two compare is known before any cell runs: ``transfer`` moves the reference's outputs at
random and reads both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from qbench.tasks.base import Array, Task
from qbench.tasks.batches import Batch, InputSpec, make_batches
from qbench.tasks.padding import can_pad
from qbench.tasks.ranking import Rights
from qbench.tasks.retrieval import Retrieval
from qbench.tasks.similarity import Similarity

#: Distractors of a closed pool, as a share of the queries of the first look.
_DISTRACTORS = 0.25
#: Items longer than this share of all stay out of the pools: they are most of the price.
_LONGEST = 0.8
#: Size of the random moves of the reference's outputs, beside their own length.
_MOVES = (0.01, 0.03, 0.1)


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """What a cell is measured on when it is looked at once more.

    Attributes:
        samples: Samples of the task, ascending, those of earlier looks included, shape [m].
        items: Items they need, ascending, those of earlier looks included, shape [k].
        added: Items that this look adds, ascending.
    """

    samples: Array
    items: Array
    added: Array


def items_of_samples(task: Task) -> tuple[Array, ...] | None:
    """Return the items that each sample needs; ``None`` where the task does not tell."""
    if isinstance(task, Retrieval):
        return tuple(
            np.concatenate(([query], task.n + task.rights.between(query, query + 1).candidate))
            for query in range(task.n)
        )
    if isinstance(task, Similarity):
        return tuple(np.array([pair, task.n + pair]) for pair in range(task.n))
    if task.items == task.n:
        return tuple(np.array([sample]) for sample in range(task.n))
    return None


def make_looks(task: Task, sizes: Sequence[int], seed: int = 0) -> tuple[Look, ...]:
    """Return nested looks of so many samples each; empty where no part of a task stands alone.

    Samples are drawn at random among those without one of the longest fifth of items. Sizes beyond
    half of the samples are left out: the full task costs little more.

    Args:
        task: The task on the sweep split.
        sizes: Samples of each look, ascending.
        seed: Seed of the draw.
    """
    needs = items_of_samples(task)
    sizes = sorted({size for size in sizes if 2 <= size <= task.n // 2})
    if needs is None or not sizes:
        return ()
    rng = np.random.default_rng([seed, task.n, 5])
    order = _affordable(task, needs, rng.permutation(task.n))
    distractors = _distractors(task, sizes[0], rng)
    looks: list[Look] = []
    before: Array = np.empty(0, np.int64)
    for size in sizes:
        samples = np.sort(order[:size])
        own = np.concatenate([needs[sample] for sample in samples])
        items = np.unique(np.concatenate([own, distractors]).astype(np.int64))
        looks.append(Look(samples, items, np.setdiff1d(items, before)))
        before = items
    return tuple(looks)


def _affordable(task: Task, needs: Sequence[Array], order: Array) -> Array:
    """Return the samples in an order that has those with the longest items last."""
    lengths = _lengths(task)
    limit = np.quantile(lengths, _LONGEST)
    long = np.array([bool((lengths[needs[sample]] > limit).any()) for sample in order])
    return np.concatenate([order[~long], order[long]])


def _distractors(task: Task, queries: int, rng: np.random.Generator) -> Array:
    """Return candidates that every closed pool holds; none where samples need no pool."""
    if not isinstance(task, Retrieval):
        return np.empty(0, np.int64)
    lengths = _lengths(task)[task.n :]
    short = np.flatnonzero(lengths <= np.quantile(lengths, _LONGEST))
    count = min(len(short), int(np.ceil(queries * _DISTRACTORS)))
    return np.asarray(task.n + rng.choice(short, count, replace=False))


def _lengths(task: Task) -> Array:
    return np.array([len(item["input_ids"]) for item in task.encoded])


def look_batches(
    task: Task,
    look: Look,
    specs: Sequence[InputSpec],
    *,
    max_tokens: int,
    pad_id: int = 0,
    padding: float = 0.0,
) -> tuple[Batch, ...]:
    """Return frozen batches of what a look adds; their rows are items of the task.

    A look is small: a batch for each length would be many, and a batch has its price whatever it
    holds. So items of neighbouring lengths share one where the graph takes a mask.

    Args:
        task: The task.
        look: The look.
        specs: Inputs of the graph.
        max_tokens: Most positions of a batch.
        pad_id: Token id of padded positions.
        padding: Most padded positions of a batch, as a share of its tokens.
    """
    lengths = _lengths(task)[look.added]
    batches: list[Batch] = []
    for group in _neighbours(lengths, padding if can_pad(specs) else 0.0):
        own = make_batches(
            [task.encoded[item] for item in look.added[group]],
            specs,
            max_tokens=max_tokens,
            equal_length=len(set(lengths[group])) == 1,
            pad_id=pad_id,
        )
        batches += [replace(batch, rows=look.added[group][batch.rows]) for batch in own]
    return tuple(batches)


def _neighbours(lengths: Array, padding: float) -> list[Array]:
    """Return groups of rows, shortest first, that pad at most such a share of their tokens."""
    groups: list[list[int]] = []
    for row in np.argsort(lengths, kind="stable"):
        members = [*groups[-1], int(row)] if groups else [int(row)]
        own = lengths[members]
        if groups and len(members) * own.max() <= (1.0 + padding) * own.sum():
            groups[-1] = members
        else:
            groups.append([int(row)])
    return [np.array(group, np.int64) for group in groups]


def look_divergence(task: Task, look: Look, reference: Array, outputs: Array) -> Array:
    """Return the divergence of a look's samples [m] from outputs of its items alone.

    Args:
        task: The full task.
        look: The look.
        reference: Reference outputs of the look's items, shape [k, …].
        outputs: Changed outputs of the same items.
    """
    if isinstance(task, Retrieval):
        return _closed(task, look).divergence(reference, outputs)
    before = np.zeros((task.items, *reference.shape[1:]), reference.dtype)
    before[:] = reference[:1]  # items outside of the look: equal on both sides, read by nobody
    after = before.copy()
    before[look.items], after[look.items] = reference, outputs
    return np.asarray(task.divergence(before, after)[look.samples])


def _closed(task: Retrieval, look: Look) -> Retrieval:
    """Return the retrieval task of a look's queries over its own candidates."""
    queries, candidates = look.samples, look.items[look.items >= task.n] - task.n
    keep = np.isin(task.rights.query, queries)
    return Retrieval(
        ids=tuple(task.ids[query] for query in queries),
        texts=tuple(task.texts[item] for item in look.items),
        encoded=tuple(task.encoded[item] for item in look.items),
        rights=Rights(
            np.searchsorted(queries, task.rights.query[keep]),
            np.searchsorted(candidates, task.rights.candidate[keep]),
        ),
        metrics=task.metrics,
    )


def transfer(task: Task, look: Look, reference: Array, seed: int = 0) -> float:
    """Return the full task's mean divergence over a look's, under random moves of the outputs.

    No model runs: reference outputs are moved by Gaussian noise of a few sizes.

    Args:
        task: The full task.
        look: The look.
        reference: Reference outputs of all items, shape [items, …].
        seed: Seed of the moves.

    Returns:
        The ratio; 1 where either is zero.
    """
    rng = np.random.default_rng([seed, task.n, 6])
    scale = np.sqrt(np.mean(np.square(reference.astype(np.float64))))
    ratios = []
    for move in _MOVES:
        moved = reference + (move * scale) * rng.standard_normal(reference.shape)
        moved = moved.astype(reference.dtype)
        full = float(task.divergence(reference, moved).mean())
        part = look_divergence(task, look, reference[look.items], moved[look.items]).mean()
        if full > 0 and part > 0:
            ratios.append(full / float(part))
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else 1.0
