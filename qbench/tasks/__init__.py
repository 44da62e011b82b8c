"""Tasks: texts to token batches, and outputs of a model to per-sample scores."""

from __future__ import annotations

from qbench.tasks.base import Metric, Scores, Task, Tokenizer
from qbench.tasks.batches import Batch, batches_sha256, gather_outputs, make_batches
from qbench.tasks.build import KINDS, make_task
from qbench.tasks.metrics import check_expectation
from qbench.tasks.outputs import collapsed
from qbench.tasks.tokens import load_tokenizer

__all__ = [
    # words
    "KINDS",
    "Batch",
    "Metric",
    "Scores",
    "Task",
    "Tokenizer",
    # in
    "batches_sha256",
    "load_tokenizer",
    "make_batches",
    "make_task",
    # out
    "check_expectation",
    "collapsed",
    "gather_outputs",
]
