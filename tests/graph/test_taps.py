from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qbench.errors import ModelError
from qbench.graph.taps import with_taps
from qbench.testing.graphs import tiny_encoder

GRAPH = """
<ir_version: 10, opset_import: ["" : 21]>
tiny (float[n, 2] x, float[n, 2] x_tap) => (float[n, 2] y)
<float[2, 2] w = {1.0, 2.0, 3.0, 4.0}>
{
    h = MatMul(x, w)
    r = Relu(h)
    y = Add(r, x_tap)
}
"""


def loaded() -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(GRAPH))


def run(model: ir.Model, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    proto = ir.to_proto(model)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def test_taps_come_after_the_outputs_under_their_own_names() -> None:
    model = loaded()
    tapped = with_taps(model, ["h", "r", "h"])
    assert [v.name for v in tapped.model.graph.outputs] == ["y", "h", "r"]
    assert dict(tapped.outputs) == {"h": "h", "r": "r"}
    assert [v.name for v in model.graph.outputs] == ["y"]
    x = np.float32([[1, -1]])
    got = run(tapped.model, x=x, x_tap=x)
    np.testing.assert_array_equal(got["h"], [[-2, -2]])
    np.testing.assert_array_equal(got["y"], x)


def test_inputs_and_initializers_get_free_names() -> None:
    tapped = with_taps(loaded(), ["x", "w", "x_tap"])
    assert dict(tapped.outputs) == {"x": "x_tap_2", "w": "w_tap", "x_tap": "x_tap_tap"}
    x = np.float32([[1, -1]])
    got = run(tapped.model, x=x, x_tap=2 * x)
    np.testing.assert_array_equal(got["x_tap_2"], x)
    np.testing.assert_array_equal(got["x_tap_tap"], 2 * x)
    np.testing.assert_array_equal(got["w_tap"], [[1, 2], [3, 4]])


def test_an_output_is_not_given_twice() -> None:
    tapped = with_taps(loaded(), ["y", "r"])
    assert [v.name for v in tapped.model.graph.outputs] == ["y", "r"]
    assert tapped.outputs["y"] == "y"


def test_weights_are_shared() -> None:
    model = tiny_encoder()
    tapped = with_taps(model, ["embedding"]).model
    for name, value in model.graph.initializers.items():
        assert tapped.graph.initializers[name].const_value is value.const_value


def test_taps_do_not_change_what_the_graph_gives() -> None:
    model = tiny_encoder()
    ids = np.arange(1, 11, dtype=np.int64).reshape(2, 5)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    every = [v.name for node in model.graph for v in node.outputs]
    tapped = with_taps(model, every)
    got = run(tapped.model, **feeds)
    assert {tapped.outputs[name] for name in every} <= set(got)
    np.testing.assert_allclose(got["embedding"], run(model, **feeds)["embedding"], atol=1e-6)


def test_unknown_tensors_are_all_named_with_near_misses() -> None:
    with pytest.raises(ModelError, match=r"no tensor 'relu_out'.*'x_tab' .did you mean 'x_tap'"):
        with_taps(loaded(), ["h", "relu_out", "x_tab"])


def test_a_tensor_of_a_subgraph_is_refused() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    branch (bool c, float[2] x) => (float[2] y) {
        y = If(c) <
            then_branch = yes () => (float[2] a) { a = Relu(x) },
            else_branch = no () => (float[2] b) { b = Neg(x) }
        >
    }
    """
    model = ir.from_proto(onnx.parser.parse_model(text))
    with pytest.raises(ModelError, match="'a' .inside a subgraph of If or Loop"):
        with_taps(model, ["a"])
    tapped = with_taps(model, ["x"])
    got = run(tapped.model, c=np.array(True), x=np.float32([-1, 2]))
    np.testing.assert_array_equal(got["y"], [0, 2])
