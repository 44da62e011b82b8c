"""The sweep: every cell (layer, format), one record each, as they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qbench.backends import Backend
from qbench.records import Layer, SweepRecord, TensorRange
from qbench.sensitivity.cells import Bench, Reference, measure_cell
from qbench.sensitivity.replay import Replay
from qbench.sensitivity.timing import timing_replay
from qbench.tasks.base import Task
from qbench.tasks.batches import Batch


class Sweep:
    """A sweep that is ready to run: the reference has run and its activations are kept.

    Args:
        replay: The cut graph.
        task: The task on the sweep split.
        backend: Backend whose lowerings are applied.
        clips: Clipping magnitude of each edge tensor.
        ranges: What calibration saw.
        seed: Seed of the resamples.
        family: Number of p-values that will be adjusted together.
        timed: Batches that times are measured on; none where those of the task serve.
    """

    def __init__(
        self,
        replay: Replay,
        task: Task,
        backend: Backend,
        clips: Mapping[str, float],
        ranges: Sequence[TensorRange],
        seed: int = 0,
        family: int = 1,
        timed: Sequence[Batch] = (),
    ) -> None:
        """Run the reference."""
        outputs = replay.run_reference()
        reference = Reference(outputs, task.score(outputs, outputs))
        by_tensor = {seen.tensor: seen for seen in ranges}
        timing = timing_replay(replay, timed)
        self.bench = Bench(
            replay, task, reference, backend, clips, by_tensor, seed, family, timing=timing
        )

    @property
    def reference(self) -> Reference:
        """The chained reference's outputs and scores."""
        return self.bench.reference

    def measure(self, layer: Layer, format_name: str) -> SweepRecord:
        """Return the record of one cell; a cell that fails is a record too."""
        return measure_cell(self.bench, layer, format_name)

    def close(self) -> None:
        """Free the sessions."""
        self.bench.close()
