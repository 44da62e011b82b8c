"""Progress on standard error: the stage, cells done, and the time that is left."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from qbench.cli.answers import console


class ProgressBars:
    """A listener that draws one bar a stage; plain lines where there is no terminal."""

    def __init__(self) -> None:
        """Open nothing yet."""
        self._console = console(stderr=True)
        self._progress: Any = None
        self._task: Any = None
        self._name, self._total, self._done, self._began = "", 0, 0, 0.0

    def __enter__(self) -> ProgressBars:
        """Start drawing."""
        if self._console.is_terminal:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self._progress = Progress(
                TextColumn("{task.description:<36}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                TextColumn("[dim]{task.fields[note]}"),
                console=self._console,
            )
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop drawing."""
        if self._progress is not None:
            self._progress.stop()

    def stage(self, name: str, total: int | None = None) -> None:
        """Begin a stage."""
        self._finish()
        self._name, self._total, self._done = name, total or 0, 0
        self._began = time.perf_counter()
        if self._progress is not None:
            self._task = self._progress.add_task(name, total=total, note="")
        else:
            self._console.print(f"{name}{f' ({total})' if total else ''}", markup=False)

    def _finish(self) -> None:
        if self._progress is not None and self._task is not None:
            done = max(self._total, self._done, 1)
            self._progress.update(self._task, total=done, completed=done, note="")

    def step(self, note: str = "") -> None:
        """One step of the stage is done."""
        self._done += 1
        if self._progress is not None:
            self._progress.update(self._task, advance=1, note=note[-48:])
        elif self._total and (
            self._done == self._total or self._done % max(self._total // 10, 1) == 0
        ):
            elapsed = time.perf_counter() - self._began
            left = elapsed / self._done * (self._total - self._done)
            self._console.print(
                f"  {self._name}: {self._done}/{self._total}, {elapsed:.0f} s, ETA {left:.0f} s",
                markup=False,
            )
