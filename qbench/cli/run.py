"""``qbench run``: the whole path from a configuration file."""

from __future__ import annotations

from typing import Any

import click

from qbench.cli.answers import Answer, answering
from qbench.cli.options import overrides_from, plan_options, run_options


@click.command(
    "run",
    epilog="""\b
Examples:
  qbench run configs/demo.yaml
  qbench run configs/demo.yaml --max-drop "2 %" --objective bytes --run-id small
""",
)
@click.argument("config")
@plan_options
@run_options
@answering()
def command(config: str, **options: Any) -> Answer:
    """Run the whole path from a configuration file.

    CONFIG is a YAML file; options replace its values. A run that was stopped continues with the
    same command. The report is written to the run's folder.
    """
    from qbench.cli.bars import ProgressBars
    from qbench.cli.outcome import outcome_of
    from qbench.config import load_config
    from qbench.pipeline import run

    loaded = load_config(config, overrides_from(options))
    with ProgressBars() as bars:
        work = run(loaded, bars)
        bars.stage("report: drawing")
        return outcome_of(work, with_report=True)
