"""Options of commands that form batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
_LONGEST_S = 86_400


class Duration(click.FloatRange):
    """A time of at most a day; click's own range lets NaN through."""

    def __init__(self, least: float, units_a_second: int = 1) -> None:
        """Take the least time, and what the option counts in."""
        super().__init__(least)
        self._most = _LONGEST_S * units_a_second

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the time."""
        found = float(super().convert(value, param, ctx))
        if not found <= self._most:
            self.fail(f"{value} is not a number of at most {self._most}, a day", param, ctx)
        return found


def batching_options(what: str, max_batch: int | None = None) -> Callable[[F], F]:
    """Return what adds ``--max-batch``, ``--max-wait-ms`` and ``--queue`` to a command.

    Args:
        what: What waits in the queue.
        max_batch: Most rows of a batch by default; ``None`` for no limit.
    """
    options = (
        click.option(
            "--max-batch",
            type=click.IntRange(1),
            default=max_batch,
            show_default=max_batch is not None,
            metavar="N",
            help="Most rows of a batch.",
        ),
        click.option(
            "--max-wait-ms",
            type=Duration(0, 1000),
            default=5.0,
            show_default=True,
            metavar="MS",
            help="Longest wait for a fuller batch.",
        ),
        click.option(
            "--queue",
            type=click.IntRange(1),
            default=256,
            show_default=True,
            metavar="N",
            help=f"Most waiting {what}.",
        ),
    )

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add
