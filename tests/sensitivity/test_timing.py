from __future__ import annotations

import pytest

from qbench.graph.model import store_model
from qbench.sensitivity import timing
from qbench.sensitivity.cells import measure_cell
from qbench.sensitivity.executors.kit import kept_of, make_kit
from qbench.sensitivity.executors.worker import Worker
from qbench.testing.benches import OUTPUT, made_sweep
from qbench.testing.graphs import tiny_encoder

NAME = "encoder.layer.0.intermediate.dense"


@pytest.mark.parametrize("batch", [1, 3, None])
def test_times_are_those_of_batches_of_the_size_that_was_asked(
    batch, tmp_path, monkeypatch
) -> None:
    """Here and in a worker elsewhere; what is scored is the task's batches either way."""
    seen: list[int] = []
    plain = timing._timed

    def watched(replay, index, at, session):
        seen.append(len(replay.batches[at].feeds["input_ids"]))
        return plain(replay, index, at, session)

    monkeypatch.setattr(timing, "_timed", watched)
    model = store_model(tiny_encoder(), tmp_path, "tiny", {"output": OUTPUT})
    sweep, layers = made_sweep(24, model.ir, batch=batch)
    own = [len(b.feeds["input_ids"]) for b in sweep.bench.replay.batches]
    layer = next(x for x in layers.layers if x.name == NAME)
    record = measure_cell(sweep.bench, layer, "int8")
    assert record.n == 24 and record.latency_delta_ms is not None
    assert set(seen) == ({batch} if batch else set(own))
    store = [kept_of(sweep.bench, index) for index in range(len(own))]
    worker = Worker()
    assert not worker.open(make_kit(sweep.bench, model, layers), store, fetch=lambda x: x).refusal
    seen.clear()
    assert worker._bench is not None
    assert measure_cell(worker._bench, layer, "int8").divergence == record.divergence
    assert set(seen) == ({batch} if batch else set(own))
    worker.close()
    sweep.close()
