"""Closed sub-pools: nested, closed, and diverging on their own as the whole would."""

from __future__ import annotations

import numpy as np
import pytest

from qbench.graph.model import TensorSpec
from qbench.sensitivity.subpools import (
    items_of_samples,
    look_batches,
    look_divergence,
    make_looks,
    transfer,
)
from qbench.tasks.base import Task
from qbench.tasks.metrics import MRR
from qbench.tasks.ranking import Rights
from qbench.tasks.retrieval import Retrieval
from qbench.tasks.similarity import Similarity
from qbench.tasks.unlabelled import Unlabelled

SPECS = (TensorSpec("input_ids", "int64", ("batch", "sequence")),)


def codes(count: int, seed: int = 0) -> tuple[dict[str, list[int]], ...]:
    lengths = np.random.default_rng(seed).integers(3, 9, count)
    return tuple({"input_ids": [1] * int(length)} for length in lengths)


def retrieval(queries: int = 40) -> Retrieval:
    """Return queries of which each has one right answer, and the first has three."""
    candidates = queries + 10
    query = np.array([0, 0, *range(queries)])
    order = np.argsort(query, kind="stable")
    answer = np.array([candidates - 1, candidates - 2, *range(queries)])
    texts = tuple((f"t{i}", None) for i in range(queries + candidates))
    rights = Rights(query[order], answer[order])
    names = tuple(map(str, range(queries)))
    return Retrieval(names, texts, codes(queries + candidates), rights, metrics=(MRR,))


def similarity() -> Similarity:
    texts = tuple((f"t{i}", None) for i in range(40))
    return Similarity(tuple(map(str, range(20))), texts, codes(40), np.linspace(0, 1, 20))


def unlabelled() -> Unlabelled:
    texts = tuple((f"t{i}", None) for i in range(30))
    return Unlabelled(tuple(map(str, range(30))), texts, codes(30))


TASKS = [retrieval(), similarity(), unlabelled()]


def outputs_of(task: Task, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(task.items, 12)).astype(np.float32)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_looks_are_nested_and_closed(task: Task) -> None:
    needs = items_of_samples(task)
    assert needs is not None
    looks = make_looks(task, (4, 10))
    assert [len(look.samples) for look in looks] == [4, 10]
    for look in looks:
        assert set(np.concatenate([needs[s] for s in look.samples])) <= set(look.items)
    small, large = looks
    assert set(small.samples) <= set(large.samples)
    assert set(small.items) | set(large.added) == set(large.items)
    assert not set(small.items) & set(large.added)


def test_a_closed_pool_has_distractors_and_all_right_answers() -> None:
    task = retrieval()
    for seed in range(20):
        look = make_looks(task, (8,), seed)[0]
        candidates = set(look.items[look.items >= task.n] - task.n)
        own = {int(c) for q in look.samples for c in task.rights.candidate[task.rights.query == q]}
        assert own <= candidates
        assert len(candidates) >= 8


def test_the_longest_items_stay_out() -> None:
    task = unlabelled()
    lengths = np.array([len(item["input_ids"]) for item in task.encoded])
    look = make_looks(task, (10,))[0]
    assert lengths[look.items].max() <= np.quantile(lengths, 0.8)


def test_no_look_takes_most_of_the_samples() -> None:
    assert [len(look.samples) for look in make_looks(unlabelled(), (4, 16))] == [4]
    assert make_looks(unlabelled(), (1, 16)) == ()


def test_a_task_that_does_not_tell_its_items_has_no_looks() -> None:
    task = unlabelled()
    odd = type("Odd", (), {"n": 7, "items": 30, "encoded": task.encoded, "name": "odd"})()
    assert items_of_samples(odd) is None
    assert make_looks(odd, (2,)) == ()


@pytest.mark.parametrize("task", TASKS[1:], ids=lambda task: task.name)
def test_samples_of_their_own_diverge_as_in_the_whole(task: Task) -> None:
    before, after = outputs_of(task), outputs_of(task, 1)
    look = make_looks(task, (6,))[0]
    whole = task.divergence(before, after)
    part = look_divergence(task, look, before[look.items], after[look.items])
    np.testing.assert_allclose(part, whole[look.samples])


def test_a_closed_pool_diverges_as_the_pool_that_it_is() -> None:
    task = retrieval()
    before, after = outputs_of(task), outputs_of(task, 1)
    look = make_looks(task, (8,))[0]
    part = look_divergence(task, look, before[look.items], after[look.items])
    assert part.shape == (8,)
    assert (part > 0).all()
    assert not look_divergence(task, look, before[look.items], before[look.items]).any()


def test_transfer_is_one_where_samples_stand_alone_and_moves_toward_a_larger_pool() -> None:
    task = unlabelled()
    assert transfer(task, make_looks(task, (12,))[0], outputs_of(task)) == pytest.approx(1, rel=0.3)
    pool = retrieval()
    outputs, off = outputs_of(pool), []
    moved = (outputs + 0.05 * np.random.default_rng(9).normal(size=outputs.shape)).astype("f4")
    for seed in range(12):
        look = make_looks(pool, (8,), seed)[0]
        part = look_divergence(pool, look, outputs[look.items], moved[look.items]).mean()
        full = pool.divergence(outputs, moved).mean()
        off.append(np.log(full / (transfer(pool, look, outputs) * part)))
    assert np.mean(off) == pytest.approx(0, abs=0.4)


def test_batches_hold_what_a_look_adds_and_nothing_is_padded() -> None:
    task = retrieval()
    looks = make_looks(task, (4, 12))
    for look in looks:
        batches = look_batches(task, look, SPECS, max_tokens=24)
        rows = np.concatenate([batch.rows for batch in batches])
        assert sorted(rows) == sorted(look.added)
        assert all(batch.tokens == batch.padded_tokens for batch in batches)


def test_looks_are_the_same_for_a_seed() -> None:
    task = retrieval()
    one, two = make_looks(task, (4, 12), 5), make_looks(task, (4, 12), 5)
    assert all((a.items == b.items).all() for a, b in zip(one, two, strict=True))
    assert make_looks(task, (4, 12), 6)[0].items.tolist() != one[0].items.tolist()
