from __future__ import annotations

import numpy as np
import pytest

from qbench.records import Kind, RestoredRecord, from_dict, to_dict
from qbench.runtime.ort import open_session
from qbench.runtime.passes import run_batches
from qbench.sensitivity.restored import Restoring, lower_layers, lowerable
from qbench.testing.benches import OUTPUT, SETTINGS, made_sweep


@pytest.fixture(scope="module")
def swept():
    sweep, layers = made_sweep()
    yield sweep, layers.layers
    sweep.close()


def whole(sweep, layers, format_name):
    """Outputs of the uncut graph with these layers lowered."""
    graph = lower_layers(sweep.bench.replay.model.clone(), sweep.bench, layers, format_name)
    with open_session(graph, SETTINGS) as session:
        return run_batches(session, sweep.bench.replay.batches, OUTPUT)


@pytest.mark.parametrize("format_name", ["w8a16", "int8"])
def test_chained_all_low_and_restored_are_the_uncut_graphs(swept, format_name) -> None:
    sweep, layers = swept
    low = lowerable(sweep.bench, layers, format_name)
    kinds = {layer.kind for layer in low}
    assert kinds == ({Kind.LINEAR, Kind.EMBEDDING} if format_name == "w8a16" else {Kind.LINEAR})
    restoring = Restoring(sweep.bench, low, format_name, OUTPUT)
    scale = np.abs(sweep.reference.outputs).max()
    tolerance = (1e-5 if format_name == "w8a16" else 2e-2) * scale
    np.testing.assert_allclose(restoring.outputs, whole(sweep, low, format_name), atol=tolerance)
    for layer in (low[0], low[len(low) // 2], low[-1]):
        others = [x for x in low if x is not layer]
        expected = whole(sweep, others, format_name)
        np.testing.assert_allclose(restoring.run_restored(layer), expected, atol=tolerance)
        assert not np.array_equal(restoring.run_restored(layer), restoring.outputs)
    restoring.close()


def test_the_interaction_is_single_minus_gain_on_the_same_samples(swept) -> None:
    sweep, layers = swept
    low = lowerable(sweep.bench, layers, "int8")
    restoring = Restoring(sweep.bench, low, "int8", OUTPUT)
    layer = low[2]
    single = sweep.measure(layer, "int8").samples["divergence"]
    record = restoring.measure(layer, single)
    assert (record.view, record.layer, record.format) == ("restored", layer.name, "int8")
    assert record.gain.value == pytest.approx(
        restoring.all_low.value - record.divergence.value, abs=1e-12
    )
    assert record.interaction.value == pytest.approx(
        record.single.value - record.gain.value, abs=1e-12
    )
    assert record.interaction.low <= record.interaction.value <= record.interaction.high
    assert from_dict(RestoredRecord, to_dict(record)) == record
    assert restoring.measure(layer).interaction is None
    restoring.close()


def test_one_low_layer_restored_is_the_reference(swept) -> None:
    sweep, layers = swept
    layer = lowerable(sweep.bench, layers, "int8")[0]
    restoring = Restoring(sweep.bench, [layer], "int8", OUTPUT)
    record = restoring.measure(layer, sweep.measure(layer, "int8").samples["divergence"])
    assert record.divergence.value < 1e-9
    assert record.interaction.value == pytest.approx(0, abs=1e-9), "alone, nothing interacts"
    restoring.close()
