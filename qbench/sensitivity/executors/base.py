"""What an executor is asked, and the one function that does it wherever it runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from qbench.errors import MeasurementError
from qbench.records import Layer, SweepRecord
from qbench.sensitivity.cells import Bench, measure_cell
from qbench.sensitivity.looking import Pools

#: A cell by layer and format.
Cell = tuple[str, str]
#: Records in the order that was asked for; ``None`` for what the time budget left out.
Measured = Generator[SweepRecord | None, None, None]


@dataclass(frozen=True, slots=True)
class Assignment:
    """One measurement.

    Attributes:
        cell: The cell.
        look: The look of a race that it is due for; ``None`` for the full pool.
        outputs_only: Whether latency and local error of a full measurement are left out.
    """

    cell: Cell
    look: int | None = None
    outputs_only: bool = False


def never() -> bool:
    """Return false: there is no time budget."""
    return False


class Executor(Protocol):
    """Measures cells, several at a time."""

    def run(self, assignments: Sequence[Assignment], over: Callable[[], bool] = never) -> Measured:
        """Yield the record of each assignment, in their order.

        Args:
            assignments: What to measure.
            over: Whether the time budget is used up: what is not begun then gives ``None``.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return, as plain values, what it is and what became of its workers."""
        ...

    def close(self) -> None:
        """Stop what is still running and free what was taken."""
        ...


def measure(
    bench: Bench, pools: Pools | None, layers: Mapping[str, Layer], assignment: Assignment
) -> SweepRecord:
    """Measure one assignment; a cell that fails is a record too.

    Args:
        bench: What the cells share.
        pools: The looks of a race; ``None`` where there is none.
        layers: The layers by name.
        assignment: What to measure.

    Raises:
        MeasurementError: If a look is asked for and there are no looks.
    """
    name, form = assignment.cell
    if assignment.look is None:
        return measure_cell(bench, layers[name], form, assignment.outputs_only)
    if pools is None:
        raise MeasurementError(f"{name} {form}: a look was asked for, and the sweep is no race")
    return pools.look_at(layers[name], form, assignment.look)
