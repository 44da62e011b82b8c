"""A user's own metric: a function of outputs and labels that scores every sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qbench.errors import DataError, InputError
from qbench.tasks.base import Array, Encoding, Metric, Scores, Text, Tokenizer
from qbench.tasks.callables import load_callable
from qbench.tasks.items import read_items
from qbench.tasks.metrics import mean_statistic
from qbench.tasks.outputs import as_items, as_rows, cosine_distance

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False)
class Custom:
    """Texts, labels as the data has them, and a function that scores outputs.

    The function takes outputs ``[n, ...]`` and the labels (a list; ``None`` without labels) and
    returns one finite number a sample. Its attributes ``unit``, ``higher_is_better`` (default
    true), ``low`` and ``high`` describe the metric.
    """

    ids: tuple[str, ...]
    texts: tuple[Text, ...]
    encoded: tuple[Encoding, ...]
    labels: tuple[Any, ...] | None
    function: Callable[..., Any]
    metrics: tuple[Metric, ...]
    name: str = "custom"

    @property
    def n(self) -> int:
        """Number of texts."""
        return len(self.ids)

    @property
    def items(self) -> int:
        """Number of texts."""
        return len(self.texts)

    def score(self, outputs: Array, reference: Array | None = None) -> Scores:
        """Return the function's score of each sample; the answer is the largest output.

        Raises:
            DataError: If the function raises, or does not return one finite number a sample.
        """
        given = as_items(outputs, self.items)
        metric = self.metrics[0]
        labels = None if self.labels is None else list(self.labels)
        scores = self._scores(given, labels)
        if scores.shape != (self.n,):
            raise DataError(
                f"task {metric.name!r} must return one score a sample, shape [{self.n}];"
                f" got shape {list(scores.shape)}"
            )
        if not np.isfinite(scores).all():
            row = int(np.argmin(np.isfinite(scores)))
            raise DataError(
                f"task {metric.name!r} gave {scores[row]} for sample {self.ids[row]!r};"
                " every score must be finite"
            )
        answers = np.argmax(given.reshape(self.items, -1), axis=1)
        return Scores({metric.name: scores[:, None]}, answers)

    def _scores(self, outputs: Array, labels: list[Any] | None) -> Array:
        """Call the function; what it raises becomes one clear error with its cause."""
        try:
            return np.asarray(self.function(outputs, labels), np.float64)
        except Exception as error:
            raise DataError(
                f"task {self.metrics[0].name!r} raised {type(error).__name__}: {error}; it was "
                f"called with outputs {list(outputs.shape)} and "
                f"{'no labels' if labels is None else f'{len(labels)} labels'} "
                "(qbench --debug … shows where)"
            ) from error

    def divergence(self, reference: Array, outputs: Array) -> Array:
        """Return ``1 − cosine`` of the outputs ``[n]``."""
        return cosine_distance(as_rows(reference, self.items), as_rows(outputs, self.items))


def make_custom(spec: str, rows: pandas.DataFrame, tokenizer: Tokenizer) -> Custom:
    """Return the task whose function is ``spec``, ``module:callable`` or ``file.py:callable``.

    Raises:
        InputError: If the function does not exist, or what it says of its metric is unusable.
    """
    function = load_callable(spec, "task")
    items = read_items(rows, tokenizer)
    return Custom(
        ids=items.ids,
        texts=items.texts,
        encoded=items.encoded,
        labels=tuple(rows["label"]) if "label" in rows else None,
        function=function,
        metrics=(_metric(function, spec),),
    )


def _metric(function: Callable[..., Any], spec: str) -> Metric:
    low = float(getattr(function, "low", -math.inf))
    high = float(getattr(function, "high", math.inf))
    if not low < high:
        raise InputError(f"task {spec!r}: its low ({low}) must be below its high ({high})")
    return Metric(
        name=str(getattr(function, "__name__", spec.rpartition(":")[2])),
        unit=str(getattr(function, "unit", "")),
        higher_is_better=bool(getattr(function, "higher_is_better", True)),
        low=low,
        high=high,
        statistic=mean_statistic,
    )
