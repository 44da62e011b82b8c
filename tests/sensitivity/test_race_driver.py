"""The raced sweep on a small graph: records, threads, continuation, budget, failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from qbench.records import Layers, Status, SweepRecord
from qbench.sensitivity.looking import Feeding, Pools
from qbench.sensitivity.race import Cell
from qbench.sensitivity.racing import Pace, Racer, is_final
from qbench.sensitivity.sweep import Sweep
from qbench.statistics import spearman
from qbench.testing.benches import OUTPUT, SPECS, made_sweep

FORMATS = ("fp16", "int8", "int8_dynamic", "w4a16")
NUMBERS = {"wall_s": 0.0, "latency_delta_ms": None}


@pytest.fixture(scope="module")
def ready() -> Iterator[tuple[Sweep, Layers]]:
    sweep, layers = made_sweep(items=48)
    yield sweep, layers
    sweep.close()


def pools_of(ready: tuple[Sweep, Layers]) -> Pools:
    return Pools(ready[0].bench, ready[1], Feeding(SPECS, OUTPUT), sizes=(8, 16))


def linear_saves(records: Sequence[SweepRecord]) -> dict[Cell, float]:
    """Return a saving for int8 on linear layers, a smaller one for w4a16, none for the rest."""
    saved = {"int8": 1.0, "w4a16": 0.6}
    return {
        (r.layer, r.format): saved[r.format]
        for r in records
        if r.kind == "linear" and r.format in saved
    }


def racer_of(ready: tuple[Sweep, Layers], pace: Pace, tolerance: float = 0.02) -> Racer:
    return Racer(pools_of(ready), ready[1], linear_saves, pace, tolerance)


def cells_of(layers: Layers) -> list[Cell]:
    return [(layer.name, name) for layer in layers.layers for name in FORMATS]


def final(records: Sequence[SweepRecord]) -> dict[Cell, SweepRecord]:
    return {(r.layer, r.format): replace(r, **NUMBERS) for r in records}


@pytest.fixture(scope="module")
def raced(ready: tuple[Sweep, Layers]) -> list[SweepRecord]:
    racer = racer_of(ready, Pace(workers=1))
    records = list(racer.run(cells_of(ready[1])))
    racer.close()
    assert racer.not_reached == ()
    return records


def test_every_cell_has_a_final_record(
    ready: tuple[Sweep, Layers], raced: list[SweepRecord]
) -> None:
    last = final(raced)
    assert set(last) == set(cells_of(ready[1]))
    for record in last.values():
        assert is_final(record)
        if record.status is Status.OK:
            assert record.divergence is not None
            assert record.divergence.low <= record.divergence.value <= record.divergence.high


def test_records_say_on_how_much_and_why(raced: list[SweepRecord]) -> None:
    fine = [r for r in final(raced).values() if r.status is Status.OK]
    stopped = [r for r in fine if r.effort != "full"]
    assert stopped
    for record in stopped:
        assert record.effort.startswith(f"stopped after {record.n} of 48 samples: ")
        assert record.divergence is not None
        assert record.divergence.method == "sub_pool"
        assert not record.drops
    for record in fine:
        if record.effort == "full":
            assert record.n == 48
            assert record.drops


def test_the_ranking_is_the_full_sweeps(
    ready: tuple[Sweep, Layers], raced: list[SweepRecord]
) -> None:
    sweep, layers = ready
    own = layers.by_name()
    pairs = [
        (record.divergence.value, full.divergence.value)
        for (layer, name), record in final(raced).items()
        if record.divergence and (full := sweep.measure(own[layer], name)).divergence
    ]
    raced_side, full_side = np.array(pairs).T
    assert spearman(raced_side, full_side).value >= 0.95


def test_side_by_side_is_as_one_by_one(
    ready: tuple[Sweep, Layers], raced: list[SweepRecord]
) -> None:
    racer = racer_of(ready, Pace(workers=3))
    assert final(list(racer.run(cells_of(ready[1])))) == final(raced)


@pytest.mark.parametrize("cut", [5, 60, -4])
def test_a_race_goes_on_where_it_stopped(
    ready: tuple[Sweep, Layers], raced: list[SweepRecord], cut: int
) -> None:
    known = list({(r.layer, r.format): r for r in raced[:cut]}.values())
    racer = racer_of(ready, Pace(workers=1))
    rest = list(racer.run(cells_of(ready[1]), known))
    done = {(r.layer, r.format) for r in known if r.status is Status.OK}
    assert not [job for job in racer.jobs if job.look == 0 and job.cell in done]
    assert final([*known, *rest]) == final(raced)


def test_nothing_is_measured_again_when_all_is_known(
    ready: tuple[Sweep, Layers], raced: list[SweepRecord]
) -> None:
    known = list({(r.layer, r.format): r for r in raced}.values())
    racer = racer_of(ready, Pace(workers=1))
    assert list(racer.run(cells_of(ready[1]), known)) == []
    assert racer.jobs == []


def test_survivors_are_measured_on_all_samples(ready: tuple[Sweep, Layers]) -> None:
    racer = racer_of(ready, Pace(workers=1), tolerance=0.0)
    cells = [cell for cell in cells_of(ready[1]) if cell[1] in ("int8", "w4a16")]
    last = final(list(racer.run(cells))).values()
    full = [r for r in last if r.effort == "full" and r.status is Status.OK]
    assert full
    assert {"sub_pool_1", "sub_pool_2", "divergence"} <= set(full[0].samples)


def test_a_budget_leaves_cells_out_and_says_which(ready: tuple[Sweep, Layers]) -> None:
    ticks = iter(range(10_000))
    racer = racer_of(ready, Pace(workers=1, budget_s=40, clock=lambda: float(next(ticks))))
    cells = cells_of(ready[1])
    records = final(list(racer.run(cells)))
    reached = [cell for cell, record in records.items() if record.status is Status.OK]
    assert 0 < len(reached) < len(cells)
    assert racer.not_reached
    assert not set(racer.not_reached) & set(records)
    assert set(racer.not_reached) | set(records) == set(cells)
    assert all(records[cell].effort.endswith("the time budget ended") for cell in reached)


def test_a_failing_cell_is_a_record_and_the_others_go_on(
    ready: tuple[Sweep, Layers], monkeypatch: pytest.MonkeyPatch
) -> None:
    racer = racer_of(ready, Pace(workers=2))
    cells = [cell for cell in cells_of(ready[1]) if cell[1] == "w4a16"]
    broken = next(layer for layer in ready[1].layers if layer.kind == "linear")
    whole = racer.pools.replay.change

    def change(layer: object, *rest: object, **more: object) -> object:
        if layer is broken:
            raise RuntimeError("does not load")
        return whole(layer, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(racer.pools.replay, "change", change)
    last = final(list(racer.run(cells)))
    record = last[broken.name, "w4a16"]
    assert record.status is Status.FAILED
    assert "does not load" in record.reason
    assert any(r.status is Status.OK for r in last.values())
