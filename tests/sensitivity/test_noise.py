from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from qbench.records import Estimate, Kind, Noise, Status, SweepRecord, from_dict, to_dict
from qbench.sensitivity.noise import (
    REFERENCE,
    UNCUT,
    Ground,
    calibration_spread,
    called_sensitive,
    engine_floors,
    floor_samples,
    halves_of,
    reference_floors,
    sensitive_layers,
)
from qbench.sensitivity.restored import lower_layers, lowerable
from qbench.tasks.batches import gather_outputs, make_batches
from qbench.tasks.compositions import PADDED, SHUFFLED, recompose
from qbench.testing.benches import OUTPUT, SETTINGS, SPECS, made_sweep


@pytest.fixture(scope="module")
def swept():
    sweep, layers = made_sweep()
    yield sweep, layers.layers
    sweep.close()


@pytest.fixture(scope="module")
def ground(swept) -> Ground:
    task, batches = swept[0].bench.task, swept[0].bench.replay.batches
    others = recompose(task.encoded, SPECS, max_tokens=40)
    return Ground(task, batches, others, SETTINGS, OUTPUT)


def test_recomposed_batches_hold_every_item_once_in_other_company(ground) -> None:
    encoded = ground.task.encoded
    own = make_batches(encoded, SPECS, max_tokens=40)
    mates = {tuple(sorted(batch.rows)) for batch in own}
    assert {SHUFFLED, PADDED} <= set(ground.others)
    for name, batches in ground.others.items():
        assert sorted(np.concatenate([b.rows for b in batches])) == list(range(len(encoded)))
        assert {tuple(sorted(batch.rows)) for batch in batches} != mates, name
        fed = gather_outputs(batches, [b.feeds["input_ids"][:, :4] for b in batches])
        assert [row.tolist() for row in fed] == [list(e["input_ids"][:4]) for e in encoded]
    assert any(b.padded_tokens > b.tokens for b in ground.others[PADDED])
    unmasked = recompose(encoded, SPECS[:1], max_tokens=40)
    assert PADDED not in unmasked


def test_one_composition_only_leaves_nothing_to_compare() -> None:
    assert recompose([{"input_ids": [1, 2]}], SPECS[:1], max_tokens=40) == {}


def test_the_reference_moves_by_rounding_alone_and_int8_dynamic_by_more(swept, ground) -> None:
    sweep, layers = swept
    bench = sweep.bench
    floors = reference_floors(ground, bench.replay.model, bench.reference.outputs)
    assert {f.composition for f in floors} == {UNCUT, *ground.others}
    assert all(f.what == REFERENCE and f.divergence.value < 1e-9 for f in floors)
    assert all(len(f.samples) == bench.task.n and 0 <= f.flip_rate <= 1 for f in floors)
    low = lowerable(bench, layers, "int8_dynamic")
    graph = lower_layers(bench.replay.model.clone(), bench, low, "int8_dynamic")
    hurried = replace(ground, budget_s=0.0)
    assert reference_floors(hurried, bench.replay.model, bench.reference.outputs) == floors[:2]
    dynamic = engine_floors(ground, graph, "int8_dynamic", bench.reference.outputs)
    worst = max(f.divergence.value for f in dynamic)
    assert dynamic[0].divergence.value == 0
    assert worst > 100 * max(f.divergence.value for f in floors)
    assert all(f.from_reference.value > 0 for f in dynamic)
    noise = Noise(floors=(*floors, *dynamic))
    assert from_dict(Noise, to_dict(noise)) == noise
    samples = floor_samples(noise.floors, bench.task.n)
    assert samples.max() < 1e-9 and (samples >= 0).all()


def test_clips_of_other_draws_move_a_cell_and_the_same_clips_do_not(swept) -> None:
    sweep, layers = swept
    bench = sweep.bench
    low = lowerable(bench, layers, "int8")[:2]
    cells = [(layer, "int8") for layer in low]
    tight = {name: clip / 3 for name, clip in bench.clips.items()}
    spreads = list(calibration_spread(bench, cells, [dict(bench.clips), {}, tight]))
    assert [s.layer for s in spreads] == [layer.name for layer in low]
    for spread in spreads:
        assert spread.draws[0] == spread.draws[1] == spread.divergence
        assert spread.draws[2] > spread.divergence
        assert (spread.low, spread.high) == (min(spread.draws), max(spread.draws))
    assert list(calibration_spread(bench, cells, [{}], budget_s=0.0)) == []


def cells_of(samples: np.ndarray, format_name: str = "int8") -> list[SweepRecord]:
    return [
        SweepRecord(
            f"layer.{i}", Kind.LINEAR, format_name, Status.OK, n=len(row),
            samples={"divergence": tuple(row.tolist())},
        )
        for i, row in enumerate(samples)
    ]  # fmt: skip


def drawn(seed: int, layers: int = 24, n: int = 200, factors=()) -> np.ndarray:
    """Heavy-tailed divergences that share their samples; some layers are worse by a factor."""
    rng = np.random.default_rng(seed)
    hardness = rng.lognormal(0, 0.8, n)
    samples = 1e-4 * hardness * rng.lognormal(0, 1, (layers, n))
    for layer, factor in enumerate(factors):
        samples[layer] *= factor
    return samples


def test_halves_are_disjoint_equal_and_always_the_same() -> None:
    one, two = halves_of(101)
    assert sorted([*one, *two]) == list(range(101)) and abs(len(one) - len(two)) == 1
    np.testing.assert_array_equal(one, halves_of(101)[0])


def test_simulation_layers_that_are_alike_are_rarely_called_and_bad_ones_always() -> None:
    false_calls, one_half, found = 0, 0, 0
    runs = 40
    for seed in range(runs):
        null = sensitive_layers(cells_of(drawn(seed)))
        false_calls += bool(called_sensitive(null))
        one_half += any("second draw" in call.reason for call in null)
        planted = sensitive_layers(cells_of(drawn(1000 + seed, factors=(6, 4, 4))))
        found += {"layer.0", "layer.1", "layer.2"} == set(called_sensitive(planted))
    assert false_calls <= 0.05 * runs, f"{false_calls} of {runs} runs call a layer for nothing"
    assert one_half > 0.05 * runs, "one half alone would have called one more often"
    assert found >= 0.9 * runs, f"the three bad layers were found in {found} of {runs} runs"


def test_no_layer_is_called_that_one_half_does_not_call() -> None:
    samples = drawn(3)
    only_there = halves_of(samples.shape[1])[0]
    samples[5, only_there] *= 30
    calls = {c.layer: c for c in sensitive_layers(cells_of(samples))}
    assert not calls["layer.5"].sensitive
    assert calls["layer.5"].ranks[0] == 1
    assert "second draw" in calls["layer.5"].reason


def test_below_the_noise_floor_nothing_is_called(swept, ground) -> None:
    samples = drawn(4, factors=(50,))
    cells = cells_of(samples)
    assert set(called_sensitive(sensitive_layers(cells))) == {"layer.0"}
    reference = swept[0].reference.outputs
    floor = reference_floors(ground, swept[0].bench.replay.model, reference)[0]
    loud = replace(floor, samples=tuple((100 * samples[0]).tolist()))
    calls = sensitive_layers(cells, [floor, loud])
    assert called_sensitive(calls) == {}
    assert "not beyond the noise floor in either half" in calls[0].reason


def test_a_cell_that_stopped_early_is_not_called_either_way() -> None:
    cells = cells_of(drawn(5, factors=(9,)))
    raced = replace(
        cells[0], layer="raced", samples={"sub_pool_1": (1.0,)}, divergence=Estimate(1, 0, 2, 20)
    )
    calls = {call.layer: call for call in sensitive_layers([*cells, raced])}
    assert calls["layer.0"].sensitive
    assert not calls["raced"].sensitive and calls["raced"].ranks == ()
    assert "part of the samples" in calls["raced"].reason


def test_formats_are_called_apart_and_cells_without_samples_left_out() -> None:
    failed = SweepRecord("layer.0", Kind.LINEAR, "w4a16", Status.FAILED, reason="x")
    short = cells_of(drawn(1, layers=2, n=3), "w8a16")
    calls = sensitive_layers([*cells_of(drawn(5, factors=(9,))), failed, *short])
    assert {c.format for c in calls} == {"int8"}
    assert list(called_sensitive(calls, "int8")) == ["layer.0"]
    assert called_sensitive(calls, "w4a16") == {}
    one = sensitive_layers(cells_of(drawn(6, layers=1)))
    assert len(one) == 1 and not one[0].sensitive
    assert math.isfinite(one[0].ranks[0])
