"""``qbench plan``: a format for each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from qbench.cli.answers import Answer, answering
from qbench.cli.options import overrides_from, plan_options

if TYPE_CHECKING:
    from rich.console import Console


@click.command(
    "plan",
    epilog="""\b
Examples:
  qbench plan results/demo
  qbench plan results/demo --max-drop "2 %" --objective bytes
""",
)
@click.argument("run")
@plan_options
@answering()
def command(run: str, **options: Any) -> Answer:
    """Choose a format for each layer.

    RUN is the folder of a sweep. Engines at several divergence levels are built and measured on
    the sweep split; the cheapest that is shown to keep the metric becomes plan.yaml.
    """
    from qbench.cli.bars import ProgressBars
    from qbench.pipeline import make_plan, verdict_of
    from qbench.report.run_records import load_records
    from qbench.report.summary import plan_summary
    from qbench.workbench import Workbench

    work = Workbench.reopen(run, overrides_from(options))
    with ProgressBars() as bars:
        plan = make_plan(work, bars)
    facts = work.run.read_run()
    verdict = verdict_of(work)
    content = {
        "run": str(work.run.path),
        "plan": str(work.run.plan_path),
        "verdict_words": facts.get("verdict_words"),
        "formats": plan.formats(),
        "front": work.run.read_front(),
    }

    def show(console: Console) -> None:
        console.print(plan_summary(load_records(work.run)))
        console.print(f"plan: {work.run.plan_path}", markup=False)

    return Answer(content, show, verdict)
