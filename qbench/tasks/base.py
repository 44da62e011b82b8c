"""What a task is: texts in, outputs of a model in, scores of each sample out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

Array = NDArray[Any]
Encoding = Mapping[str, Sequence[int]]
Text = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class Metric:
    """A task metric: a number of a set of samples, with its unit, direction and range.

    Attributes:
        name: The word used in configurations and tables.
        unit: Unit of the value (``""`` for a pure number).
        higher_is_better: Direction.
        low: Smallest possible value.
        high: Largest possible value; ``inf`` where there is none.
        statistic: Maps payloads ``[..., n, k]`` to values ``[...]``, vectorised over the leading
            axes, so that a bootstrap is one call. Decomposable metrics have ``k = 1`` and the mean.
    """

    name: str
    unit: str
    higher_is_better: bool
    low: float
    high: float
    statistic: Callable[[Array], Array]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What a task says about the outputs of one model.

    Attributes:
        payloads: What each metric's statistic needs of every sample, ``[n, k]`` float64, by metric.
        answers: The answer to each sample, ``[n]`` int64: best candidate, class, or rounded score;
            two models disagree on a sample where their answers differ.
    """

    payloads: Mapping[str, Array]
    answers: Array

    def value(self, metric: Metric) -> float:
        """Return the value of ``metric`` over all samples."""
        return float(metric.statistic(self.payloads[metric.name]))


class Tokenizer(Protocol):
    """Turns texts into token ids: unpadded, special tokens included, truncated."""

    @property
    def name(self) -> str:
        """What it was loaded from."""
        ...

    @property
    def pad_id(self) -> int:
        """Token id that fills padded positions."""
        ...

    @property
    def max_length(self) -> int:
        """Longest encoding in tokens."""
        ...

    def __call__(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[Mapping[str, list[int]]]:
        """Return one mapping a text: ``input_ids``, and what else the tokenizer gives."""
        ...


@runtime_checkable
class Task(Protocol):
    """Labelled (or unlabelled) samples, and how the outputs of a model on them are scored.

    A *sample* is what a metric averages over; an *item* is what the model runs on. A retrieval
    task has more items (queries and candidates) than samples (queries).
    """

    @property
    def name(self) -> str:
        """Kind of task."""
        ...

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Its metrics; the first one judges."""
        ...

    @property
    def n(self) -> int:
        """Number of samples."""
        ...

    @property
    def items(self) -> int:
        """Number of items."""
        ...

    @property
    def ids(self) -> tuple[str, ...]:
        """Identity of each sample."""
        ...

    @property
    def texts(self) -> tuple[Text, ...]:
        """The text of each item, and its pair where there is one."""
        ...

    @property
    def encoded(self) -> tuple[Encoding, ...]:
        """Token ids and companions of each item."""
        ...

    def score(self, outputs: Array, reference: Array | None = None) -> Scores:
        """Score outputs ``[items, ...]`` in item order.

        Args:
            outputs: Outputs of a model.
            reference: Outputs of the reference model; needed where there are no labels, and
                ignored elsewhere, so a caller may always pass it.
        """
        ...

    def divergence(self, reference: Array, outputs: Array) -> Array:
        """Return the divergence ``[n]`` ≥ 0 from the reference; exactly 0 for equal outputs."""
        ...
