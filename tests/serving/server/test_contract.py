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
from qbench.serving.server.contract import Contract, Merging, find_contract
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


def test_rows_that_are_one_number_are_taken(tmp_path) -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch",))
    found = contract_of(s.model(y=s.op("Neg", x)), tmp_path)
    feeds = found.pad([{"x": np.array([2.0])}, {"x": np.array([3.0])}])
    assert feeds["x"].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("shape", [(), (3, 4), ("length", 4)])
def test_a_graph_without_a_batch_is_refused(shape, tmp_path) -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, shape)
    y = s.op("ReduceSum", x, s.ints(0), keepdims=0) if "length" in shape else s.op("Relu", x)
    with pytest.raises(ModelError, match="batch"):
        contract_of(s.model(y=y), tmp_path)


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
