from __future__ import annotations

import numpy as np
import pytest
import torch

from qbench.errors import ModelError
from qbench.graph.export import export_module


class Perceptron(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(torch.relu(self.first(x))))  # type: ignore[no-any-return]


class Tokens(torch.nn.Module):
    """Looks tokens up, and takes the mean of those that the mask leaves."""

    def __init__(self, fixed: bool = False) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(20, 8)
        self.fixed = fixed

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask.unsqueeze(-1).float()
        if self.fixed:
            mask = mask * torch.ones(5, 1)
        return (self.table(input_ids) * mask).sum(1) / mask.sum(1)


def token_feeds() -> dict[str, np.ndarray]:
    mask = np.ones((3, 5), np.int64)
    mask[1, 2:] = 0
    return {"input_ids": np.arange(15).reshape(3, 5), "attention_mask": mask}


def test_axes_are_named_where_they_are_dynamic_and_numbers_where_not() -> None:
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)}
    exported = export_module(Perceptron(), feeds)
    shapes = [v.shape for v in (*exported.graph.graph.inputs, *exported.graph.graph.outputs)]
    assert [[str(d) for d in shape or ()] for shape in shapes] == [["batch", "16"], ["batch", "4"]]
    assert [len(check.expected) for check in exported.checks] == [4, 1, 1, 1]
    assert exported.card == {"kind": "torch", "output": "output", "architecture": "Perceptron"}


def test_a_single_sample_does_not_fix_the_batch() -> None:
    exported = export_module(Perceptron(), {"x": np.zeros((1, 16), np.float32)})
    shape = exported.graph.graph.inputs[0].shape
    assert shape is not None and str(shape[0]) == "batch"


def test_rows_of_tokens_are_checked_alone_and_without_their_padding() -> None:
    exported = export_module(Tokens(), token_feeds(), strict=True)
    shapes = [check.feeds["input_ids"].shape for check in exported.checks]
    assert shapes == [(3, 5), (1, 5), (1, 2), (1, 5)]
    np.testing.assert_allclose(exported.checks[0].expected[1], exported.checks[2].expected[0])


class Refusing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if bool((x > 0).all()) else -x


@pytest.mark.parametrize(
    ("module", "feeds", "part"),
    [
        (Perceptron(), {"x": np.zeros((2, 7), np.float32)}, r"cannot be run .*x \[2, 7\]"),
        (Perceptron(), {"y": np.zeros((2, 16), np.float32)}, "unexpected keyword"),
        (torch.nn.Identity(), {"input": np.full((2, 3), np.nan, np.float32)}, "itself gives NaN"),
        (torch.nn.LSTM(3, 4), {"input": np.zeros((2, 3, 3), np.float32)}, "must give one tensor"),
        (Refusing(), {"x": np.ones((2, 3), np.float32)}, "torch.onnx.export refused Refusing"),
        (Tokens(fixed=True), token_feeds(), "cannot be run on its samples|fixed input"),
    ],
)
def test_a_module_that_cannot_be_exported_says_why(
    module: torch.nn.Module, feeds: dict[str, np.ndarray], part: str
) -> None:
    with pytest.raises(ModelError, match=part):
        export_module(module, feeds, strict=True)
