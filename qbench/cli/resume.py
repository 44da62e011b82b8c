"""``qbench resume``: a run that was stopped goes on."""

from __future__ import annotations

from typing import Any

import click

from qbench.cli.answers import Answer, answering
from qbench.cli.options import overrides_from, resume_options


@click.command(
    "resume",
    epilog="""\b
Examples:
  qbench resume results/demo
  qbench resume results/demo --executor local
""",
)
@click.argument("run")
@resume_options
@answering()
def command(run: str, **options: Any) -> Answer:
    """Continue a run that was stopped.

    RUN is the folder of a run. It goes on with its own configuration: cells that its journal holds
    are not measured again; those that are left may be measured by another executor. The same
    command as at first does the same.
    """
    from qbench.cli.bars import ProgressBars
    from qbench.cli.outcome import outcome_of
    from qbench.cli.reopening import reopened
    from qbench.pipeline import calibrate, complete, prepare, sweep

    with reopened(run, overrides_from(options)) as work, ProgressBars() as bars:
        prepare(work, bars)
        if work.run.read_run().get("goal") == "sweep":
            calibrate(work, bars)
            for _ in sweep(work, bars):
                pass
            return outcome_of(work)
        return outcome_of(complete(work, bars), with_report=True)
