from __future__ import annotations

import numpy as np
import pytest

from qbench.engine.verify import Judge
from qbench.errors import MeasurementError
from qbench.records import Verdict
from qbench.tasks.unlabelled import Unlabelled

N = 60


def task() -> Unlabelled:
    names = tuple(str(i) for i in range(N))
    return Unlabelled(names, tuple((n, None) for n in names), ({"input_ids": [1]},) * N)


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N, 16)).astype(np.float32)


def noisy(reference: np.ndarray, scale: float) -> np.ndarray:
    noise = np.random.default_rng(1).normal(size=reference.shape)
    return (reference + scale * noise).astype(np.float32)


def test_the_reference_against_itself_is_verified_and_the_same(reference) -> None:
    judged = Judge(task(), "verification", reference, margin=0.2).judge("same", reference.copy())
    assert judged.verdict is Verdict.VERIFIED and judged.n == N and judged.split == "verification"
    assert judged.drop.value == 0 and judged.divergence.value == 0 and judged.flip_rate == 0
    assert judged.cosine == pytest.approx(1.0) and judged.reference == judged.value
    assert judged.n_needed is None


@pytest.mark.parametrize(
    "scale, margin, verdict",
    [
        (0.05, 0.05, Verdict.VERIFIED),
        (1.0, 0.05, Verdict.FAILED),
        (1.0, None, Verdict.FAILED),
    ],
)
def test_an_engine_is_judged_by_its_drop(reference, scale, margin, verdict) -> None:
    judged = Judge(task(), "sweep", reference, margin).judge("plan", noisy(reference, scale))
    assert judged.verdict is verdict and judged.margin == margin
    assert judged.drop.low <= judged.drop.value <= judged.drop.high
    assert judged.value < judged.reference and judged.cosine < 1 and judged.remark


def test_what_cannot_be_resolved_says_how_many_samples_would_do(reference) -> None:
    outputs = noisy(reference, 0.7)
    drop = Judge(task(), "sweep", reference, 0.0).judge("plan", outputs).drop
    margin = (drop.value + drop.high) / 2
    judged = Judge(task(), "sweep", reference, margin).judge("plan", outputs)
    assert judged.verdict is Verdict.NOT_RESOLVABLE and judged.n_needed > N


def test_collapsed_outputs_are_said(reference) -> None:
    judged = Judge(task(), "sweep", reference, 0.05).judge("plan", np.ones_like(reference))
    assert judged.verdict is Verdict.FAILED and "same output" in judged.remark


def test_outputs_that_are_no_numbers_are_not_judged(reference) -> None:
    broken = reference.copy()
    broken[3] = np.nan
    with pytest.raises(MeasurementError, match="item 3"):
        Judge(task(), "sweep", reference, 0.05).judge("plan", broken)
