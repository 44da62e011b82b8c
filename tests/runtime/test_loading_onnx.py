from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qbench.errors import ModelError
from qbench.graph.layers import find_layers
from qbench.graph.model import DATA_FILE, Model
from qbench.runtime.foreign import feeds_for
from qbench.runtime.loading import LoadOptions, load_model
from qbench.runtime.ort import open_model
from qbench.testing.graphs import tiny_encoder

Writer = Callable[..., Path]

RNG = np.random.default_rng(0)
W = RNG.standard_normal((32, 64)).astype(np.float32)
LINEAR = "(float[batch,32] x) => (float[batch,64] y) { y = MatMul(x, w) }"
TOKENS = "(int64[batch,seq] input_ids, int64[batch,seq] attention_mask) => "
HIDDEN = TOKENS + "(float[batch,seq,64] h) { e = Gather(t, input_ids) h = MatMul(e, w) }"
TABLE = RNG.standard_normal((50, 32)).astype(np.float32)


def run_raw(path: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    result: list[np.ndarray] = session.run(None, feeds)
    return result


def assert_normal(model: Model) -> None:
    """The normal form: one data file, unique names, no constants, opset 21 or above."""
    nodes = list(model.ir.graph.all_nodes())
    names = [str(node.name) for node in nodes]
    assert len(set(names)) == len(names) and all(names)
    values = [v.name for n in nodes for v in n.outputs] + list(model.ir.graph.initializers)
    filled = [name for name in values if name]
    assert len(set(filled)) == len(filled)
    assert not [n for n in nodes if n.op_type == "Constant" and not n.outputs[0].is_graph_output()]
    assert not model.ir.functions and model.ir.opset_imports[""] >= 21
    for value in model.ir.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        if tensor.nbytes >= 1024:
            assert isinstance(tensor, ir.ExternalTensor) and str(tensor.location) == DATA_FILE
    onnx.checker.check_model(str(model.path))


def assert_same_numbers(path: Path, model: Model) -> None:
    with open_model(model.path, "stored") as session:
        feeds = feeds_for(session.inputs, {})
        after = session.run(feeds)
    for name, before in zip(after, run_raw(path, feeds), strict=True):
        np.testing.assert_allclose(after[name], before, rtol=1e-4, atol=1e-5)


def in_constant(model: onnx.ModelProto) -> None:
    tensor = onnx.numpy_helper.from_array(W)
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w"], value=tensor))


def old_style(model: onnx.ModelProto) -> None:
    """Opset 9, IR 3: every initializer is an input too."""
    model.ir_version = 3
    shape = onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [32, 64])
    model.graph.input.append(shape)


def with_function(model: onnx.ModelProto) -> None:
    function = onnx.parser.parse_function(
        '<domain: "my.domain", opset_import: ["" : 18]> twice (a, b) => (c) '
        "{ h = MatMul(a, b) two = Constant<value = float {2.0}>() c = Mul(h, two) }"
    )
    model.functions.append(function)


BRANCHES = """(bool c, float[batch,32] x) => (float[batch,64] y) {
  y = If(c) <then_branch = t () => (float[batch,64] p) { p = MatMul(x, w) },
             else_branch = e () => (float[batch,64] q) { h = MatMul(x, w) q = Neg(h) }> }"""
LOOPED = """(float[batch,32] x) => (float[batch,64] y) {
  h = MatMul(x, w) n = Constant<value = int64 {3}>() t = Constant<value = bool {1}>()
  y = Loop(n, t, h) <body = b (int64 i, bool go, float[batch,64] a) =>
     (bool more, float[batch,64] z) { more = Identity(go) z = Relu(a) }> }"""
RESIZED = """(float[1,3,8,8] x) => (float[1,4,16,16] y) {
  h = Resize<mode = "linear">(x, roi, scales) y = Conv<kernel_shape = [1, 1]>(h, k) }"""
RESIZE = {
    "roi": np.zeros(0, np.float32),
    "scales": np.array([1, 1, 2, 2], np.float32),
    "k": RNG.standard_normal((4, 3, 1, 1)).astype(np.float32),
}
PLAIN = {"w": W}


@pytest.mark.parametrize(
    ("body", "weights", "opset", "change"),
    [
        (LINEAR, PLAIN, 23, None),
        (LINEAR, PLAIN, 14, None),
        (LINEAR, {}, 17, in_constant),
        (LINEAR, PLAIN, 9, old_style),
        (LINEAR.replace("MatMul", "my.domain.twice"), PLAIN, 18, with_function),
        (LINEAR.replace("float[", "float16["), {"w": W.astype(np.float16)}, 17, None),
        (LINEAR.replace("batch", "2"), PLAIN, 15, None),
        (BRANCHES, PLAIN, 17, None),
        (LOOPED, PLAIN, 16, None),
        (RESIZED, RESIZE, 11, None),
        (
            "(float[2,4,32] x) => (float[2,4,64] y) { h = MatMul(x, w) y = Softmax<axis = 1>(h) }",
            PLAIN,
            11,
            None,
        ),
        (
            "(float[b,32] x) => (float[c,64] y) { h = MatMul(x, w) y = Concat<axis = 0>(h, z) }",
            {**PLAIN, "z": np.zeros((0, 64), np.float32)},
            17,
            None,
        ),
        (
            "(int32[2,8] ids) => (float[2,8,64] y) { h = Gather(t, ids) y = MatMul(h, w) }",
            {**PLAIN, "t": TABLE},
            14,
            None,
        ),
        (
            "(float[b,4,32] x) => (float[b,4,64] y, float[b,64] p) "
            "{ y = MatMul(x, w) p = ReduceMean<axes = [1], keepdims = 0>(y) }",
            PLAIN,
            13,
            None,
        ),
    ],
)
def test_odd_files_come_to_the_normal_form_with_the_same_numbers(
    onnx_file: Writer, tmp_path: Path, body: str, weights: Any, opset: int, change: Any
) -> None:
    path = onnx_file(body, weights, opset, change=change)
    model = load_model(path, tmp_path / "out")
    assert_normal(model)
    assert_same_numbers(path, model)
    if opset < 21:
        assert model.card["conversion_check"]["max_rel_diff"] < 1e-3
    assert load_model(path, tmp_path / "again").sha256 == model.sha256


def test_names_that_repeat_or_are_missing_become_unique(onnx_file: Writer, tmp_path: Path) -> None:
    def rename(model: onnx.ModelProto) -> None:
        for node, name in zip(model.graph.node, ("same", "same", "", ""), strict=True):
            node.name = name

    body = LINEAR.replace("y = MatMul(x, w)", "a = MatMul(x, w) b = Relu(a) c = Neg(b) y = Abs(c)")
    model = load_model(onnx_file(body, PLAIN, 17, change=rename), tmp_path / "out")
    assert_normal(model)
    assert "two nodes with same node name" in model.card["conversion_check"]["not_checked"]


@pytest.mark.parametrize("external", ["weights.bin", "sub/folder/weights.bin", ""])
def test_external_data_in_one_or_many_files(
    onnx_file: Writer, tmp_path: Path, external: str
) -> None:
    if external:
        (tmp_path / external).parent.mkdir(parents=True, exist_ok=True)
    path = onnx_file(HIDDEN, {"t": TABLE, "w": W}, external=external)
    assert len(list(tmp_path.rglob("*"))) > 1
    model = load_model(path, tmp_path / "out")
    assert_normal(model)
    assert_same_numbers(path, model)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "model.onnx",
        "model.onnx.data",
        "model.json",
    }


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_external_data_behind_a_link_is_read(
    onnx_file: Writer, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    path = onnx_file(LINEAR, PLAIN, name="given/m.onnx", external="w.bin")
    elsewhere = tmp_path / "blobs"
    elsewhere.mkdir()
    shutil.move(path.parent / "w.bin", elsewhere / "0")
    link(elsewhere / "0", path.parent / "w.bin")
    assert_normal(load_model(path, tmp_path / "out"))


def test_weights_that_an_exporter_wrote_twice_become_one(onnx_file: Writer, tmp_path: Path) -> None:
    square = RNG.standard_normal((32, 32)).astype(np.float32)
    ones = np.ones(300, np.float32)
    weights = {"w1": square, "w2": square.copy(), "w3": square + 1, "o1": ones, "o2": ones}
    body = """(float[b,32] x, float[300] v) => (float[b,32] y, float[300] u) {
      a = MatMul(x, w1) c = MatMul(a, w2) y = MatMul(c, w3) d = Mul(v, o1) u = Mul(d, o2) }"""
    path = onnx_file(body, weights)
    model = load_model(path, tmp_path / "out")
    assert set(model.ir.graph.initializers) == {"w1", "w3", "o1", "o2"}
    assert_same_numbers(path, model)
    layers = [x for x in find_layers(model.ir).layers if str(x.kind) == "linear"]
    assert sorted(len(layer.occurrences) for layer in layers) == [1, 2]


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99, 0.999])
def test_a_truncated_file_is_one_clear_error(
    onnx_file: Writer, tmp_path: Path, share: float
) -> None:
    path = onnx_file(HIDDEN, {"t": TABLE, "w": W})
    cut(path, share)
    with pytest.raises(ModelError, match="given.onnx' .*(cut short|is empty)"):
        load_model(path, tmp_path / "out")


def test_no_cut_at_all_gets_through(onnx_file: Writer, tmp_path: Path) -> None:
    path = onnx_file("(float[b,4] x) => (float[b,4] y) { y = Add(x, z) }", {"z": np.ones(4, "f4")})
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError):
            load_model(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"this is a text, and no model\n" * 5, "cannot be read as ONNX"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "a PNG picture"),
        (b"PK\x03\x04" + bytes(50), "a zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (os.urandom(3000), "cannot be read as ONNX"),
    ],
)
def test_what_is_no_onnx_file_is_said(tmp_path: Path, content: bytes, part: str) -> None:
    for name in ("a.onnx", "b.bin"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=part):
            load_model(tmp_path / name, tmp_path / "out")


def test_a_missing_file_names_its_neighbours(onnx_file: Writer, tmp_path: Path) -> None:
    onnx_file(LINEAR, PLAIN, name="encoder.onnx")
    with pytest.raises(ModelError, match="did you mean 'encoder.onnx'"):
        load_model(tmp_path / "encodr.onnx", tmp_path / "out")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ModelError, match="is a folder"):
        load_model(tmp_path / "folder.onnx", tmp_path / "out")


def test_external_data_that_is_missing_or_cut_names_the_file(
    onnx_file: Writer, tmp_path: Path
) -> None:
    path = onnx_file(LINEAR, PLAIN, external="w.bin")
    cut(tmp_path / "w.bin", 0.5)
    with pytest.raises(ModelError, match="'w.bin' .* is cut short: it has 4096 bytes"):
        load_model(path, tmp_path / "out")
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match="keeps its weights in 'w.bin', missing beside it"):
        load_model(path, tmp_path / "out")


def test_external_data_outside_the_folder_is_not_read(onnx_file: Writer, tmp_path: Path) -> None:
    path = onnx_file(LINEAR, PLAIN, name="sub/m.onnx", external="w.bin")
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = "../../secret"
    onnx.save(model, path)
    with pytest.raises(ModelError, match="outside its own folder"):
        load_model(path, tmp_path / "out")


def shorten(model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer[0]
    tensor.raw_data = tensor.raw_data[:-8]


def damage(model: onnx.ModelProto) -> None:
    array = W.copy()
    array[3, 3] = np.nan
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(array, "w"))


@pytest.mark.parametrize(
    ("body", "weights", "opset", "change", "part"),
    [
        (LINEAR, PLAIN, 17, damage, "NaN or infinite weights in w:"),
        (LINEAR, PLAIN, 17, shorten, "weight 'w' of shape .32, 64. needs 8192 bytes and has 8184"),
        (LINEAR, {}, 17, None, "reads 'w', which no node, input or weight gives"),
        (LINEAR.replace("MatMul", "my.domain.Odd"), PLAIN, 21, None, "my.domain:Odd"),
        (LINEAR.replace("MatMul", "my.domain.Odd"), PLAIN, 14, None, "my.domain:Odd"),
        (LINEAR.replace("float[batch,32]", "int64[batch,32]"), PLAIN, 21, None, "Type"),
        ("(float[b,32] x) => (float[b,32] x) { }", {}, 21, None, "holds no graph"),
        (
            "(float[4,32] x) => (float[4,32] y) { y = Upsample<width_scale = 1.0>(x) }",
            {},
            1,
            None,
            "opset 1; opset 21 is needed",
        ),
    ],
)
def test_a_graph_that_cannot_be_used_says_why(
    onnx_file: Writer,
    tmp_path: Path,
    body: str,
    weights: Any,
    opset: int,
    change: Any,
    part: str,
) -> None:
    path = onnx_file(body, weights, opset, change=change)
    with pytest.raises(ModelError, match=part):
        load_model(path, tmp_path / "out")


TWO = TOKENS + (
    "(float[batch,seq,64] h, float[batch,64] p) "
    "{ e = Gather(t, input_ids) h = MatMul(e, w) p = ReduceMean<keepdims = 0>(h, one) }"
)
BOTH = {"t": TABLE, "w": W, "one": np.array([1])}


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"head": "embedding"}, r"has 2 outputs; choose .* --output: h \[batch, seq, 64\], p"),
        ({"head": "output"}, "has 2 outputs"),
        ({"head": "embedding", "output": "hh"}, r"no output 'hh' .did you mean 'h'"),
        ({"head": "embedding", "output": "h"}, "--pooling: mean, cls, max, last, none"),
        ({"head": "embedding", "output": "h", "pooling": "mena"}, "did you mean 'mean'"),
        ({"head": "embedding", "output": "p", "pooling": "mean"}, "already is one vector"),
        ({"head": "classification", "output": "h"}, "has 3 dimensions.*name another"),
    ],
)
def test_a_choice_that_is_missing_or_wrong_is_asked_for(
    onnx_file: Writer, tmp_path: Path, options: dict[str, Any], part: str
) -> None:
    with pytest.raises(ModelError, match=part):
        load_model(onnx_file(TWO, BOTH), tmp_path / "out", LoadOptions(**options))


def test_where_nothing_is_scored_all_outputs_stay(onnx_file: Writer, tmp_path: Path) -> None:
    model = load_model(onnx_file(TWO, BOTH), tmp_path / "out")
    assert [spec.name for spec in model.outputs] == ["h", "p"]
    model = load_model(onnx_file(TWO, BOTH), tmp_path / "out", LoadOptions(output="p"))
    assert [spec.name for spec in model.outputs] == ["p"] and model.output == "p"


def hidden_shape(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.ClearField("shape")


def test_a_shape_that_the_file_hides_is_found_by_running(onnx_file: Writer, tmp_path: Path) -> None:
    path = onnx_file(HIDDEN, {"t": TABLE, "w": W}, change=hidden_shape)
    with pytest.raises(ModelError, match="one vector a token"):
        load_model(path, tmp_path / "out", LoadOptions(head="embedding"))
    options = LoadOptions(head="embedding", pooling="mean")
    model = load_model(path, tmp_path / "out", options)
    assert model.output == "sentence_embedding"


@pytest.mark.parametrize("pooling", ["mean", "max", "last"])
def test_pooling_needs_a_mask(onnx_file: Writer, tmp_path: Path, pooling: str) -> None:
    path = onnx_file(HIDDEN.replace(", int64[batch,seq] attention_mask", ""), {"t": TABLE, "w": W})
    with pytest.raises(ModelError, match="needs the input attention_mask"):
        load_model(path, tmp_path / "out", LoadOptions(head="embedding", pooling=pooling))


def test_normalisation_alone_can_be_added(onnx_file: Writer, tmp_path: Path) -> None:
    options = LoadOptions(head="embedding", output="p", normalize=True)
    model = load_model(onnx_file(TWO, BOTH), tmp_path / "out", options)
    with open_model(model.path, "stored") as session:
        vectors = session.run(feeds_for(session.inputs, {}))[model.output]
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


def test_any_change_of_names_weights_or_operators_changes_the_hash(
    onnx_file: Writer, tmp_path: Path
) -> None:
    bodies = (LINEAR, LINEAR.replace("y", "z"), LINEAR.replace("MatMul(x, w)", "Gemm(x, w)"))
    hashes = {
        load_model(onnx_file(body, {"w": array}), tmp_path / "out").sha256
        for body, array in itertools.product(bodies, (W, W + 1))
    }
    assert len(hashes) == 6


def test_an_encoder_from_another_exporter_keeps_its_layers(tmp_path: Path) -> None:
    ir.save(tiny_encoder(), tmp_path / "tiny.onnx")
    model = load_model(tmp_path / "tiny.onnx", tmp_path / "out")
    expected = {layer.name for layer in find_layers(tiny_encoder()).layers}
    assert {layer.name for layer in find_layers(model.ir).layers} == expected


@pytest.mark.slow
@pytest.mark.parametrize("opset", [14, 17])
def test_a_torchscript_export_is_converted_with_equal_numbers(tmp_path: Path, opset: int) -> None:
    import warnings

    import torch

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(50, 32)
            self.block = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.block(self.table(ids))  # type: ignore[no-any-return]

    path = tmp_path / "script.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Small().eval(),
            (torch.ones(2, 7, dtype=torch.int64),),
            str(path),
            dynamo=False,
            opset_version=opset,
            input_names=["input_ids"],
            output_names=["hidden"],
        )
    model = load_model(path, tmp_path / "out")
    assert_normal(model)
    assert_same_numbers(path, model)
    assert model.card["conversion_check"]["max_rel_diff"] < 1e-5


LARGE = """
import json, sys
from pathlib import Path
import numpy as np, onnx_ir as ir
folder, count, width = Path(sys.argv[1]), 36, 4096
size = width * width * 4
with open(folder / "large.data", "wb") as file:
    for index in range(count):
        file.seek(index * size)
        file.write(np.full(64, index + 1, np.float32).tobytes())
    file.truncate(count * size)
def value(name, shape, **more):
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape), **more)
x = h = value("x", ["batch", width])
nodes, weights = [], []
for index in range(count):
    tensor = ir.ExternalTensor("large.data", index * size, size, ir.DataType.FLOAT,
        shape=ir.Shape([width, width]), name=f"w{index}", base_dir=str(folder))
    weights.append(value(f"w{index}", [width, width], const_value=tensor))
    nodes.append(ir.node("MatMul", [h, weights[-1]]))
    h = nodes[-1].outputs[0]
    h.name = f"h{index}"
h.type, h.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", width])
graph = ir.Graph([x], [h], nodes=nodes, initializers=weights, opset_imports={"": 17})
ir.save(ir.Model(graph, ir_version=8), folder / "large.onnx")
from qbench.graph.layers import find_layers
from qbench.runtime.loading import load_model
model = load_model(folder / "large.onnx", folder / "out")
status = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(json.dumps({"layers": len(find_layers(model.ir).layers), "peak_kib": peak}))
"""


@pytest.mark.slow
def test_over_two_gigabytes_load_in_little_memory(tmp_path: Path) -> None:
    import json

    if shutil.disk_usage(tmp_path).free < 8 << 30:
        pytest.skip("less than 8 GiB free")
    try:
        done = subprocess.run(
            [sys.executable, "-c", LARGE, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert (tmp_path / "out" / DATA_FILE).stat().st_size == 36 * 4096 * 4096 * 4
        told = json.loads(done.stdout)
        assert told["layers"] == 36 and told["peak_kib"] < 1 << 20
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)
