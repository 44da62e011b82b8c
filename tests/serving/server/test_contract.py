"""What an engine takes and gives, found from graphs of several makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qbench.errors import ModelError
from qbench.graph.model import save_graph
from qbench.runtime.ort import SessionSettings, open_session
from qbench.serving.server.bounds import index_bounds
from qbench.serving.server.contract import Contract, Merging
from qbench.serving.server.trying import find_contract
from qbench.testing.graphs import Sketch, tiny_convnet, tiny_decoder, tiny_encoder


def contract_of(graph: ir.Model, folder: Path, **more: object) -> Contract:
    save_graph(graph, folder / "x.onnx")
    with open_session(folder / "x.onnx", SessionSettings(threads=1)) as session:
        return find_contract(session, index_bounds(graph), **more)  # type: ignore[arg-type]


def test_encoders_are_padded_and_know_their_limits(tmp_path) -> None:
    found = contract_of(tiny_encoder(), tmp_path)
    assert found.merging is Merging.PADDED and found.longest == 64
    ids, mask = found.inputs
    assert (ids.name, ids.bound, ids.datatype) == ("input_ids", 100, "INT64")
    assert mask.is_mask and mask.bound is None


def test_a_longest_request_that_the_engine_cannot_run_is_lowered(tmp_path) -> None:
    assert contract_of(tiny_encoder(), tmp_path, longest=500).longest == 64
    assert contract_of(tiny_encoder(), tmp_path, longest=10).longest == 10


def test_axes_that_are_as_long_as_the_request_are_found(tmp_path) -> None:
    found = contract_of(tiny_encoder(pooled=False), tmp_path)
    row = {"hidden_states": np.zeros((9, 32))}
    assert found.cut(row, 4)["hidden_states"].shape == (4, 32)
    assert contract_of(tiny_encoder(), tmp_path).sequence_axes == {"embedding": ()}


def test_without_a_mask_only_equal_lengths_meet(tmp_path) -> None:
    assert contract_of(tiny_decoder(), tmp_path).merging is Merging.EQUAL
    assert contract_of(tiny_convnet(), tmp_path).merging is Merging.EQUAL


def test_an_axis_that_follows_the_length_in_its_own_way_is_never_padded(tmp_path) -> None:
    s = Sketch(0)
    ids = s.input("input_ids", ir.DataType.INT64, ("batch", "sequence"))
    mask = s.input("attention_mask", ir.DataType.INT64, ("batch", "sequence"))
    both = s.op("Concat", ids, mask, axis=1)
    graph = s.model(y=s.op("Cast", both, to=ir.DataType.FLOAT))
    assert contract_of(graph, tmp_path).merging is Merging.EQUAL


def test_two_free_dimensions_run_alone(tmp_path) -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 3, "height", "width"))
    found = contract_of(s.model(y=s.op("ReduceMean", x, s.ints(1, 2, 3), keepdims=0)), tmp_path)
    assert found.merging is Merging.ALONE


def tokens_of(s: Sketch) -> tuple[ir.Value, ir.Value]:
    """Return masked states [batch, sequence, 4] of token ids, and their mask."""
    ids = s.input("input_ids", ir.DataType.INT64, ("batch", "sequence"))
    mask = s.input("attention_mask", ir.DataType.INT64, ("batch", "sequence"))
    counts = s.op("Unsqueeze", s.op("Cast", mask, to=ir.DataType.FLOAT), s.ints(-1))
    return s.op("Mul", s.op("Gather", s.weight("words.weight", 50, 4), ids, axis=0), counts), ids


def mean_over_padding_too() -> ir.Model:
    s = Sketch(0)
    states, _ = tokens_of(s)
    return s.model(y=s.op("ReduceMean", states, s.ints(1), keepdims=0))


def last_position() -> ir.Model:
    s = Sketch(0)
    states, _ = tokens_of(s)
    last = s.op("Slice", states, s.ints(-1), s.ints(1 << 30), s.ints(1))
    return s.model(y=s.op("Squeeze", last, s.ints(1)))


def neighbouring_positions() -> ir.Model:
    s = Sketch(0)
    ids = s.input("input_ids", ir.DataType.INT64, ("batch", "sequence"))
    mask = s.input("attention_mask", ir.DataType.INT64, ("batch", "sequence"))
    counts = s.op("Unsqueeze", s.op("Cast", mask, to=ir.DataType.FLOAT), s.ints(1))
    states = s.op("Gather", s.weight("words.weight", 50, 4), ids, axis=0)
    turned = s.op("Transpose", states, perm=(0, 2, 1))
    y = s.op("Conv", turned, s.weight("conv.weight", 4, 4, 3), pads=(1, 1))
    scaled = s.op("Mul", y, counts)
    return s.model(y=s.op("Transpose", scaled, perm=(0, 2, 1)))


@pytest.mark.parametrize("make", [mean_over_padding_too, last_position, neighbouring_positions])
def test_a_mask_is_not_believed_where_padding_changes_answers(make, tmp_path) -> None:
    graph = make()
    assert any(value.name == "attention_mask" for value in graph.graph.inputs)
    assert contract_of(graph, tmp_path).merging is Merging.EQUAL


def test_quantized_activations_are_no_reason_to_run_rows_apart(tmp_path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    save_graph(tiny_encoder(), tmp_path / "x.onnx")
    quantization.quantize_dynamic(tmp_path / "x.onnx", tmp_path / "q.onnx")
    with open_session(tmp_path / "q.onnx", SessionSettings(threads=1)) as session:
        assert find_contract(session, {"input_ids": 100}).merging is Merging.PADDED


def test_rows_that_read_their_neighbours_run_alone(tmp_path) -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 4))
    graph = s.model(y=s.op("Sub", x, s.op("ReduceMean", x, s.ints(0), keepdims=1)))
    assert contract_of(graph, tmp_path).merging is Merging.ALONE


def test_inputs_that_may_differ_in_length_run_alone(tmp_path) -> None:
    s = Sketch(0)
    asked = s.input("asked", ir.DataType.FLOAT, ("batch", "asked", 4))
    told = s.input("told", ir.DataType.FLOAT, ("batch", "told", 4))
    y = s.op("MatMul", asked, s.op("Transpose", told, perm=(0, 2, 1)))
    found = contract_of(s.model(y=y), tmp_path)
    assert found.merging is Merging.ALONE
    row = {"y": np.zeros((3, 7))}
    assert found.cut(row, 3)["y"].shape == (3, 7)


def test_images_larger_than_a_few_pixels_are_tried_too(tmp_path) -> None:
    s = Sketch(0)
    x = s.input("image", ir.DataType.FLOAT, ("batch", 3, "height", "width"))
    found = contract_of(s.model(y=s.op("Conv", x, s.weight("w", 2, 3, 7, 7))), tmp_path)
    assert (found.merging, found.shortest) == (Merging.ALONE, 8)


def test_rows_that_are_one_number_are_taken(tmp_path) -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch",))
    found = contract_of(s.model(y=s.op("Neg", x)), tmp_path)
    feeds = found.pad([{"x": np.array([2.0])}, {"x": np.array([3.0])}])
    assert feeds["x"].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("name", ["INT16", "UINT16", "UINT32", "UINT64", "INT8", "DOUBLE"])
def test_numbers_of_every_width_are_taken(name: str, tmp_path) -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType[name], ("batch", 2))
    found = contract_of(s.model(y=s.op("Cast", x, to=ir.DataType.FLOAT)), tmp_path)
    assert found.inputs[0].datatype == name.replace("DOUBLE", "FP64")


@pytest.mark.parametrize("shape", [(), (3, 4), ("length", 4)])
def test_a_graph_without_a_batch_is_refused(shape, tmp_path) -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, shape)
    y = s.op("ReduceSum", x, s.ints(0), keepdims=0) if "length" in shape else s.op("Relu", x)
    with pytest.raises(ModelError, match="batch"):
        contract_of(s.model(y=y), tmp_path)


def test_a_graph_without_inputs_is_refused(tmp_path) -> None:
    s = Sketch(0)
    with pytest.raises(ModelError, match="no input"):
        contract_of(s.model(y=s.op("Add", s.number(1.0), s.number(2.0))), tmp_path)


def test_bounds_are_found_behind_casts_and_unpacked_tables() -> None:
    s = Sketch(0)
    ids = s.input("ids", ir.DataType.INT32, ("batch", "sequence"))
    kinds = s.input("kinds", ir.DataType.INT64, ("batch", "sequence"))
    free = s.input("free", ir.DataType.INT64, ("batch", "sequence"))
    table = s.constant("table", np.zeros((50, 4), np.int8))
    unpacked = s.op("DequantizeLinear", table, s.number(0.1))
    a = s.op("Gather", unpacked, s.op("Cast", ids, to=ir.DataType.INT64), axis=0)
    b = s.op("Gather", s.weight("kinds.weight", 2, 4), kinds, axis=0)
    c = s.op("Unsqueeze", s.op("Cast", free, to=ir.DataType.FLOAT), s.ints(-1))
    graph = s.model(y=s.op("Add", s.op("Add", a, b), c))
    assert index_bounds(graph) == {"ids": 50, "kinds": 2}
