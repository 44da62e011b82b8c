"""The self-test: an engine's own numbers, before anyone calls it good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from qbench.errors import MeasurementError
from qbench.runtime.ort import SessionSettings, open_session
from qbench.tasks.base import Array
from qbench.tasks.batches import Batch
from qbench.tasks.outputs import collapsed

#: Least cosine between an engine optimised by the runtime and the same graph as written.
_SAME_GRAPH = 0.99


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What the self-test found.

    Attributes:
        max_abs_diff: Largest output difference from the reference.
        text: In words.
    """

    max_abs_diff: float
    text: str


def self_test(
    path: Path, reference: Path, batches: Sequence[Batch], settings: SessionSettings, output: str
) -> SelfTest:
    """Run an engine on a few real batches and compare it with the reference and with itself.

    The engine as the runtime optimises it must agree with the same graph as written: a runtime
    that miscomputes a fused block is found here.

    Raises:
        MeasurementError: If outputs are not finite, or optimisation changes the answer.
    """
    few = [batches[i] for i in sorted({0, len(batches) // 2, len(batches) - 1})]
    before = _outputs(reference, few, settings, output)
    after = _outputs(path, few, settings, output)
    if not all(np.isfinite(part).all() for part in after):
        raise MeasurementError(f"engine {path.name!r} gives outputs that are not finite")
    written = _outputs(path, few, replace(settings, optimise=False), output)
    agreement = _least_cosine(after, written)
    if agreement < _SAME_GRAPH:
        raise MeasurementError(
            f"engine {path.name!r}: the runtime's optimised graph and the graph as written give "
            f"cosine {agreement:.4f} of each other; a fused kernel miscomputes"
        )
    difference = max(float(np.abs(a - b).max()) for a, b in zip(after, before, strict=True))
    words = (
        "equal to the reference bit for bit"
        if difference == 0.0
        else (
            f"cosine to the reference {_least_cosine(after, before):.5f}, "
            f"to the graph as written {agreement:.6f}"
        )
    )
    items = np.concatenate([part.reshape(len(part), -1).mean(axis=1) for part in after])
    return SelfTest(difference, "; ".join(t for t in (words, collapsed(items) or "") if t))


def _outputs(
    path: Path, batches: Sequence[Batch], settings: SessionSettings, output: str
) -> list[Array]:
    """Return the outputs of each batch."""
    with open_session(path, settings) as session:
        return [session.run(batch.feeds, [output])[output].astype(np.float64) for batch in batches]


def _least_cosine(first: Sequence[Array], second: Sequence[Array]) -> float:
    """Return the least cosine of two engines' outputs over batches."""
    return min(_cosine(a.ravel(), b.ravel()) for a, b in zip(first, second, strict=True))


def _cosine(a: Array, b: Array) -> float:
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm > 0 else float(not (a @ a or b @ b))
