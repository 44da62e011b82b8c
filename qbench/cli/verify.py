"""``qbench verify``: an engine on samples that nothing else saw."""

from __future__ import annotations

import click

from qbench.cli.answers import Answer, answering


@click.command(
    "verify",
    epilog="""\b
Examples:
  qbench verify results/demo
  qbench verify results/demo --json
""",
)
@click.argument("run")
@answering()
def command(run: str) -> Answer:
    """Verify an engine on samples that nothing else saw.

    RUN is the folder of a run whose engine was built. The engine file itself is run on the
    verification split, and beside it the uniform engines and a random one of equal cost.
    """
    from qbench.cli.bars import ProgressBars
    from qbench.cli.outcome import outcome_of
    from qbench.pipeline import verify
    from qbench.workbench import Workbench

    work = Workbench.reopen(run)
    with ProgressBars() as bars:
        verify(work, bars)
    return outcome_of(work)
