"""The sweep's benchmark: its estimates of work, its part of the cells, and what it prints."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from qbench.records import Layers
from qbench.sensitivity.sweep import Sweep
from qbench.testing.benches import OUTPUT, made_sweep

FILE = Path(__file__).parents[2] / "benchmarks" / "sweep.py"
KEYS = [
    "replay_work_ratio", "replay_floor_ratio", "replay_wall_ratio", "race_wall_ratio",
    "rank_spearman", "plan_cost_ratio", "plan_same_verdict", "peak_rss_mb",
]  # fmt: skip


@pytest.fixture(scope="module")
def benchmark_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sweep_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ready() -> Iterator[tuple[Sweep, Layers]]:
    sweep, layers = made_sweep()
    yield sweep, layers
    sweep.close()


def test_replay_does_little_more_than_the_descendants(
    benchmark_module: ModuleType, ready: tuple[Sweep, Layers]
) -> None:
    work = benchmark_module.Work(ready[0].bench.replay)
    layers = ready[1].layers
    for layer in layers:
        assert 0 < work.floor(layer) <= work.replayed(layer) + 1e-9 <= 1 + 2e-9
    assert work.floor(layers[-1]) < work.floor(layers[0])


def test_both_ways_agree_and_are_accounted_for(
    benchmark_module: ModuleType, ready: tuple[Sweep, Layers]
) -> None:
    bench, layers = ready[0].bench, ready[1].layers
    cells = benchmark_module.measurable(bench, layers, ("fp16", "int8", "w4a16"))
    cells = benchmark_module.stratified(cells, 9)
    assert {name for _, name in cells} == {"fp16", "int8", "w4a16"}
    spent = {name: benchmark_module.Spent() for name in ("naive", "replay", "race", "floor")}
    model = bench.replay.model
    records = list(benchmark_module.compare(bench, cells, model, OUTPUT, spent))
    assert len(records) == len(cells) == spent["naive"].work
    for key, value in spent["naive"].divergence.items():
        assert spent["replay"].divergence[key] == pytest.approx(value, rel=0.05, abs=1e-9)
    spent["race"].divergence = dict(spent["replay"].divergence)
    spent["race"].wall_s, spent["race"].peak_mb = 0.1, 200.0
    said = benchmark_module.ratios(spent, 1.0, True)
    assert list(said) == KEYS
    assert said["rank_spearman"] == pytest.approx(1.0)
    assert said["replay_floor_ratio"] <= said["replay_work_ratio"] <= 1
    assert "naive" in benchmark_module.table(spent, said, "not built")


def test_a_stratified_part_holds_every_format(benchmark_module: ModuleType) -> None:
    cells = [(i, name) for i in range(20) for name in ("a", "b")]
    picked = benchmark_module.stratified(cells, 8)
    assert picked == [(i, name) for i in (0, 8, 16) for name in ("a", "b")]
