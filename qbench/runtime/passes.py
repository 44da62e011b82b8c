"""Full passes over frozen batches."""

from __future__ import annotations

from collections.abc import Sequence

from qbench.runtime.ort import Session
from qbench.tasks.base import Array
from qbench.tasks.batches import Batch, gather_outputs


def run_batches(session: Session, batches: Sequence[Batch], output: str) -> Array:
    """Return one output for all items, shape [items, …], in item order.

    Raises:
        MeasurementError: If the runtime refuses a batch.
    """
    outputs = [session.run(batch.feeds, [output])[output] for batch in batches]
    return gather_outputs(batches, outputs)
