"""``qbench bench``: engines under load in the batcher."""

from __future__ import annotations

from typing import Any

import click

from qbench.cli.answers import Answer, answering

_OPTIONS = {
    "clients": "bench.clients",
    "rounds": "bench.rounds",
    "seconds": "bench.seconds",
    "token_budget": "bench.token_budget",
    "max_wait_ms": "bench.max_wait_ms",
}


@click.command(
    "bench",
    epilog="""\b
Examples:
  qbench bench results/demo
  qbench bench results/demo --clients 50 --rounds 10
""",
)
@click.argument("run")
@click.option("--clients", type=int, metavar="N", help="Clients of the closed loop.")
@click.option("--rounds", type=int, metavar="N", help="Interleaved slices of each engine.")
@click.option("--seconds", type=float, metavar="S", help="Measured seconds of a slice.")
@click.option("--token-budget", type=int, metavar="N", help="Padded tokens of a batch.")
@click.option("--max-wait-ms", type=float, metavar="MS", help="Longest wait for a fuller batch.")
@answering()
def command(run: str, **options: Any) -> Answer:
    """Measure engines under load in the batcher.

    RUN is the folder of a run whose engine was built. Reference and engines are served in turns
    within one run, to clients that send the verification split's texts.
    """
    from qbench.cli.bars import ProgressBars
    from qbench.cli.outcome import outcome_of
    from qbench.pipeline import bench
    from qbench.workbench import Workbench

    given = {_OPTIONS[key]: value for key, value in options.items() if value is not None}
    work = Workbench.reopen(run, given)
    with ProgressBars() as bars:
        bench(work, bars)
    return outcome_of(work)
