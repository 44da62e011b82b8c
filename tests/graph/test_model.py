from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.errors import ModelError
from qbench.graph.content import pieces, share_equal_weights, survey
from qbench.graph.layers import find_layers
from qbench.graph.model import CARD_FILE, DATA_FILE, Model, open_stored, store_card, store_model
from qbench.graph.normal import normalise, raise_opset
from qbench.runtime.ort import open_session, settings_for
from qbench.testing.graphs import Sketch, tiny_encoder

SETTINGS = settings_for(BACKENDS["ort-cpu"], threads=1)


@pytest.fixture
def stored(tmp_path: Path) -> Model:
    return store_model(normalise(tiny_encoder()), tmp_path / "model", "tiny", {"kind": "onnx"})


def test_a_stored_model_opens_as_it_was(stored: Model) -> None:
    again = open_stored(stored.folder)
    assert (again.sha256, again.source, again.card) == (stored.sha256, "tiny", {"kind": "onnx"})
    assert again.inputs == stored.inputs and again.outputs == stored.outputs
    assert again.inputs[0].shape == ("batch", "sequence") and again.inputs[0].dtype == "int64"


def test_weights_stay_in_the_file_until_they_are_read(stored: Model) -> None:
    large = [
        value.const_value
        for value in stored.ir.graph.initializers.values()
        if value.const_value is not None and value.const_value.nbytes > 1024
    ]
    assert large and all(isinstance(tensor, ir.ExternalTensor) for tensor in large)
    assert all(tensor.raw is None for tensor in large if isinstance(tensor, ir.ExternalTensor))


def test_a_card_can_be_changed_and_the_model_stays(stored: Model) -> None:
    changed = store_card(stored, {**stored.card, "tokenizer": "here"})
    assert changed.sha256 == stored.sha256
    assert open_stored(stored.folder).card == {"kind": "onnx", "tokenizer": "here"}


def test_a_stored_model_that_was_changed_is_refused(stored: Model) -> None:
    data = bytearray((stored.folder / DATA_FILE).read_bytes())
    data[100] ^= 1
    (stored.folder / DATA_FILE).write_bytes(data)
    with pytest.raises(ModelError, match="was changed after it was made"):
        open_stored(stored.folder)


@pytest.mark.parametrize("content", [None, "", "{}", "[]"])
def test_a_folder_without_a_card_holds_no_model(stored: Model, content: str | None) -> None:
    card = stored.folder / CARD_FILE
    card.unlink() if content is None else card.write_text(content)
    with pytest.raises(ModelError, match="holds no stored model"):
        open_stored(stored.folder)


def test_a_model_that_is_refused_leaves_no_card(stored: Model) -> None:
    graph = normalise(tiny_encoder())
    name, value = next((n, v) for n, v in graph.graph.initializers.items() if "query" in n)
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy() * np.nan, name=name)
    with pytest.raises(ModelError, match="NaN or infinite weights in .*query"):
        store_model(graph, stored.folder, "tiny", {})
    assert not (stored.folder / CARD_FILE).exists()


def test_traces_and_documentation_do_not_ship(tmp_path: Path) -> None:
    graph = tiny_encoder()
    node = next(iter(graph.graph))
    node.doc_string = "/home/somebody/model.py"
    node.metadata_props["pkg.torch.onnx.stack_trace"] = "/home/somebody/model.py"
    store_model(normalise(graph), tmp_path / "m", "tiny", {})
    assert b"somebody" not in (tmp_path / "m" / "model.onnx").read_bytes()


def test_metadata_does_not_count_in_the_hash_and_names_do(tmp_path: Path) -> None:
    plain, told, named = (normalise(tiny_encoder()) for _ in range(3))
    next(iter(told.graph)).metadata_props["remark"] = "x"
    next(iter(named.graph)).name = "another"
    assert survey(plain).sha256 == survey(told).sha256 != survey(named).sha256


def test_infinity_is_damage_in_a_weight_and_none_in_a_mask() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[b,2] x) => (float[b,2] y) <float[2] mask = {0, 1}, float[2,2] w = {1,2,3,4}> {
          h = Add(x, mask)  y = MatMul(h, w) }"""
    model = ir.from_onnx_text(text)
    initial = model.graph.initializers
    initial["mask"].const_value = ir.tensor(np.array([0, -np.inf], np.float32), name="mask")
    assert survey(model).damaged == ()
    initial["w"].const_value = ir.tensor(np.array([[1, np.inf], [0, 0]], np.float32), name="w")
    assert survey(model).damaged == ("w",)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bool"])
def test_pieces_of_a_file_are_the_bytes_of_the_tensor(tmp_path: Path, dtype: str) -> None:
    array = np.random.default_rng(0).integers(0, 2, (1500, 4000)).astype(dtype)
    (tmp_path / "w.bin").write_bytes(b"before" + array.tobytes() + b"after")
    kind = ir.DataType.from_numpy(array.dtype)
    shape = ir.Shape(array.shape)
    tensor = ir.ExternalTensor(
        "w.bin", 6, array.nbytes, kind, shape=shape, name="w", base_dir=tmp_path
    )
    assert b"".join(pieces(tensor)) == array.tobytes()
    assert all(len(piece) <= 1 << 23 for piece in pieces(tensor))


def test_only_matrices_of_equal_type_shape_and_content_are_shared() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[b,32] x) => (float[b,32] y) {
          p = MatMul(x, w1) q = MatMul(p, w2) r = MatMul(q, w3) s = Add(r, b1) y = Add(s, b2) }"""
    square = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    long = np.zeros(32, np.float32)
    arrays = {"w1": square, "w2": square.copy(), "w3": square.T.copy(), "b1": long, "b2": long}
    model = ir.from_onnx_text(text.replace("{\n", "{\n", 1))
    for name, array in arrays.items():
        for node in model.graph:
            for index, value in enumerate(node.inputs):
                if value is not None and value.name == name:
                    weight = ir.Value(name=name, const_value=ir.tensor(array, name=name))
                    node.replace_input_with(index, weight)
                    model.graph.register_initializer(weight)
    assert share_equal_weights(model.graph) == 1
    assert set(model.graph.initializers) == {"w1", "w3", "b1", "b2"}


@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_a_table_that_is_stored_transposed_once_more_is_one_storage(op, tmp_path) -> None:
    """Exporters fold the Transpose of a tied output projection into a second weight."""
    s, table = Sketch(0), np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    ids = s.input("ids", ir.DataType.INT64, ("batch",))
    x = s.op("Gather", s.constant("wte", table), ids, at="wte")
    beside = s.op("MatMul", x, s.constant("other", table.T + 1), at="beside")
    head = s.op(op, x, s.constant("head.weight", np.ascontiguousarray(table.T)), at="head")
    graph = s.model(logits=s.op("Add", head, beside))
    feeds = {"ids": np.arange(6)}
    before = store_model(graph.clone(), tmp_path / "before", "tiny", {})
    model = store_model(normalise(graph), tmp_path / "after", "tiny", {})
    held = [tuple(v.shape) for v in model.ir.graph.initializers.values()]
    assert sorted(held) == [(8, 40), (40, 8)]
    tied = {x.name for x in find_layers(model.ir).layers if x.tie}
    assert tied == {"wte", "head"}
    first, second = (open_session(m.path, SETTINGS).run(feeds)["logits"] for m in (before, model))
    assert np.allclose(first, second, rtol=1e-6)


@pytest.mark.parametrize("opset", [13, 17, 18])
def test_small_weights_in_files_of_their_own_survive_a_raised_opset(opset, tmp_path) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    graph = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : {opset}]>
        g (float[b,2] x) => (float[b,3] y) {{ y = MatMul (x, w) }}"""
    )
    graph.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(
        graph, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    raised = raise_opset(ir.load(tmp_path / "m.onnx"))
    found = raised.graph.initializers["w"].const_value
    assert found is not None and np.array_equal(found.numpy(), weight)


def test_the_names_of_modules_survive_a_raised_opset() -> None:
    for opset in (14, 18):
        text = f"""<ir_version: 8, opset_import: ["" : {opset}]>
            g (float[b,2] x) => (float[b,2] y) {{ h = Relu(x) y = Neg(h) }}"""
        model = ir.from_onnx_text(text)
        next(iter(model.graph)).metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'act']"
        raised = raise_opset(model)
        assert raised.opset_imports[""] == 21
        kept = [dict(node.metadata_props) for node in raised.graph]
        assert kept[0] == {"pkg.torch.onnx.name_scopes": "['', 'act']"}


def test_an_unknown_output_is_named_with_its_near_misses(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no output 'hiden'"):
        normalise(tiny_encoder(), "hiden")


def test_a_card_is_plain_json(stored: Model) -> None:
    facts = json.loads((stored.folder / CARD_FILE).read_text())
    assert set(facts) == {"source", "sha256", "card"}
