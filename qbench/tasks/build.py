"""Makes the task that a configuration asks for out of the rows of one split."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from qbench.errors import DataError, InputError, unknown_name
from qbench.tasks.base import Task, Tokenizer
from qbench.tasks.classification import Classes, Classification, make_classification
from qbench.tasks.custom import Custom, make_custom
from qbench.tasks.metrics import put_first
from qbench.tasks.retrieval import Retrieval, make_retrieval
from qbench.tasks.similarity import Similarity, make_similarity
from qbench.tasks.unlabelled import Unlabelled, make_unlabelled

if TYPE_CHECKING:
    import pandas

KINDS = ("embedding", "retrieval", "similarity", "classification", "none")

_Built = Retrieval | Similarity | Classification | Unlabelled | Custom


class TaskSettings(Protocol):
    """What a configuration says about the task."""

    @property
    def kind(self) -> str:
        """``embedding``, a kind, ``module:callable`` or ``file.py:callable``."""
        ...

    @property
    def metric(self) -> str | None:
        """Name of the metric that judges, or ``None`` for the task's own choice."""
        ...


def make_task(
    settings: TaskSettings,
    rows: pandas.DataFrame,
    tokenizer: Tokenizer,
    *,
    classes: Classes | None = None,
) -> Task:
    """Return the task of one split.

    Args:
        settings: Kind and metric.
        rows: The split, with canonical columns and ``id``.
        tokenizer: The model's tokenizer.
        classes: The model's classes, for classification: how many, their names, or ``label2id``.

    Raises:
        InputError: If kind or metric is unknown.
        DataError: If the rows lack a column, are none, or hold a wrong label.
    """
    if rows.empty:
        raise DataError("the split has no rows")
    task = _make(settings, rows, tokenizer, classes)
    return replace(task, metrics=put_first(task.metrics, settings.metric))


def _make(
    settings: TaskSettings, rows: pandas.DataFrame, tokenizer: Tokenizer, classes: Classes | None
) -> _Built:
    kind = settings.kind
    if kind == "embedding":
        kind = "retrieval" if "query" in rows else "similarity"
    if kind == "classification":
        return make_classification(rows, tokenizer, classes)
    if kind == "retrieval":
        return make_retrieval(rows, tokenizer)
    if kind == "similarity":
        return make_similarity(rows, tokenizer)
    if kind == "none":
        return make_unlabelled(rows, tokenizer, classes is not None or settings.metric == "kl")
    if ":" in kind:
        return make_custom(kind, rows, tokenizer)
    raise InputError(unknown_name("task", kind, (*KINDS, "module:callable", "file.py:callable")))
