"""A run that is opened again with other values: those of a refused command are not kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from qbench.errors import InputError

if TYPE_CHECKING:
    from qbench.workbench import Workbench


@contextmanager
def reopened(path: str, overrides: Mapping[str, Any]) -> Iterator[Workbench]:
    """Yield the workbench of a run that was begun before.

    What the overrides say becomes the run's own configuration. Where the command is refused, the
    configuration is again what it was: a mistyped option must not spoil the commands after it.

    Args:
        path: The run's folder.
        overrides: Values that replace the configuration's, by dotted key.

    Raises:
        InputError: As ``Workbench.reopen``, and whatever the command itself is refused for.
    """
    from qbench.rundir import RunDir
    from qbench.workbench import Workbench

    before = RunDir.open(path).read_run().get("config")
    work = Workbench.reopen(path, overrides)
    try:
        yield work
    except InputError:
        if overrides:
            work.run.write_run({"config": before})
        raise
