"""A worker without a cluster: what it opens, what it checks, and why it is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qbench.graph.model import Model, store_model
from qbench.records import Layers, SweepRecord
from qbench.sensitivity.executors import Assignment, LocalExecutor
from qbench.sensitivity.executors.kit import (
    Kit,
    kept_of,
    make_kit,
    model_files,
    own_facts,
    unlike,
)
from qbench.sensitivity.executors.worker import StoredActivations, Worker
from qbench.sensitivity.looking import Feeding
from qbench.sensitivity.sweep import Sweep
from qbench.testing.benches import OUTPUT, SPECS, made_sweep
from qbench.testing.graphs import tiny_encoder

Store = list[Mapping[str, Any]]
CELL = Assignment(("encoder.layer.0.intermediate.dense", "w4a16"))


def same(reference: Any) -> Any:
    """Stand for a store whose references are the arrays themselves."""
    return reference


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sweep, Layers, Model]]:
    folder = tmp_path_factory.mktemp("model")
    model = store_model(tiny_encoder(), folder, "tiny", {"output": OUTPUT})
    sweep, layers = made_sweep(24, model.ir)
    yield sweep, layers, model
    sweep.close()


@pytest.fixture(scope="module")
def kit(made: tuple[Sweep, Layers, Model]) -> Kit:
    sweep, layers, model = made
    return make_kit(sweep.bench, model, layers, Feeding(SPECS, OUTPUT), (4, 8))


@pytest.fixture(scope="module")
def store(made: tuple[Sweep, Layers, Model]) -> Store:
    bench = made[0].bench
    return [kept_of(bench, index) for index in range(len(bench.replay.batches))]


def plain(record: SweepRecord) -> SweepRecord:
    return replace(record, wall_s=0.0, latency_delta_ms=None)


def test_a_worker_measures_what_threads_measure(made, kit: Kit, store: Store) -> None:
    sweep, layers, _ = made
    worker = Worker()
    opened = worker.open(kit, store, fetch=same)
    assert not opened.refusal and not opened.needs_files
    (expected,) = LocalExecutor(sweep.bench, layers.by_name()).run([CELL])
    assert expected is not None and plain(worker.measure(CELL)) == plain(expected)
    assert worker.measure(replace(CELL, look=0)).samples["sub_pool_1"]
    worker.close()


def test_a_folder_that_cannot_be_reached_comes_through_the_store(
    kit: Kit, store: Store, tmp_path: Path
) -> None:
    away = replace(kit, folder=str(tmp_path / "nowhere"))
    worker = Worker()
    assert worker.open(away, store, fetch=same).needs_files
    opened = worker.open(away, store, model_files(Path(kit.folder)), fetch=same)
    assert not opened.needs_files and not opened.refusal
    assert worker.measure(CELL).divergence is not None
    worker.close()


def test_another_model_in_that_folder_is_not_taken(kit: Kit, store: Store, tmp_path: Path) -> None:
    store_model(tiny_encoder(seed=5), tmp_path, "other", {"output": OUTPUT})
    assert Worker().open(replace(kit, folder=str(tmp_path)), store, fetch=same).needs_files


def test_a_worker_with_another_reference_is_refused(kit: Kit, store: Store) -> None:
    moved = [{n: np.where(a == a.max(), a * (1 + 1e-6), a) for n, a in b.items()} for b in store]
    refusal = Worker().open(kit, moved, fetch=same).refusal
    assert "its own run of the reference differs in" in refusal


def test_a_worker_that_cuts_the_graph_elsewhere_is_refused(kit: Kit, store: Store) -> None:
    refusal = Worker().open(replace(kit, cuts=(1, *kit.cuts)), store, fetch=same).refusal
    assert "cuts the graph at" in refusal


def test_activations_that_are_gone_are_no_failure_of_the_cell(kit: Kit, store: Store) -> None:
    lost: set[int] = set()

    def fetch(index: int) -> Mapping[str, Any]:
        if index in lost:
            raise OSError("the store is gone")
        return store[index]

    worker = Worker()
    assert not worker.open(kit, list(range(len(store))), fetch=fetch).refusal
    lost |= set(range(len(store)))
    with pytest.raises(RuntimeError, match="activations are gone: OSError: the store is gone"):
        worker.measure(CELL)
    worker.close()


def test_stored_activations_are_fetched_one_batch_at_a_time(store: Store) -> None:
    fetched: list[int] = []

    def fetch(index: int) -> Mapping[str, Any]:
        fetched.append(index)
        return store[index]

    kept = StoredActivations(fetch, range(len(store)), OUTPUT)
    for index in (0, 0, 1, 0):
        assert OUTPUT not in kept.batch(index)
    assert fetched == [0, 1, 0] and len(kept) == len(store)
    np.testing.assert_array_equal(kept.scored(1), store[1][OUTPUT])


def test_versions_machine_and_code_that_differ_are_named() -> None:
    here = own_facts()
    assert unlike(here, here) == ""
    older = replace(here, versions={**here.versions, "onnxruntime": "1.0", "numpy": "2.0"})
    assert "onnxruntime is 1.0 there and" in unlike(older, here)
    assert "numpy is 2.0 there and" in unlike(older, here)
    other = replace(here, machine={**here.machine, "instructions": "none"})
    assert "its machine's instructions is 'none'" in unlike(other, here)
    edited = replace(here, code_sha256="0" * 64)
    assert unlike(edited, here) == "", "the very same files"
    assert "other code" in unlike(replace(edited, place="elsewhere"), here)
