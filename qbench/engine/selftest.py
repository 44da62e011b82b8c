"""The self-test: an engine's own numbers, before anyone calls it good."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from qbench.engine.bisect import Side, find_parting, relative_error
from qbench.errors import MeasurementError
from qbench.runtime.ort import SessionSettings, open_session
from qbench.tasks.base import Array
from qbench.tasks.batches import Batch
from qbench.tasks.outputs import collapsed

#: Least cosine between an engine optimised by the runtime and the same graph as written.
_SAME_GRAPH = 0.99
#: Below that cosine: how far from the reference the optimised graph may be, over how far the graph
#: as written is. Rounding that falls otherwise in a fused kernel leaves both about as far.
_NO_FURTHER = 1.5
#: The same in one layer, as the length of the difference over the length of the tensor.
_SAME_LAYER = 0.1
#: Largest such difference of an engine file from its lowering, node by node: the same operators.
_SAME_NUMBERS = 1e-3

Lowered = Callable[[], ir.Model]


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What the self-test found.

    Attributes:
        max_abs_diff: Largest output difference from the reference.
        text: In words.
    """

    max_abs_diff: float
    text: str


@dataclass(frozen=True, slots=True)
class _Tested:
    """An engine under test: its file, a few batches, the plan's session options, the output."""

    path: Path
    batches: Sequence[Batch]
    settings: SessionSettings
    output: str

    @property
    def as_written(self) -> SessionSettings:
        """Settings under which every node runs as it stands in the file."""
        return replace(self.settings, optimise=False)

    def outputs(self, graph: Path | ir.Model, settings: SessionSettings) -> list[Array]:
        """Return the outputs of each batch."""
        with open_session(graph, settings) as session:
            return [
                session.run(batch.feeds, [self.output])[self.output].astype(np.float64)
                for batch in self.batches
            ]


def self_test(
    path: Path,
    reference: Path,
    batches: Sequence[Batch],
    settings: SessionSettings,
    output: str,
    lowered: Lowered | None = None,
) -> SelfTest:
    """Run an engine on a few real batches and compare it with the reference and with itself.

    The engine as the runtime optimises it must agree with the same graph as written: a runtime
    that miscomputes a fused block is found here, and the layer where it begins. With ``lowered``
    the file must also be what the lowerings give, number by number, and what the runtime's default
    session options change is told.

    Args:
        path: The engine's file.
        reference: The reference's file.
        batches: Real batches; three of them are run.
        settings: The plan's session settings.
        output: Name of the output that is compared.
        lowered: Gives the labelled graph that the lowerings make of the plan.

    Raises:
        MeasurementError: If outputs are not finite, optimisation changes the answer, or the file
            is not what its lowerings give.
    """
    few = [batches[i] for i in sorted({0, len(batches) // 2, len(batches) - 1})]
    tested = _Tested(path, few, settings, output)
    before = tested.outputs(reference, settings)
    after = tested.outputs(path, settings)
    if not all(np.isfinite(part).all() for part in after):
        raise MeasurementError(f"engine {path.name!r} gives outputs that are not finite")
    written = tested.outputs(path, tested.as_written)
    agreement = _check_optimised(tested, before, after, written)
    words = [_reference_words(before, after, agreement)]
    if lowered is not None:
        _check_lowering(tested, written, lowered())
        words.append(_default_words(tested, after))
    difference = max(float(np.abs(a - b).max()) for a, b in zip(after, before, strict=True))
    return SelfTest(difference, "; ".join(t for t in (*words, _collapsed(after) or "") if t))


def _collapsed(outputs: Sequence[Array]) -> str | None:
    """Return why batches of outputs, of lengths of their own, carry no information, if so."""
    said = [collapsed(part) for part in outputs if len(part) > 1]
    return said[0] if said and all(said) else None


def _check_optimised(
    tested: _Tested, before: Sequence[Array], after: Sequence[Array], written: Sequence[Array]
) -> float:
    """Return the cosine between the optimised graph's outputs and those of the graph as written.

    Outputs near zero (logits of an undecided classifier) part in angle by the quantization itself:
    so what counts below ``_SAME_GRAPH`` is whether optimisation adds to the distance from the
    reference.
    """
    agreement = _least_cosine(after, written)
    allowed = _NO_FURTHER * _distance(written, before)
    if agreement >= _SAME_GRAPH or _distance(after, before) <= allowed:
        return agreement
    graph = ir.load(tested.path)
    parting = find_parting(
        Side(graph, tested.settings),
        Side(graph, tested.as_written),
        tested.batches[_worst(after, written)].feeds,
        _SAME_LAYER,
    )
    raise MeasurementError(
        f"engine {tested.path.name!r}: the runtime's optimised graph and the graph as written give "
        f"cosine {agreement:.4f} of each other; a fused kernel miscomputes, "
        f"{parting or 'in no layer by itself'}"
    )


def _check_lowering(tested: _Tested, written: Sequence[Array], lowered: ir.Model) -> None:
    own = tested.outputs(lowered, tested.as_written)
    errors = [relative_error(a, b) for a, b in zip(written, own, strict=True)]
    if max(errors) <= _SAME_NUMBERS:
        return
    parting = find_parting(
        Side(ir.load(tested.path), tested.as_written),
        Side(lowered, tested.as_written),
        tested.batches[int(np.argmax(errors))].feeds,
        _SAME_NUMBERS,
    )
    raise MeasurementError(
        f"engine {tested.path.name!r} is not what the plan's lowerings give: its outputs are off "
        f"by {max(errors):.2g}, {parting or 'after the last layer'}"
    )


def _default_words(tested: _Tested, after: Sequence[Array]) -> str:
    """Say what the runtime's default session options make of the engine."""
    plain = tested.outputs(tested.path, replace(tested.settings, entries={}))
    if not all(np.isfinite(part).all() for part in plain):
        return "under default session options its outputs are not finite: keep the plan's"
    difference = max(float(np.abs(a - b).max()) for a, b in zip(plain, after, strict=True))
    if difference == 0.0:
        return "the same bit for bit under default session options"
    return (
        f"under default session options off by at most {difference:.2g} "
        f"(cosine {_least_cosine(plain, after):.5f}): serve it under the plan's"
    )


def _reference_words(before: Sequence[Array], after: Sequence[Array], agreement: float) -> str:
    if all(np.array_equal(a, b) for a, b in zip(after, before, strict=True)):
        return "equal to the reference bit for bit"
    return (
        f"cosine to the reference {_least_cosine(after, before):.5f}, "
        f"to the graph as written {agreement:.6f}"
    )


def _worst(first: Sequence[Array], second: Sequence[Array]) -> int:
    pairs = zip(first, second, strict=True)
    return int(np.argmin([_cosine(a.ravel(), b.ravel()) for a, b in pairs]))


def _distance(first: Sequence[Array], second: Sequence[Array]) -> float:
    """Return the length of the difference of two engines' outputs over all batches."""
    return math.sqrt(sum(float(np.square(a - b).sum()) for a, b in zip(first, second, strict=True)))


def _least_cosine(first: Sequence[Array], second: Sequence[Array]) -> float:
    """Return the least cosine of two engines' outputs over batches."""
    return min(_cosine(a.ravel(), b.ravel()) for a, b in zip(first, second, strict=True))


def _cosine(a: Array, b: Array) -> float:
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm > 0 else float(not (a @ a or b @ b))
