from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from qbench.backends import BACKENDS
from qbench.errors import MeasurementError, ModelError
from qbench.graph.content import drop_weights
from qbench.graph.model import store_model
from qbench.graph.normal import normalise
from qbench.runtime.ort import SessionSettings, open_model, open_session, settings_for
from qbench.runtime.probe import annotate, probe_tensors
from qbench.testing.graphs import Sketch, tiny_encoder

SETTINGS = settings_for(BACKENDS["ort-cpu"], threads=1)

FEEDS = {
    "input_ids": np.array([[3, 4, 5]], np.int64),
    "attention_mask": np.ones((1, 3), np.int64),
    "token_type_ids": np.zeros((1, 3), np.int64),
}


def test_settings_come_from_the_backend() -> None:
    settings = settings_for(BACKENDS["ort-cpu"], threads=3)
    assert settings.threads == 3
    assert settings.entries == BACKENDS["ort-cpu"].session_options
    assert settings_for(BACKENDS["ort-cpu"]).threads >= 1


def test_memory_and_file_give_the_same_and_surplus_feeds_are_left_out(tmp_path: Path) -> None:
    stored = store_model(normalise(tiny_encoder()), tmp_path / "m", "tiny", {})
    settings = SessionSettings(threads=1)
    with open_session(stored.path, settings) as left, open_session(stored.ir, settings) as right:
        feeds = {**FEEDS, "surplus": np.zeros(3)}
        first, second = left.run(feeds), right.run(feeds)
        assert left.inputs == right.inputs and left.provider == "CPUExecutionProvider"
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


def test_what_the_runtime_refuses_is_told_in_its_own_words(tmp_path: Path) -> None:
    with (
        open_session(tiny_encoder(), SessionSettings(threads=1)) as session,
        pytest.raises(MeasurementError, match="input_ids"),
    ):
        session.run({})
    odd = (
        '<ir_version: 10, opset_import: ["" : 21, "my" : 1]> g (float[b] x) => (y) {y = my.Odd(x)}'
    )
    ir.save(ir.from_onnx_text(odd), tmp_path / "odd.onnx")
    with pytest.raises(ModelError, match="ONNX Runtime cannot load 'given': .*my:Odd"):
        open_model(tmp_path / "odd.onnx", "given")


def test_a_probe_tells_type_and_rank_of_every_tensor(tmp_path: Path) -> None:
    model = normalise(tiny_encoder())
    before = [str(value.name) for value in model.graph.outputs]
    facts = probe_tensors(model, FEEDS, SessionSettings(threads=1))
    produced = {str(v.name) for node in model.graph for v in node.outputs if v.name}
    assert produced <= set(facts) and "input_ids" in facts
    assert facts["input_ids"].dtype == "int64" and facts["input_ids"].rank == 2
    assert [str(value.name) for value in model.graph.outputs] == before
    for node in model.graph:
        for value in node.outputs:
            value.shape = value.type = None
    annotate(model, facts)
    assert all(v.shape is not None and v.dtype is not None for n in model.graph for v in n.outputs)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int64"])
def test_large_weights_in_memory_are_not_serialised(dtype: str, monkeypatch) -> None:
    sketch = Sketch(0)
    ids = sketch.input("ids", ir.DataType.INT64, ("n",))
    table = np.random.default_rng(0).integers(-99, 99, (2048, 64)).astype(dtype)
    model = sketch.model(y=sketch.op("Gather", sketch.constant("table", table), ids))
    sizes: list[int] = []
    inner = onnxruntime.InferenceSession

    def watched(payload: bytes, *arguments: object, **keywords: object) -> object:
        sizes.append(len(payload))
        return inner(payload, *arguments, **keywords)

    monkeypatch.setattr(onnxruntime, "InferenceSession", watched)
    picked = np.array([3, 2047, 0])
    with open_session(model, SETTINGS) as session:
        assert sizes[0] < 1000 < table.nbytes
        drop_weights(model)  # the session holds what it reads
        gc.collect()
        np.testing.assert_array_equal(session.run({"ids": picked})["y"], table[picked])


def test_sums_before_norms_are_not_fused_into_the_slow_kernel(tmp_path: Path) -> None:
    def operators(settings: SessionSettings) -> list[str]:
        path = tmp_path / "optimised.onnx"
        open_session(tiny_encoder(), replace(settings, optimised_path=path)).close()
        return [node.op_type for node in ir.load(path).graph]

    fused = "SkipLayerNormalization"
    assert fused in operators(replace(SETTINGS, entries={}))
    assert fused not in operators(SETTINGS)
    assert fused not in operators(settings_for(BACKENDS["tensorrt"], threads=1))
