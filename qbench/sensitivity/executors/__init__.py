"""Executors: where cells are measured. ``local`` runs threads here; ``ray`` runs Ray's actors.

Both do the same work through the same function, so records are the same, timings aside.
"""

from __future__ import annotations

from qbench.sensitivity.executors.base import Assignment, Executor, Measured, measure, never
from qbench.sensitivity.executors.local import LocalExecutor

__all__ = ["Assignment", "Executor", "LocalExecutor", "Measured", "measure", "never"]
