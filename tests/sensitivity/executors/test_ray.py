"""Two real Ray workers: the numbers of local threads, and workers that die or fall silent."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from qbench.graph.model import Model, store_model
from qbench.records import Layers, Status, SweepRecord
from qbench.sensitivity.executors import Assignment, LocalExecutor
from qbench.sensitivity.executors.crew import Member, Stage
from qbench.sensitivity.executors.dispatch import Abandoned
from qbench.sensitivity.executors.remote import RayExecutor, Terms
from qbench.sensitivity.looking import Feeding, Pools
from qbench.sensitivity.race import Cell
from qbench.sensitivity.racing import Pace, Racer
from qbench.sensitivity.sweep import Sweep
from qbench.testing.benches import OUTPUT, SPECS, made_sweep
from qbench.testing.graphs import tiny_encoder

pytest.importorskip("ray")

FEEDING, LOOKS = Feeding(SPECS, OUTPUT), (8, 16)
SILENCE_S = 4.0


@dataclass(frozen=True)
class Ready:
    """A sweep over a stored model, and its records as local threads give them."""

    sweep: Sweep
    layers: Layers
    model: Model
    work: list[Assignment]
    expected: list[SweepRecord]


def plain(records: Sequence[SweepRecord | None]) -> list[SweepRecord | None]:
    """Return records without what was timed."""
    return [r and replace(r, wall_s=0.0, latency_delta_ms=None) for r in records]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    folder = tmp_path_factory.mktemp("model")
    model = store_model(tiny_encoder(), folder, "tiny", {"output": OUTPUT})
    sweep, layers = made_sweep(48, model.ir)
    cells = [(x.name, form) for x in layers.layers for form in ("w4a16", "int8")]
    work = [Assignment(cell) for cell in cells]
    local = LocalExecutor(sweep.bench, layers.by_name(), workers=2)
    yield Ready(sweep, layers, model, work, list(filter(None, local.run(work))))
    sweep.close()


@pytest.fixture(scope="module")
def executor(ready: Ready) -> Iterator[RayExecutor]:
    terms = Terms(cores=2, silence_s=SILENCE_S)
    made = RayExecutor(ready.sweep.bench, ready.model, ready.layers, terms, FEEDING, LOOKS)
    yield made
    made.close()
    made.close()


def busy(executor: RayExecutor) -> Member:
    return next(m for m in executor.crew.members if m.stage is Stage.BUSY)


def pid_of(member: Member) -> int:
    assert member.facts is not None
    return member.facts.pid


def test_records_are_those_of_local_threads(ready: Ready, executor: RayExecutor) -> None:
    records = list(executor.run(ready.work))
    assert plain(records) == plain(ready.expected)
    assert sum(r.status is Status.OK for r in ready.expected) > 10
    pids = {pid_of(member) for member in executor.crew.members}
    assert len(pids) == 2 and os.getpid() not in pids
    assert all(member.cells > 0 for member in executor.crew.members)
    told = executor.describe()
    assert told["workers"] == 2 and not told["lost"] and not told["refused"]
    assert sum(told["assignments"].values()) == len(ready.work)


def linear_saves(records: Sequence[SweepRecord]) -> dict[Cell, float]:
    saved = {"int8": 1.0, "w4a16": 0.6}
    return {(r.layer, r.format): saved[r.format] for r in records if r.kind == "linear"}


def test_a_race_comes_to_what_it_comes_to_in_local_threads(
    ready: Ready, executor: RayExecutor
) -> None:
    cells = [a.cell for a in ready.work]
    finals, looked = [], []
    for measured_by in (executor, None):
        pools = Pools(ready.sweep.bench, ready.layers, FEEDING, LOOKS)
        racer = Racer(pools, ready.layers, linear_saves, Pace(workers=2))
        if measured_by is not None:
            racer.executor = measured_by
        records = list(racer.run(cells))
        racer.close()
        finals.append({(r.layer, r.format): plain([r]) for r in records})
        looked.append(racer.jobs)
    assert finals[0] == finals[1] and looked[0] == looked[1]
    assert {job.look for job in looked[0]} >= {0, None}


def test_what_a_killed_worker_had_is_measured_again(ready: Ready, executor: RayExecutor) -> None:
    before, records = len(executor.crew.tally.lost), []
    for record in executor.run(ready.work):
        records.append(record)
        if len(records) in (4, 12):
            os.kill(pid_of(busy(executor)), signal.SIGKILL)
    assert plain(records) == plain(ready.expected)
    assert len(executor.crew.tally.lost) - before == 2
    assert len(executor.crew.members) == 2, "others are started in their place"


def test_a_silent_worker_is_noticed_in_seconds(ready: Ready, executor: RayExecutor) -> None:
    for _ in executor.run(ready.work[:2]):
        pass  # both workers are there again
    before, records, stopped, began, pid = len(executor.crew.tally.lost), [], 0, 0.0, 0
    for record in executor.run(ready.work):
        records.append(record)
        if not pid:
            pid, began = pid_of(busy(executor)), time.monotonic()
            os.kill(pid, signal.SIGSTOP)
        elif not stopped and len(executor.crew.tally.lost) > before:
            stopped = 1
            assert time.monotonic() - began < 4 * SILENCE_S
    assert plain(records) == plain(ready.expected)
    assert "no sign of life" in executor.crew.tally.lost[-1]
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    pytest.fail("the stopped worker is still there")


def test_a_budget_leaves_the_rest_without_a_record(ready: Ready, executor: RayExecutor) -> None:
    got: list[SweepRecord | None] = []
    for record in executor.run(ready.work, over=lambda: len(got) >= 3):
        got.append(record)
    assert len(got) == len(ready.work) and got[-1] is None
    measured = [r for r in got if r is not None]
    assert 3 <= len(measured) < len(ready.work)
    assert plain(measured) == plain(ready.expected[: len(measured)])


def test_a_run_that_was_left_early_does_not_disturb_the_next(
    ready: Ready, executor: RayExecutor
) -> None:
    with contextlib.closing(executor.run(ready.work)) as left:
        next(left)
    assert plain(list(executor.run(ready.work[6:10]))) == plain(ready.expected[6:10])


def test_a_cell_whose_workers_always_die_is_a_failed_row(
    ready: Ready, executor: RayExecutor
) -> None:
    record = executor._record(Abandoned(ready.work[0], ("its worker died",) * 3))
    assert record is not None and record.status is Status.FAILED
    assert "given up after 3 workers" in record.reason and "--executor local" in record.remedy
    assert (record.layer, record.format) == ready.work[0].cell
