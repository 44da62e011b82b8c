from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.engine.build import (
    asked_formats,
    file_facts,
    label_nodes,
    lower_graph,
    rewritten_constants,
    write_engine,
)
from qbench.engine.realised import node_providers, read_realised
from qbench.engine.selftest import self_test
from qbench.errors import MeasurementError, PlanError
from qbench.graph.layers import find_layers
from qbench.graph.model import Model, store_model
from qbench.graph.normal import normalise
from qbench.lowering.edit import LAYER_KEY
from qbench.records import Kind, Plan, PlanLayer
from qbench.runtime.ort import open_session, settings_for
from qbench.sensitivity.replay import Replay
from qbench.tasks.batches import Batch
from qbench.testing.graphs import Sketch, decompose, tiny_convnet, tiny_decoder, tiny_encoder

BACKEND = BACKENDS["ort-cpu"]
SETTINGS = settings_for(BACKEND, threads=1)
IDS = np.random.default_rng(0).integers(1, 99, (3, 7))
TOKENS = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
IMAGE = {"image": np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype(np.float32)}
MIXED = ("int8", "w4a16", "int8_dynamic", "w8a16", "fp16", "fp32", "w4a8", "bf16", "fp8")


def stored(graph: ir.Model, folder: Path) -> Model:
    return store_model(normalise(graph), folder, "tiny", {})


def plan_of(model: Model, choose, clip: float = 4.0) -> Plan:
    layers = find_layers(model.ir)
    return Plan(
        version=1,
        backend="ort-cpu",
        model_source="tiny",
        model_sha256=model.sha256,
        layers=tuple(
            PlanLayer(x.name, x.kind, choose(i, x), clips={e.tensor: clip for e in x.edges})
            for i, x in enumerate(layers.layers)
        ),
        session_options=dict(BACKEND.session_options),
    )


def linear_in(format_name: str):
    return lambda _, layer: format_name if layer.kind is Kind.LINEAR else "fp32"


def mixed(index: int, layer) -> str:
    if layer.kind is Kind.LINEAR:
        return MIXED[index % len(MIXED)]
    if layer.kind is Kind.EMBEDDING:
        return "w8a16" if index % 2 else "fp16"
    if layer.kind not in (Kind.ACTIVATION, Kind.RESIDUAL_ADD) and index % 3 == 1:
        return "int8"
    return "fp16" if index % 3 == 0 else "fp32"


def build(model: Model, plan: Plan, folder: Path):
    layers = find_layers(model.ir)
    path, graph = write_engine(model, layers, plan, "plan-hash", folder)
    return path, graph, layers


def outputs(path: Path, feeds) -> dict[str, np.ndarray]:
    with open_session(path, SETTINGS) as session:
        return session.run(feeds)


def batch(feeds) -> Batch:
    size = len(next(iter(feeds.values())))
    return Batch(np.arange(size), feeds, size, size)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Model:
    return stored(tiny_encoder(), tmp_path_factory.mktemp("encoder"))


@pytest.mark.parametrize(
    "make, feeds",
    [
        (tiny_encoder, TOKENS),
        (lambda: decompose(tiny_encoder()), TOKENS),
        (tiny_decoder, {"input_ids": IDS}),
        (tiny_convnet, IMAGE),
    ],
    ids=["encoder", "decomposed", "decoder", "convnet"],
)
def test_a_plan_that_lowers_nothing_gives_the_reference_bit_for_bit(make, feeds, tmp_path) -> None:
    model = stored(make(), tmp_path / "model")
    path, *_ = build(model, plan_of(model, lambda *_: "fp32"), tmp_path / "engine")
    before, after = outputs(model.path, feeds), outputs(path, feeds)
    assert list(before) == list(after)
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    tested = self_test(path, model.path, [batch(feeds)], SETTINGS, model.output)
    assert tested.max_abs_diff == 0 and "bit for bit" in tested.text


def test_the_same_plan_and_model_are_the_same_bytes(encoder, tmp_path) -> None:
    plan = plan_of(encoder, mixed)
    hashes = {file_facts(build(encoder, plan, tmp_path / name)[0])[1] for name in ("a", "b")}
    shuffled = replace(plan, layers=plan.layers[::-1])
    hashes.add(file_facts(build(encoder, shuffled, tmp_path / "c")[0])[1])
    assert len(hashes) == 1
    other = plan_of(encoder, mixed, clip=5.0)
    assert file_facts(build(encoder, other, tmp_path / "d")[0])[1] not in hashes


def test_a_sweep_in_between_changes_no_byte(encoder, tmp_path) -> None:
    plan = plan_of(encoder, mixed)
    before = file_facts(build(encoder, plan, tmp_path / "a")[0])
    layers = find_layers(encoder.ir)
    Replay(encoder.ir, layers, [batch(TOKENS)], SETTINGS, encoder.output).close()
    assert file_facts(build(encoder, plan, tmp_path / "b")[0]) == before


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_engine as t
from qbench.engine.build import file_facts
folder = Path(sys.argv[2])
model = t.stored(t.tiny_encoder(), folder / "model")
print(file_facts(t.build(model, t.plan_of(model, t.mixed), folder / "engine")[0])[1])
"""


def test_another_process_writes_the_same_bytes(root, tmp_path) -> None:
    said = []
    for number in range(2):
        env = {**os.environ, "PYTHONHASHSEED": str(number), "PYTHONPATH": str(root)}
        folder = tmp_path / f"somewhere-{number}"
        command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(folder)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        said.append(done.stdout.strip().splitlines()[-1])
    assert said[0] == said[1] and len(said[0]) == 64


def test_a_mixed_plan_runs_near_the_reference(encoder, tmp_path) -> None:
    plan = plan_of(encoder, mixed)
    path, graph, layers = build(encoder, plan, tmp_path)
    before, after = outputs(encoder.path, TOKENS), outputs(path, TOKENS)
    cosine = (before["embedding"] * after["embedding"]).sum(axis=1)
    assert (cosine > 0.9).all() and (cosine < 1).any()
    tested = self_test(path, encoder.path, [batch(TOKENS)], SETTINGS, "embedding")
    assert 0 < tested.max_abs_diff < 0.5 and "cosine to the reference" in tested.text
    found = read_realised(path, graph, layers, plan, SETTINGS)
    assert found.formats == asked_formats(plan) and not found.fallbacks


@pytest.mark.parametrize(
    "name, kernel",
    [
        ("int8", "MatMulIntegerToFloat"),
        ("int8_dynamic", None),
        ("w8a16", "MatMulNBits"),
        ("w4a16", "MatMulNBits"),
        ("w4a8", "MatMulNBits(int8)"),
    ],
)
@pytest.mark.parametrize("make", [tiny_encoder, tiny_decoder], ids=["encoder", "decoder"])
def test_realised_formats_are_read_back(name, kernel, make, tmp_path) -> None:
    model = stored(make(), tmp_path / "model")
    plan = plan_of(model, linear_in(name))
    path, graph, layers = build(model, plan, tmp_path / "engine")
    found = read_realised(path, graph, layers, plan, SETTINGS)
    count = sum(x.kind is Kind.LINEAR for x in layers.layers)
    assert found.formats[name] == count and not found.fallbacks
    if kernel:
        assert found.kernels[kernel] == count


def test_layers_of_one_engine_multiply_in_int8_and_in_floating_point(encoder, tmp_path) -> None:
    """w4a8 and w4a16 store the same numbers; what they multiply in is written on the node."""
    linear = [x.name for x in find_layers(encoder.ir).layers if x.kind is Kind.LINEAR]
    eight = set(linear[::2])

    def engine(choose, name):
        plan = plan_of(encoder, choose)
        path, graph, layers = build(encoder, plan, tmp_path / name)
        realised = read_realised(path, graph, layers, plan, SETTINGS)
        assert not realised.fallbacks and realised.formats == asked_formats(plan)
        return realised.kernels, next(iter(outputs(path, TOKENS).values()))

    kernels, both = engine(
        lambda _, x: (
            {True: "w4a8", False: "w4a16"}[x.name in eight] if x.kind is Kind.LINEAR else "fp32"
        ),
        "both",
    )
    assert kernels["MatMulNBits(int8)"] == len(eight)
    assert kernels["MatMulNBits"] == len(linear) - len(eight)
    _, floating = engine(linear_in("w4a16"), "w4a16")
    _, whole = engine(linear_in("w4a8"), "w4a8")
    assert 0 < np.abs(both - floating).max() < 0.05 and 0 < np.abs(both - whole).max() < 0.05


def test_the_block_of_a_plan_is_the_engines(encoder, tmp_path) -> None:
    plan = plan_of(encoder, linear_in("w4a16"))
    told = replace(plan, layers=tuple(replace(row, block=16) for row in plan.layers))
    plain, _, _ = build(encoder, plan, tmp_path / "plain")
    path, graph, _ = build(encoder, told, tmp_path / "told")
    blocks = {n.attributes["block_size"].value for n in graph.graph if "block_size" in n.attributes}
    assert blocks == {16} and file_facts(path)[0] > file_facts(plain)[0]
    broken = replace(plan, layers=tuple(replace(row, block=7) for row in plan.layers))
    with pytest.raises(PlanError, match="got block 7; allowed: a divisor of K"):
        build(encoder, broken, tmp_path / "broken")


def head(k: int, n: int = 8, gemm: bool = False) -> ir.Model:
    s = Sketch(0)
    if gemm:
        x = s.input("x", ir.DataType.FLOAT, ("batch", k))
        return s.model(y=s.op("Gemm", x, s.weight("w", k, n), s.weight("b", n), at="m.lin"))
    x = s.input("x", ir.DataType.FLOAT, ("batch", "sequence", k))
    return s.model(y=s.op("Relu", s.linear(x, "m.lin", k, n)))


@pytest.mark.parametrize("name", ["w8a16", "w4a16"])
@pytest.mark.parametrize("k", [17, 100, 131])
def test_blocks_without_a_kernel_are_fallbacks_with_a_reason(name, k, tmp_path) -> None:
    model = stored(head(k), tmp_path / "model")
    plan = plan_of(model, linear_in(name))
    path, graph, layers = build(model, plan, tmp_path / "engine")
    found = read_realised(path, graph, layers, plan, SETTINGS)
    assert name not in found.formats
    (fallback,) = found.fallbacks
    assert (fallback.layer, fallback.asked, fallback.realised) == ("m.lin", name, "fp32")
    assert "MatMul" in fallback.reason and name in fallback.reason


@pytest.mark.parametrize("name", ["int8", "int8_dynamic", "w8a16", "w4a16", "w4a8"])
def test_a_gemm_is_realised_too(name, tmp_path) -> None:
    model = stored(head(64, gemm=True), tmp_path / "model")
    plan = plan_of(model, linear_in(name))
    path, graph, layers = build(model, plan, tmp_path / "engine")
    found = read_realised(path, graph, layers, plan, SETTINGS)
    assert found.formats == {name: 1}, found


@pytest.mark.parametrize("name", ["int8", "int8_dynamic", "w8a16", "w4a16"])
@pytest.mark.parametrize("told", [True, False], ids=["shapes told", "shapes not told"])
def test_a_graph_of_fixed_shape_is_realised_too(name, told, tmp_path) -> None:
    graph = tiny_encoder(layers=1)
    for value in graph.graph.inputs:
        value.shape = ir.Shape(IDS.shape)
    for node in graph.graph:
        for value in node.outputs:
            value.shape = value.shape if told or value.is_graph_output() else None
    model = stored(graph, tmp_path / "model")
    plan = plan_of(model, linear_in(name))
    path, written, layers = build(model, plan, tmp_path / "engine")
    found = read_realised(path, written, layers, plan, SETTINGS)
    assert found.formats[name] == 6 and not found.fallbacks, found
    before, after = outputs(model.path, TOKENS), outputs(path, TOKENS)
    assert ((before["embedding"] * after["embedding"]).sum(axis=1) > 0.95).all()


def test_nothing_of_the_machine_goes_in(encoder, tmp_path) -> None:
    graph = encoder.ir.clone()
    for node in graph.graph:
        node.metadata_props["pkg.torch.onnx.stack_trace"] = 'File "/home/someone/model.py"'
        node.doc_string = "/home/someone"
    graph.metadata_props["where"] = str(tmp_path)
    graph.doc_string = graph.graph.doc_string = str(tmp_path)
    for value in (*graph.graph.inputs, *graph.graph.outputs, *graph.graph.initializers.values()):
        value.doc_string = "/home/someone"
    plan = plan_of(encoder, mixed)
    path, *_ = build(replace(encoder, ir=graph), plan, tmp_path / "engine")
    data = path.read_bytes()
    for word in (b"stack_trace", b"/home/someone", str(tmp_path).encode()):
        assert word not in data
    assert file_facts(path) == file_facts(build(encoder, plan, tmp_path / "again")[0])


def test_layer_names_are_in_node_and_tensor_names(encoder, tmp_path) -> None:
    plan = plan_of(encoder, mixed)
    path, *_, layers = build(encoder, plan, tmp_path)
    engine = ir.load(path)
    assert dict(engine.metadata_props) == {
        "qbench.plan_sha256": "plan-hash",
        "qbench.model_sha256": encoder.sha256,
    }
    for layer in layers.layers:
        own = [n for n in engine.graph if n.metadata_props.get(LAYER_KEY) == layer.name]
        assert own or layer.kind is Kind.KV, layer.name
        for node in own:
            assert node.name.startswith(f"{layer.name}/")
            given = {v.name for v in engine.graph.outputs}
            names = [v.name for v in node.outputs if v.name not in given]
            assert all(name.startswith(f"{layer.name}/") for name in names), names
    names = [v.name for n in engine.graph for v in n.outputs]
    assert len(names) == len(set(names))


def test_weights_lie_beside_the_engine(encoder, tmp_path) -> None:
    path, *_ = build(encoder, plan_of(encoder, linear_in("int8")), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["engine.onnx", "engine.onnx.data"]
    size, sha256 = file_facts(path)
    files = [path, path.with_name("engine.onnx.data")]
    assert size == sum(f.stat().st_size for f in files)
    assert sha256 == hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()
    assert size < file_facts(encoder.path)[0]


@pytest.mark.parametrize(
    "clips, word", [({}, "no clip"), ({"*": 0.0}, "clips at 0"), ({"*": float("inf")}, "inf")]
)
def test_a_clip_that_cannot_be_used_is_an_error_of_the_plan(encoder, clips, word) -> None:
    plan = plan_of(encoder, linear_in("int8"))
    first = next(i for i, x in enumerate(plan.layers) if x.kind is Kind.LINEAR)
    broken = {tensor: clips["*"] for tensor in plan.layers[first].clips if "*" in clips}
    entries = list(plan.layers)
    entries[first] = replace(entries[first], clips=broken)
    with pytest.raises(PlanError, match=f"{entries[first].name}.*int8.*{word}"):
        lower_graph(encoder.ir, find_layers(encoder.ir), replace(plan, layers=tuple(entries)))


@pytest.mark.parametrize(
    "kind, name, word",
    [(Kind.LAYERNORM, "w8a16", "LayerNorm"), (Kind.EMBEDDING, "w4a16", "embedding")],
)
def test_a_format_that_a_layer_cannot_take_is_an_error_of_the_plan(encoder, kind, name, word):
    plan = plan_of(encoder, lambda _, layer: name if layer.kind is kind else "fp32")
    with pytest.raises(PlanError, match=word):
        lower_graph(encoder.ir, find_layers(encoder.ir), plan)


def test_an_unknown_layer_is_an_error_with_near_misses(encoder) -> None:
    plan = plan_of(encoder, lambda *_: "fp32")
    entry = replace(plan.layers[0], name="embeddings.word_embedding")
    with pytest.raises(PlanError, match="did you mean 'embeddings.word_embeddings'"):
        lower_graph(encoder.ir, find_layers(encoder.ir), replace(plan, layers=(entry,)))


def test_lowering_leaves_the_model_alone(encoder, tmp_path) -> None:
    before = ir.to_proto(encoder.ir).SerializeToString(deterministic=True)
    build(encoder, plan_of(encoder, mixed), tmp_path)
    assert ir.to_proto(encoder.ir).SerializeToString(deterministic=True) == before


def test_labels_do_not_collide() -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("a", "b", 8))
    y = s.op("MatMul", x, s.weight("m.lin/MatMul", 8, 8), at="m.lin")
    model = s.model(y=s.op("Relu", y))
    layers = find_layers(model)
    label_nodes(model, layers)
    names = [v.name for n in model.graph for v in n.outputs] + list(model.graph.initializers)
    assert len(names) == len(set(names))


def test_an_engine_that_the_runtime_miscomputes_is_no_engine(tmp_path) -> None:
    s, weight = Sketch(0), np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    weight[0] = 0  # what meets the outlier
    x = s.input("x", ir.DataType.FLOAT, ("batch", "sequence", 32))
    graph = s.model(y=s.op("MatMul", x, s.constant("w", weight), at="m.lin"))
    model = stored(graph, tmp_path / "model")
    path, *_ = build(model, plan_of(model, linear_in("w4a16")), tmp_path / "engine")
    feeds = {"x": np.random.default_rng(1).normal(size=(4, 3, 32)).astype(np.float32)}
    feeds["x"][..., 0] = 1e5
    fine = self_test(path, model.path, [batch(feeds)], SETTINGS, "y")
    assert 0 < fine.max_abs_diff < 5
    # In 8 bits an activation of 1 beside one of 1e5 is nothing: the fused kernel gives zeros.
    entries = {**SETTINGS.entries, "session.qdq_matmulnbits_accuracy_level": "4"}
    with pytest.raises(MeasurementError, match="a fused kernel miscomputes"):
        self_test(path, model.path, [batch(feeds)], replace(SETTINGS, entries=entries), "y")


def test_rounding_that_falls_otherwise_is_no_miscomputing_kernel(tmp_path) -> None:
    """Where outputs are near zero their angle says little: the distance from the reference does."""
    s, rng = Sketch(0), np.random.default_rng(0)
    weight = rng.normal(size=(32, 8)).astype(np.float32)
    weight[0] = 0
    x = s.input("x", ir.DataType.FLOAT, ("batch", "sequence", 32))
    first = s.op("MatMul", x, s.constant("w", weight), at="m.first")
    near = s.op("MatMul", x, s.constant("v", weight * np.float32(1.001)), at="m.second")
    graph = s.model(y=s.op("Sub", first, near))
    model = stored(graph, tmp_path / "model")
    plan = plan_of(model, lambda index, _: "fp32" if index else "w4a16")
    path, *_ = build(model, plan, tmp_path / "engine")
    feeds = {"x": rng.normal(size=(4, 3, 32)).astype(np.float32)}
    feeds["x"][..., 0] = 25.0  # in 8 bits the others lose some of their digits beside it
    entries = {**SETTINGS.entries, "session.qdq_matmulnbits_accuracy_level": "4"}
    settings = replace(SETTINGS, entries=entries)
    with open_session(path, settings) as fused, open_session(path, SETTINGS) as plain:
        a, b = (session.run(feeds, ["y"])["y"].ravel() for session in (fused, plain))
    assert a @ b < 0.99 * np.linalg.norm(a) * np.linalg.norm(b)
    assert self_test(path, model.path, [batch(feeds)], settings, "y").max_abs_diff > 0


def test_an_engine_that_gives_infinity_is_no_engine(tmp_path) -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 8))
    model = stored(s.model(y=s.op("Div", x, s.number(0.0))), tmp_path)
    feeds = {"x": np.ones((4, 8), np.float32)}
    with pytest.raises(MeasurementError, match="not finite"):
        self_test(model.path, model.path, [batch(feeds)], SETTINGS, "y")


def test_the_self_test_says_that_outputs_collapsed(tmp_path) -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 8))
    model = stored(s.model(y=s.op("Mul", x, s.number(0.0))), tmp_path)
    feeds = {"x": np.ones((4, 8), np.float32)}
    assert "zero" in self_test(model.path, model.path, [batch(feeds)], SETTINGS, "y").text


def test_logits_that_cancel_have_not_collapsed(tmp_path) -> None:
    s, weight = Sketch(0), np.random.default_rng(0).normal(size=(8, 1)).astype(np.float32)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 8))
    opposite = s.constant("w", np.concatenate([weight, -weight], axis=1))
    model = stored(s.model(y=s.op("MatMul", x, opposite, at="m.head")), tmp_path)
    feeds = {"x": np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)}
    assert "same" not in self_test(model.path, model.path, [batch(feeds)], SETTINGS, "y").text


@pytest.mark.parametrize("name", ["ort-cuda", "tensorrt"])
def test_engines_of_backends_with_fp16_kernels_are_islands(name, encoder) -> None:
    """Their graphs are built and run here in ONNX Runtime; nothing is said of their speed."""
    backend = BACKENDS[name]

    def choose(index, layer):
        offered = [f for f in backend.formats if backend.kernel(layer.kind, f) == "native"]
        offered = [f for f in offered if f not in ("fp8", "bf16")]
        return offered[index % len(offered)]

    plan = replace(plan_of(encoder, choose), backend=name)
    assert {"fp16", "fp32", "w4a16"} <= set(plan.formats().values())
    graph = lower_graph(encoder.ir, find_layers(encoder.ir), plan)
    before = outputs(encoder.path, TOKENS)["embedding"]
    with open_session(graph, SETTINGS) as session:
        after = session.run(TOKENS)["embedding"]
    assert ((before * after).sum(axis=1) > 0.95).all()
    if not backend.contrib:
        assert {node.domain for node in graph.graph.all_nodes()} == {""}
        zeros = [n.inputs[2] for n in graph.graph if n.op_type == "QuantizeLinear"]
        assert {value.dtype for value in zeros} == {ir.DataType.INT8}
        quantizers = ("QuantizeLinear", "DequantizeLinear")
        scales = {n.inputs[1].dtype for n in graph.graph if n.op_type in quantizers}
        assert scales == {ir.DataType.FLOAT16}


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt-rtx"])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
def test_cached_keys_in_int8_load_in_the_runtime_that_stands_in(name, heads, tmp_path) -> None:
    """Its optimiser would move their pair behind a Transpose and mix up signs there."""
    model = stored(tiny_decoder(heads=heads[0], kv_heads=heads[1], past=True), tmp_path / "model")
    layers = find_layers(model.ir)
    keys = [x.name for x in layers.layers if x.kind is Kind.KV]
    assert keys
    rng = np.random.default_rng(0)
    feeds = {"input_ids": IDS}
    for spec in model.inputs[1:]:
        feeds[spec.name] = rng.normal(size=(len(IDS), heads[1], 5, 8)).astype(np.float32)
    before = outputs(model.path, feeds)["logits"]
    for lowered in ([key] for key in keys):
        plan = plan_of(model, lambda _, x, own=lowered: "int8" if x.name in own else "fp16")
        plan = replace(plan, backend=name, session_options=dict(BACKENDS[name].session_options))
        path, *_ = build(model, plan, tmp_path / lowered[0])
        with open_session(path, settings_for(BACKENDS[name], threads=1)) as session:
            after = session.run(feeds, ["logits"])["logits"]
        assert np.corrcoef(before.ravel(), after.ravel())[0, 1] > 0.98


def test_a_weight_beyond_fp16_is_no_island(encoder) -> None:
    model = encoder.ir.clone()
    layers = find_layers(model)
    layer = next(x for x in layers.layers if x.kind is Kind.LINEAR)
    value = model.graph.initializers[layer.weight]
    value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1e7), name=value.name)
    plan = replace(plan_of(encoder, lambda *_: "fp16"), backend="ort-cuda")
    with pytest.raises(PlanError, match=f"{layer.name}.*cannot be fp16.*65504"):
        lower_graph(model, layers, plan)
    kept = [replace(e, format="fp32") if e.name == layer.name else e for e in plan.layers]
    lower_graph(model, layers, replace(plan, layers=tuple(kept)))


def test_constants_of_masks_that_an_engine_rewrites_are_listed(encoder) -> None:
    layers = find_layers(encoder.ir)
    plan = plan_of(encoder, lambda _, x: "fp16" if x.kind is Kind.SOFTMAX else "fp32")
    found = rewritten_constants(layers, plan)
    assert [item.layer for item in found] == [x.name for x in layers.layers if x.masks]
    assert {(item.value, item.becomes) for item in found} == {(np.finfo("f4").min, -65504.0)}
    assert rewritten_constants(layers, plan_of(encoder, lambda *_: "fp32")) == ()


def test_casts_that_the_runtime_inserts_and_providers_are_counted(encoder, tmp_path) -> None:
    """ONNX Runtime has few fp16 kernels on a CPU, and casts around what it lacks."""
    settings = settings_for(BACKENDS["tensorrt-rtx"], threads=1)
    plan = replace(plan_of(encoder, lambda *_: "fp16"), backend="tensorrt-rtx")
    path, graph, layers = build(encoder, plan, tmp_path / "half")
    half = read_realised(path, graph, layers, plan, settings)
    plain_plan = plan_of(encoder, lambda *_: "fp32")
    other, plain, _ = build(encoder, plain_plan, tmp_path / "plain")
    assert half.casts > 0 == read_realised(other, plain, layers, plain_plan, SETTINGS).casts
    assert half.kernels["Cast"] >= half.casts
    found = node_providers(path, settings, TOKENS)
    assert set(found) == {"CPUExecutionProvider"} and min(found.values()) > 10
