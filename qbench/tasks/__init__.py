"""Tasks: texts to token batches, and outputs of a model to per-sample scores."""

from __future__ import annotations

from qbench.tasks.base import Metric, Scores, Task, Tokenizer
from qbench.tasks.batches import Batch, batches_sha256, gather_outputs, make_batches
from qbench.tasks.metrics import check_expectation
from qbench.tasks.outputs import collapsed
from qbench.tasks.retrieval import Retrieval, make_retrieval

__all__ = [
    "Batch",
    "Metric",
    "Retrieval",
    "Scores",
    "Task",
    "Tokenizer",
    "batches_sha256",
    "check_expectation",
    "collapsed",
    "gather_outputs",
    "make_batches",
    "make_retrieval",
]
