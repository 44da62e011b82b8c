"""The local executor: a thread a cell, sessions of one thread each.

On small batches cells side by side beat several threads in one cell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import onnx_ir as ir

from qbench.records import Layer, SweepRecord
from qbench.sensitivity.cells import Bench
from qbench.sensitivity.executors.base import Assignment, Measured, measure, never
from qbench.sensitivity.looking import Pools

#: Looks that may be ahead of the first unfinished one, a worker: looks differ in length.
_LOOKS_AHEAD = 8


class LocalExecutor:
    """Measures in threads of this process.

    Args:
        bench: What the cells share.
        layers: The layers by name.
        pools: The looks of a race; ``None`` where there is none.
        workers: Cells measured side by side.
    """

    def __init__(
        self,
        bench: Bench,
        layers: Mapping[str, Layer],
        pools: Pools | None = None,
        workers: int = 1,
    ) -> None:
        """Nothing is run yet; weights are mapped."""
        map_weights(bench.replay.model)
        self._bench, self._layers, self._pools, self._workers = bench, layers, pools, workers

    def run(self, assignments: Sequence[Assignment], over: Callable[[], bool] = never) -> Measured:
        """Yield the record of each assignment, in their order; ``None`` for what was left out.

        No more cells than workers are begun and not yet told, so that no more are lost with this
        process. Looks are short, and some run ahead.
        """
        if self._workers < 2 or len(assignments) < 2:
            for assignment in assignments:
                yield self._one(assignment, over)
            return
        waiting, running = deque(assignments), deque[Future[SweepRecord | None]]()
        looks = assignments[0].look is not None
        ahead = self._workers * _LOOKS_AHEAD if looks else self._workers - 1
        pool = ThreadPoolExecutor(self._workers)
        try:
            while waiting or running:
                while waiting and len(running) <= ahead:
                    running.append(pool.submit(self._one, waiting.popleft(), over))
                yield running.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _one(self, assignment: Assignment, over: Callable[[], bool]) -> SweepRecord | None:
        if over():
            return None
        return measure(self._bench, self._pools, self._layers, assignment)

    def describe(self) -> dict[str, Any]:
        """Return how many cells are measured side by side."""
        return {"executor": "local", "workers": self._workers}

    def close(self) -> None:
        """Do nothing: threads end with each run."""


def map_weights(model: ir.Model) -> None:
    """Map the external weights of a graph that threads will share; no page of them is read.

    A weight is mapped where it is first used, and two threads that do so at once hinder each other:
    one may fail, or see the weight before it has its shape.
    """
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value.numpy()
