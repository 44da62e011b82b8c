"""Data: sources of rows, their columns, and splits that are made once and kept."""

from __future__ import annotations

from qbench.data.columns import Form
from qbench.data.prepared import Prepared, prepare_splits, read_prepared, write_prepared
from qbench.data.sources import Table, load_table
from qbench.data.splits import SPLITS, Splits, split_table

__all__ = [
    # words
    "SPLITS",
    "Form",
    "Prepared",
    "Splits",
    "Table",
    # verbs
    "load_table",
    "prepare_splits",
    "read_prepared",
    "split_table",
    "write_prepared",
]
