"""Options of commands that form batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


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
            type=click.FloatRange(0),
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
