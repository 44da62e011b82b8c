"""Classification: the class of a text, or of a pair of texts, from logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qbench.errors import DataError, unknown_name
from qbench.tasks.base import Array, Encoding, Metric, Scores, Text, Tokenizer
from qbench.tasks.items import read_items
from qbench.tasks.metrics import ACCURACY, CROSS_ENTROPY, MACRO_F1
from qbench.tasks.outputs import as_vectors, kl_divergence, log_softmax

if TYPE_CHECKING:
    import pandas

Classes = int | Sequence[str] | Mapping[str, int]
"""What is known of a model's classes: how many, their names in order, or the index of each name."""


@dataclass(frozen=True, eq=False)
class Classification:
    """Texts with a class each; samples and items are the same."""

    ids: tuple[str, ...]
    texts: tuple[Text, ...]
    encoded: tuple[Encoding, ...]
    labels: Array
    metrics: tuple[Metric, ...] = (ACCURACY, MACRO_F1, CROSS_ENTROPY)
    name: str = "classification"

    @property
    def n(self) -> int:
        """Number of texts."""
        return len(self.ids)

    @property
    def items(self) -> int:
        """Number of texts."""
        return len(self.texts)

    def score(self, outputs: Array, reference: Array | None = None) -> Scores:
        """Return hits, class pairs and cross-entropies of logits ``[items, classes]``.

        Raises:
            DataError: If a label is no class of the model.
        """
        logits = self._logits(outputs)
        answers = np.argmax(logits, axis=1)
        entropy = -log_softmax(logits)[np.arange(self.n), self.labels]
        payloads = {
            ACCURACY.name: (answers == self.labels).astype(np.float64)[:, None],
            MACRO_F1.name: np.stack([answers, self.labels], axis=1).astype(np.float64),
            CROSS_ENTROPY.name: np.maximum(entropy, 0.0)[:, None],
        }
        return Scores(payloads, answers)

    def divergence(self, reference: Array, outputs: Array) -> Array:
        """Return KL of the class probabilities from the reference's ``[n]``, in nats."""
        return kl_divergence(self._logits(reference), self._logits(outputs))

    def _logits(self, outputs: Array) -> Array:
        """Return ``[items, classes]``; a single logit is that of class 1 against 0."""
        logits = as_vectors(outputs, self.items)
        if logits.shape[1] == 1:
            logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
        _check_range(self.labels, self.ids, logits.shape[1])
        return logits


def make_classification(
    rows: pandas.DataFrame, tokenizer: Tokenizer, classes: Classes | None = None
) -> Classification:
    """Return the task of a split with columns ``id``, ``text``, maybe ``text_pair``, ``label``.

    Args:
        rows: The split.
        tokenizer: The model's tokenizer.
        classes: The model's classes; needed where labels are names.

    Raises:
        DataError: If a label is no class of the model; the message names the first row.
    """
    labels = class_indices(list(rows["label"]), list(map(str, rows["id"])), classes)
    items = read_items(rows, tokenizer)
    return Classification(items.ids, items.texts, items.encoded, labels)


def class_indices(labels: Sequence[object], ids: Sequence[str], classes: Classes | None) -> Array:
    """Return the class index of each label ``[n]`` int64.

    Labels are indices, or names that ``classes`` maps.

    Raises:
        DataError: If a label is neither; the message names the row and what is allowed.
    """
    numbers = [_as_index(label) for label in labels]
    if all(number is not None for number in numbers):
        indices = np.array(numbers, np.int64)
        # NOTE: names do not limit indices, as a config's label2id may list fewer classes than the
        # model has; the width of the logits does.
        _check_range(indices, ids, classes if isinstance(classes, int) else None)
        return indices
    names = _names(classes)
    if not names:
        first = next(i for i, number in enumerate(numbers) if number is None)
        raise DataError(
            f"row {ids[first]!r} has label {labels[first]!r}, and the model names no classes:"
            " labels must be class indices 0, 1, …, or the model's config must hold label2id"
        )
    found = [names.get(str(label), _as_index(label)) for label in labels]
    for row, index in enumerate(found):
        if index is None:
            message = unknown_name("label", str(labels[row]), _shown(names))
            raise DataError(f"row {ids[row]!r}: {message}")
    indices = np.array(found, np.int64)
    _check_range(indices, ids, max(names.values()) + 1)
    return indices


def _as_index(label: object) -> int | None:
    try:
        number = float(label)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return int(number) if number.is_integer() else None


def _names(classes: Classes | None) -> dict[str, int]:
    if classes is None or isinstance(classes, int):
        return {}
    if isinstance(classes, Mapping):
        return {str(name): int(index) for name, index in classes.items()}
    return {name: index for index, name in enumerate(classes)}


def _shown(names: Mapping[str, int], limit: int = 20) -> list[str]:
    listed = list(names)
    return listed if len(listed) <= limit else [*listed[:limit], f"… ({len(listed)} in all)"]


def _check_range(labels: Array, ids: Sequence[str], count: int | None) -> None:
    wrong = labels < 0 if count is None else (labels < 0) | (labels >= count)
    if wrong.any():
        row = int(np.argmax(wrong))
        allowed = "0 and up" if count is None else f"0 to {count - 1}, the model's classes"
        raise DataError(
            f"row {ids[row]!r} has label {int(labels[row])}; allowed: {allowed}"
            f" ({int(wrong.sum())} of {len(labels)} rows are wrong)"
        )
