from __future__ import annotations

import numpy as np
import pytest

from qbench.engine.shapes import Sizes, asked_sizes, profile_of, sizes_of
from qbench.errors import ConfigError
from qbench.graph.model import TensorSpec

INPUTS = (
    TensorSpec("input_ids", "int64", ("batch", "sequence")),
    TensorSpec("attention_mask", "int64", ("batch", "sequence")),
    TensorSpec("scale", "float32", (1, None)),
)


def feeds(batch: int, length: int, shortest: int) -> dict[str, np.ndarray]:
    mask = np.ones((batch, length), np.int64)
    mask[0, shortest:] = 0
    return {"input_ids": mask, "attention_mask": mask, "scale": np.ones((1, 3), np.float32)}


def test_sizes_come_from_the_data_and_padding_is_no_length() -> None:
    found = sizes_of(INPUTS, [feeds(4, 12, 5), feeds(16, 8, 7), feeds(2, 64, 64)])
    assert found["batch"] == Sizes(1, 4, 16)
    assert found["sequence"] == Sizes(5, 12, 64)
    assert found["scale.1"] == Sizes(3, 3, 3)
    profile = profile_of(INPUTS, found)
    assert profile["input_ids"] == ((1, 5), (4, 12), (16, 64))
    assert profile["scale"] == ((1, 3), (1, 3), (1, 3))


def test_fixed_inputs_have_no_profile() -> None:
    assert profile_of((TensorSpec("x", "float32", (2, 8)),), {}) == {}


def test_asked_sizes_replace_those_of_the_data() -> None:
    known = sizes_of(INPUTS, [feeds(4, 12, 5)])
    found = asked_sizes(["batch=1,8,32"], INPUTS, known)
    assert found["batch"] == Sizes(1, 8, 32) and found["sequence"] == known["sequence"]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("batch", "allowed: NAME=LEAST,BEST,MOST"),
        ("batch=1,8", "allowed: NAME=LEAST,BEST,MOST"),
        ("batch=1,8,x", "allowed: NAME=LEAST,BEST,MOST"),
        ("batch=8,1,32", "do not shrink"),
        ("batch=0,1,32", "from 1 on"),
        ("sequenc=1,8,32", "did you mean 'sequence'"),
    ],
)
def test_wrong_sizes_are_refused(told: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asked_sizes([told], INPUTS, sizes_of(INPUTS, [feeds(4, 12, 5)]))


def test_an_axis_that_no_data_tells_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"batch, sequence, scale.1; give --dim batch=1,8,32"):
        asked_sizes([], INPUTS, {})
