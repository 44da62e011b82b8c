"""Preflight: each cell once, the chain against the whole graph, and a forecast that can refuse."""

from __future__ import annotations

import numpy as np
import pytest

from qbench.backends import backend_named
from qbench.errors import InputError, MeasurementError
from qbench.graph.layers import find_layers
from qbench.lowering import LOWERINGS
from qbench.records import Estimate, Status
from qbench.runtime.ort import open_session, settings_for
from qbench.sensitivity.preflight import (
    Forecast,
    Preflight,
    check_chain,
    check_limits,
    forecast,
    stand_ins,
    try_cells,
)
from qbench.sensitivity.replay import Replay
from qbench.sensitivity.sweep import Sweep
from qbench.tasks import Batch
from qbench.tasks.unlabelled import Unlabelled
from qbench.testing.graphs import tiny_encoder

CPU = backend_named("ort-cpu")
FORMATS = tuple(LOWERINGS)


def batches_of(count: int = 3) -> tuple[Batch, ...]:
    rng = np.random.default_rng(0)
    made = []
    for index in range(count):
        shape = (2, 4 + index)
        feeds = {
            "input_ids": rng.integers(0, 100, shape),
            "attention_mask": np.ones(shape, np.int64),
        }
        rows = np.arange(2 * index, 2 * index + 2)
        made.append(Batch(rows, feeds, int(np.prod(shape)), int(np.prod(shape))))
    return tuple(made)


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    model = tiny_encoder(seed=0)
    layers = find_layers(model)
    batches = batches_of()
    replay = Replay(model, layers, batches, settings_for(CPU, 1), str(model.graph.outputs[0].name))
    items = sum(len(batch.rows) for batch in batches)
    encoded = tuple({"input_ids": [1, 2, 3]} for _ in range(items))
    task = Unlabelled(
        texts=tuple((str(i), None) for i in range(items)),
        encoded=encoded,
        ids=tuple(str(i) for i in range(items)),
    )
    clips = {edge.tensor: 4.0 for layer in layers.layers for edge in layer.edges}
    return Sweep(replay, task, CPU, clips, ())


def test_every_cell_is_tried_once(sweep: Sweep) -> None:
    layers = find_layers(tiny_encoder(seed=0)).layers
    tried = list(try_cells(sweep.bench, layers, FORMATS))
    assert len(tried) == len(layers) * len(FORMATS)
    refused = {record.status for _, _, record, _ in tried if record is not None}
    assert refused <= {Status.NOT_APPLICABLE, Status.NOT_YET}
    assert any(record is None for _, _, record, _ in tried)


def test_the_chain_is_the_whole_graph(sweep: Sweep) -> None:
    replay = sweep.bench.replay
    model = tiny_encoder(seed=0)
    with open_session(model, replay.settings) as session:
        whole = next(iter(session.run(replay.batches[0].feeds).values()))
    assert check_chain(replay, whole) <= 1e-5
    with pytest.raises(MeasurementError, match="differs from the whole graph"):
        check_chain(replay, whole + 0.1)


def test_the_forecast_adds_up_suffixes(sweep: Sweep) -> None:
    layers = find_layers(tiny_encoder(seed=0)).layers
    cells = [(layer.name, "fp16") for layer in layers]
    expected = forecast(sweep.bench, Preflight(), layers, cells)
    assert expected.cells == len(cells)
    assert 0 < expected.wall_s.low <= expected.wall_s.value <= expected.wall_s.high
    suffix = sweep.bench.replay.suffix_seconds()
    assert (np.diff(suffix, axis=1) <= 0).all()


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    expected = Forecast(10, Estimate(1.0, 0.5, 2.0, 1), 6_000_000_000, 2_000_000)
    check_limits(expected, None, 10**9)
    with pytest.raises(InputError, match=r"6\.00 GB.*4\.00"):
        check_limits(expected, 4 * 10**9, 10**9)
    with pytest.raises(InputError, match="free"):
        check_limits(expected, None, 10**6)
    with pytest.raises(InputError, match=r"allows 1 MB; of the activations 0 MB are in memory"):
        check_limits(expected, 10**6, 10**9)


def test_in_a_race_one_layer_stands_for_those_that_do_the_same_work(sweep: Sweep) -> None:
    layers = find_layers(tiny_encoder(seed=0)).layers
    chosen = stand_ins(layers)
    works = {(layer.kind, layer.weight_shape) for layer in layers}
    assert {(layer.kind, layer.weight_shape) for layer in chosen} == works
    assert len(chosen) == len(works) < len(layers)
    flight = Preflight(overhead_s={(layer.name, "fp16"): 1.0 for layer in chosen})
    cells = [(layer.name, name) for layer in layers for name in ("fp16", "w4a16")]
    full = forecast(sweep.bench, flight, layers, cells)
    race = forecast(sweep.bench, flight, layers, cells, looks=(2, 4))
    assert full.cells == race.cells < len(cells)
    assert race.wall_s.low < full.wall_s.low and race.wall_s.value < full.wall_s.value
    assert race.wall_s.high == full.wall_s.high
