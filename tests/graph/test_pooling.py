from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from qbench.errors import ModelError
from qbench.graph.pooling import add_pooling
from qbench.graph.wrappers import Embedder
from qbench.runtime.ort import SessionSettings, open_session

MODES = ("mean", "cls", "max", "last")
MASKS = {
    "unpadded": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "padded right": [[1, 1, 1, 1], [1, 1, 0, 0]],
    "padded left": [[0, 1, 1, 1], [0, 0, 0, 1]],
}


class Given(torch.nn.Module):
    """A model whose hidden states are what was given in place of token ids."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> object:
        return type("Output", (), {"last_hidden_state": input_ids})


def hidden_graph(dtype: str = "float", mask: str = "int64", name: str = "attention_mask") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g ({dtype}[batch,seq,8] x, {mask}[batch,seq] {name}) => ({dtype}[batch,seq,8] h) {{
          h = Neg(x) }}"""


def by_hand(hidden: np.ndarray, mask: np.ndarray, mode: str) -> np.ndarray:
    """Pool row by row over the tokens that are there."""
    rows = []
    for states, kept in zip(hidden, mask.astype(bool), strict=True):
        there = states[kept]
        rows.append(
            {"mean": there.mean(0), "cls": states[0], "max": there.max(0), "last": there[-1]}[mode]
        )
    return np.stack(rows)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", list(MASKS))
def test_pooling_in_the_graph_is_torchs_and_that_by_hand(
    mode: str, padding: str, normalize: bool
) -> None:
    mask = np.array(MASKS[padding], np.int64)
    hidden = np.random.default_rng(3).standard_normal((2, 4, 8)).astype(np.float32)
    expected = by_hand(hidden, mask, mode)
    if normalize:
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)

    wrapper = Embedder(Given(), mode, normalize)
    in_torch = wrapper(torch.from_numpy(hidden), torch.from_numpy(mask)).numpy()
    np.testing.assert_allclose(in_torch, expected, atol=1e-6)

    model = ir.from_onnx_text(hidden_graph())
    name = add_pooling(model, mode, normalize)
    with open_session(model, SessionSettings()) as session:
        got = session.run({"x": -hidden, "attention_mask": mask})[name]
    np.testing.assert_allclose(got, in_torch, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "mask_type"), [("float16", "int64"), ("float", "int32"), ("float", "float")]
)
def test_pooling_takes_half_precision_and_any_mask(mode: str, dtype: str, mask_type: str) -> None:
    mask = np.array(MASKS["padded right"])
    hidden = np.random.default_rng(3).standard_normal((2, 4, 8)).astype(np.float16)
    model = ir.from_onnx_text(hidden_graph(dtype, mask_type, "input_mask"))
    name = add_pooling(model, mode, False)
    feeds = {
        "x": (-hidden).astype("float32" if dtype == "float" else dtype),
        "input_mask": mask.astype("float32" if mask_type == "float" else mask_type),
    }
    with open_session(model, SessionSettings()) as session:
        got = session.run(feeds)[name]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, by_hand(hidden.astype(np.float32), mask, mode), atol=1e-3)


def test_one_vector_a_text_can_be_normalised() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[b,8] x) => (float[b,8] y) {y = Neg(x)}'
    )
    name = add_pooling(model, "none", True)
    with open_session(model, SessionSettings()) as session:
        got = session.run({"x": np.full((2, 8), 3.0, np.float32)})[name]
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1.0, atol=1e-6)


def test_the_output_name_is_free_and_the_graph_valid(tmp_path: Path) -> None:
    text = hidden_graph().replace("h = Neg(x)", "sentence_embedding = Neg(x) h = Abs(x)")
    model = ir.from_onnx_text(text)
    assert add_pooling(model, "mean", True) == "sentence_embedding_"
    ir.save(model, tmp_path / "m.onnx")
    with open_session(tmp_path / "m.onnx", SessionSettings()) as session:
        assert session.outputs == ("sentence_embedding_",)


def test_without_a_mask_the_inputs_are_named() -> None:
    model = ir.from_onnx_text(hidden_graph(name="other"))
    with pytest.raises(ModelError, match="attention_mask, and the graph reads x, other"):
        add_pooling(model, "mean", False)
