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
    if not np.isfinite(after).all():
        raise MeasurementError(f"engine {path.name!r} gives outputs that are not finite")
    written = _outputs(path, few, replace(settings, optimise=False), output)
    agreement = _cosine(after, written)
    if agreement < _SAME_GRAPH:
        raise MeasurementError(
            f"engine {path.name!r}: the runtime's optimised graph and the graph as written give "
            f"cosine {agreement:.4f} of each other; a fused kernel miscomputes"
        )
    difference = float(np.abs(after - before).max())
    words = (
        "equal to the reference bit for bit"
        if np.array_equal(after, before)
        else (
            f"cosine to the reference {_cosine(after, before):.5f}, "
            f"to the graph as written {agreement:.6f}"
        )
    )
    return SelfTest(difference, "; ".join(t for t in (words, collapsed(after) or "") if t))


def _outputs(path: Path, batches: Sequence[Batch], settings: SessionSettings, output: str) -> Array:
    with open_session(path, settings) as session:
        parts = [session.run(batch.feeds, [output])[output].ravel() for batch in batches]
    return np.concatenate(parts).astype(np.float64)


def _cosine(a: Array, b: Array) -> float:
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm > 0 else 1.0
