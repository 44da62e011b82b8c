"""``qbench resume``: a run that was stopped goes on."""

from __future__ import annotations

import click

from qbench.cli.answers import Answer, answering


@click.command(
    "resume",
    epilog="""\b
Examples:
  qbench resume results/demo
""",
)
@click.argument("run")
@answering()
def command(run: str) -> Answer:
    """Continue a run that was stopped.

    RUN is the folder of a run. It goes on with its own configuration: cells that its journal holds
    are not measured again. The same command as at first does the same.
    """
    from qbench.cli.bars import ProgressBars
    from qbench.cli.outcome import outcome_of
    from qbench.pipeline import calibrate, complete, prepare, sweep
    from qbench.workbench import Workbench

    work = Workbench.reopen(run)
    with ProgressBars() as bars:
        prepare(work, bars)
        if work.run.read_run().get("goal") == "sweep":
            calibrate(work, bars)
            for _ in sweep(work, bars):
                pass
            return outcome_of(work)
        return outcome_of(complete(work, bars), with_report=True)
