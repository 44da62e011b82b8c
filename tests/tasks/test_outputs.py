from __future__ import annotations

import numpy as np
import pytest

from qbench.errors import ModelError
from qbench.tasks import collapsed
from qbench.tasks.outputs import as_vectors, cosine_distance, kl_divergence

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (np.zeros((5, 3)), "zero"),
        (np.tile(RNG.normal(size=3), (5, 1)), "same output"),
        (np.tile(RNG.normal(size=(5, 1)), (1, 3)), "same number"),
        (np.full((5, 3), np.nan), "finite"),
        (np.zeros((0, 3)), "no outputs"),
    ],
)
def test_collapsed_outputs_are_told(outputs: np.ndarray, words: str) -> None:
    assert words in (collapsed(outputs) or "")


@pytest.mark.parametrize("shape", [(5, 3), (5, 1), (1, 3), (5, 4, 2)])
def test_outputs_that_differ_are_not_collapsed(shape: tuple[int, ...]) -> None:
    assert collapsed(RNG.normal(size=shape)) is None


def test_cosine_distance_is_one_minus_cosine() -> None:
    a, b = RNG.normal(size=(2, 50, 8))
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    np.testing.assert_allclose(cosine_distance(a, b), 1 - cosine, atol=1e-12)
    zero = np.zeros_like(a)
    assert (cosine_distance(a, zero) == 1).all() and (cosine_distance(zero, zero) == 0).all()


def test_kl_is_exact_and_survives_large_logits() -> None:
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    expected = (p * np.log(p / q)).sum()
    assert kl_divergence(np.log(p)[None] + 5000, np.log(q)[None])[0] == pytest.approx(expected)
    assert kl_divergence(np.array([[0.0, 5000.0]]), np.array([[5000.0, 0.0]]))[0] == 5000


def test_unpooled_outputs_name_the_choices() -> None:
    with pytest.raises(ModelError, match=r"\[4, 7, 2\].*model.pooling"):
        as_vectors(np.zeros((4, 7, 2)), 4)
