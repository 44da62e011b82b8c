from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qbench.backends import BACKENDS
from qbench.calibration.rows import sample_activations
from qbench.runtime.ort import open_session, settings_for
from qbench.tasks.batches import Batch
from qbench.testing.graphs import Sketch, tiny_encoder

SETTINGS = settings_for(BACKENDS["ort-cpu"], threads=1)


def sampled(model: ir.Model, tensors: list[str], batches: list[Batch], **how: int):
    return sample_activations(
        model, tensors, batches, lambda graph: open_session(graph, SETTINGS), **how
    )


def identity() -> ir.Model:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 8))
    return s.model(y=s.op("Mul", x, s.number(2.0)))


def batches_of(values: np.ndarray, size: int) -> list[Batch]:
    return [
        Batch(np.arange(i, i + len(part)), {"x": part}, len(part), len(part))
        for i in range(0, len(values), size)
        if len(part := values[i : i + size])
    ]


def test_channels_are_those_of_all_rows_and_a_few_rows_are_kept() -> None:
    values = np.random.default_rng(0).normal(size=(500, 8)).astype(np.float32)
    found = sampled(identity(), ["x", "y"], batches_of(values, 64), rows=32)
    seen = found["y"]
    assert seen.count == 500 and seen.rows.shape == (32, 8)
    np.testing.assert_allclose(seen.absmax, 2 * np.abs(values).max(axis=0), rtol=1e-6)
    np.testing.assert_allclose(seen.mean_abs, 2 * np.abs(values).mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(seen.mean_square, 4 * np.square(values).mean(axis=0), rtol=1e-5)
    known = {tuple(row) for row in (2 * values).tolist()}
    assert all(tuple(row) in known for row in seen.rows.tolist())
    assert len({tuple(row) for row in seen.rows.tolist()}) == 32


def test_the_draw_is_the_same_each_time_and_covers_all_batches() -> None:
    values = np.arange(4000, dtype=np.float32).reshape(500, 8)
    first, again = (
        sampled(identity(), ["x"], batches_of(values, 50), rows=100)["x"].rows for _ in range(2)
    )
    assert np.array_equal(first, again)
    assert len({int(row[0]) // 400 for row in first}) == 10
    other = sampled(identity(), ["x"], batches_of(values, 50), rows=100, seed=1)["x"].rows
    assert not np.array_equal(first, other)


def test_padding_and_tensors_without_channels_are_left_out() -> None:
    model = tiny_encoder(layers=1)
    ids = np.random.default_rng(0).integers(1, 99, (3, 6))
    mask = np.ones_like(ids)
    mask[1:, 4:] = 0
    feeds = {"input_ids": np.where(mask == 1, ids, 0), "attention_mask": mask}
    names = [str(v.name) for n in model.graph for v in n.outputs if n.op_type == "Gelu"]
    scores = [str(v.name) for n in model.graph for v in n.outputs if n.op_type == "Softmax"]
    found = sampled(model, [*names, *scores], [Batch(np.arange(3), feeds, 14, 18)])
    assert set(found) == set(names)
    assert found[names[0]].count == 14 == len(found[names[0]].rows)
    assert sampled(model, [], []) == {}
