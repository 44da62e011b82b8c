"""Activations: the same numbers in memory and on the disk, and nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qbench.backends import BACKENDS
from qbench.calibration.collect import calibrate
from qbench.errors import InputError
from qbench.graph.layers import find_layers
from qbench.records import to_dict
from qbench.runtime.memory import resident_bytes
from qbench.runtime.ort import open_session, settings_for
from qbench.sensitivity.activations import Activations, Limits
from qbench.sensitivity.cells import measure_cell
from qbench.sensitivity.replay import Replay
from qbench.sensitivity.sweep import Sweep
from qbench.tasks.batches import make_batches
from qbench.testing.benches import BACKEND, OUTPUT, SPECS, made_task
from qbench.testing.graphs import tiny_encoder

SETTINGS = settings_for(BACKENDS["ort-cpu"], threads=1)
#: Fields of a record that tell time.
TIMED = {"wall_s", "latency_delta_ms"}


def open_files(folder: Path) -> list[str]:
    handles = Path("/proc/self/fd")
    if not handles.is_dir():
        pytest.skip("this system does not tell open files")
    targets = []
    for handle in handles.iterdir():
        try:
            targets.append(os.readlink(handle))
        except OSError:
            continue
    return [target for target in targets if str(folder) in target]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_what_is_kept_comes_back(data) -> None:
    dtypes = st.sampled_from(["float32", "float64", "float16", "int64", "int8", "bool"])
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    given_: list[dict[str, np.ndarray]] = []
    for _ in range(data.draw(st.integers(1, 4))):
        names = data.draw(st.sets(st.sampled_from("abcd"), max_size=3))
        given_.append(
            {
                name: np.asarray(rng.normal(size=data.draw(shapes)) * 9).astype(data.draw(dtypes))
                for name in sorted(names)
            }
        )
    budget = data.draw(st.sampled_from([0, 64, 300, 1 << 30]))
    spilled = data.draw(st.sampled_from([0, 1, 100, 1 << 30]))
    with contextlib.closing(Activations(budget)) as kept:
        for arrays in given_:
            kept.append(arrays)
        kept.spill(spilled)
        check_kept(kept, given_)


def check_kept(kept: Activations, expected: list[dict[str, np.ndarray]]) -> None:
    assert len(kept) == len(expected)
    total = sum(a.nbytes for arrays in expected for a in arrays.values())
    assert kept.memory_bytes + kept.disk_bytes == total
    for index, arrays in enumerate(expected):
        back = kept.batch(index)
        assert list(back) == list(arrays)
        for name, array in arrays.items():
            assert back[name].dtype == array.dtype
            np.testing.assert_array_equal(back[name], array)


def test_the_budget_is_kept_and_the_rest_is_on_the_disk(tmp_path: Path) -> None:
    kept = Activations(1000, tmp_path)
    for _ in range(4):
        kept.append({"x": np.ones(100, np.float32)})
    assert (kept.memory_bytes, kept.disk_bytes) == (800, 800)
    assert not list(tmp_path.iterdir())  # the file has no name: nothing can be left of it
    assert open_files(tmp_path)
    held = kept.batch(3)["x"]
    kept.close()
    assert not [name for name in open_files(tmp_path) if "deleted" not in name]
    np.testing.assert_array_equal(held, np.ones(100, np.float32))
    assert not held.flags.writeable


def test_mapped_activations_take_no_memory_once_they_are_let_go(tmp_path: Path) -> None:
    kept = Activations(0, tmp_path)
    for _ in range(8):
        kept.append({"x": np.ones(2 << 20, np.float64)})
    before = resident_bytes()
    total = sum(float(kept.batch(index)["x"].sum()) for index in range(8))
    assert total == 8 * (2 << 20)
    assert resident_bytes() - before < 40 << 20  # two of 16 MiB at most, and not 128
    kept.close()


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch) -> None:
    class Full:
        def seek(self, place: int) -> None: ...

        def write(self, left: memoryview) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None: ...

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Full())
    replay = made_replay(Limits(budget_bytes=0, folder=tmp_path))
    with pytest.raises(InputError, match="disk is full"):
        replay.run_reference()
    replay.close()
    assert not list(tmp_path.iterdir())


def made_replay(limits: Limits, items: int = 12) -> Replay:
    model, task = tiny_encoder(), made_task(items)
    batches = make_batches(task.encoded, SPECS, max_tokens=40)
    return Replay(model, find_layers(model), batches, SETTINGS, OUTPUT, limits)


def records(limits: Limits) -> tuple[list[dict], tuple[int, int]]:
    task, replay = made_task(12), made_replay(limits)
    layers = find_layers(replay.model)
    found = calibrate(
        replay.model, layers, replay.batches, lambda graph: open_session(graph, SETTINGS)
    )
    clips = {seen.tensor: seen.absmax for seen in found.ranges if not seen.implicit}
    sweep = Sweep(replay, task, BACKEND, clips, found.ranges)
    where = replay.activation_bytes
    picked = layers.layers[:: max(len(layers.layers) // 6, 1)]
    made = [
        {k: v for k, v in to_dict(measure_cell(sweep.bench, x, f)).items() if k not in TIMED}
        for x in picked
        for f in ("fp16", "int8", "w4a16", "int8_dynamic")
    ]
    sweep.close()
    return made, where


def test_records_are_the_same_wherever_activations_lie(tmp_path: Path) -> None:
    all_of_it, (most, none) = records(Limits(budget_bytes=1 << 40))
    assert none == 0 and any(r["status"] == "ok" for r in all_of_it)
    for budget in (0, most // 3):
        some, (memory, disk) = records(Limits(budget_bytes=budget, folder=tmp_path))
        assert memory <= budget and memory + disk == most
        assert some == all_of_it
    assert not list(tmp_path.iterdir())


def test_a_memory_limit_makes_it_spill() -> None:
    limits = Limits(memory_limit=1)
    replay = made_replay(limits)
    replay.run_reference()
    assert replay.activation_bytes[0] == 0 < replay.activation_bytes[1]
    assert limits.excess(0) > 0
    replay.close()
    roomy = made_replay(replace(limits, memory_limit=resident_bytes() + (1 << 30)))
    roomy.run_reference()
    assert roomy.activation_bytes[1] == 0
    roomy.close()


def test_the_smaller_of_budget_and_limit_counts() -> None:
    limit = resident_bytes() + (1 << 30)
    assert Limits(budget_bytes=5).budget(0) == 5
    assert Limits(budget_bytes=5, memory_limit=limit).budget(0) == 5
    assert 0 < Limits(budget_bytes=1 << 40, memory_limit=limit).budget(0) <= 1 << 30
    assert Limits(memory_limit=limit).budget(1 << 40) == 0
    assert Limits().budget(0) > 0
