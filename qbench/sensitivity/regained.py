"""What a layer in fp32 gives back where fp16 is the high precision.

The sweep's reference is then the model in fp16, and a cell's divergence from it says how far an
answer moves and not whether it moves back. So the model in fp32 is run on the same batches: what
the reference diverges from it, less what the cell still does, is what the cell gives back.
"""

from __future__ import annotations

import threading

import numpy as np

from qbench.records import Estimate
from qbench.runtime.ort import open_session
from qbench.sensitivity.replay import Replay
from qbench.statistics import difference_interval
from qbench.tasks.base import Array, Task
from qbench.tasks.batches import gather_outputs


class Truth:
    """Outputs of the model in fp32 on the batches of a sweep; it runs when first asked for."""

    def __init__(self) -> None:
        """Nothing is run yet."""
        self._lock = threading.Lock()
        self._outputs: Array | None = None

    def outputs(self, replay: Replay) -> Array:
        """Return the outputs of all items, shape [items, …]."""
        with self._lock:
            if self._outputs is None:
                name = replay.output
                with open_session(replay.model, replay.settings) as session:
                    parts = [session.run(b.feeds, [name])[name] for b in replay.batches]
                self._outputs = gather_outputs(replay.batches, parts)
            return self._outputs


def measure_regained(
    task: Task, truth: Array, reference: Array, outputs: Array, seed: int
) -> Estimate:
    """Return the mean divergence from the model in fp32 that a cell takes away; > 0 is better.

    Args:
        task: The task.
        truth: Outputs of the model in fp32, shape [items, …].
        reference: Outputs of the reference in fp16, same shape.
        outputs: Outputs of the cell, same shape.
        seed: Seed of the resamples; they are paired.
    """
    before, after = task.divergence(truth, reference), task.divergence(truth, outputs)
    return difference_interval(np.asarray(before) - np.asarray(after), seed=seed)


def regained_words(found: Estimate) -> str:
    """Return in words what a cell gives back."""
    told = f"{found.value:.2g} [{found.low:.2g}, {found.high:.2g}]"
    if found.low > 0:
        return f"takes {told} off the divergence from the model in fp32"
    return f"takes nothing resolvable off the divergence from the model in fp32: {told}"
