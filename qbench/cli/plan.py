"""``qbench plan``: a format for each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from qbench.cli.answers import Answer, answering
from qbench.cli.options import overrides_from, plan_options
from qbench.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


@click.command(
    "plan",
    epilog="""\b
Examples:
  qbench plan results/demo
  qbench plan results/demo --max-drop "2 %" --objective bytes
  qbench plan results/demo --objective divergence --max-bytes 30M
  qbench plan results/demo --keep "*.query" --ban "encoder.layer.0.*=w4a16"
  qbench plan results/demo --point 3
  qbench plan results/demo --from-modelopt state.pth
""",
)
@click.argument("run")
@plan_options
@click.option(
    "--point", type=int, metavar="N", help="Take point N of the front that was measured before."
)
@click.option(
    "--from-modelopt", metavar="FILE", help="Take the result of ModelOpt's auto_quantize."
)
@answering()
def command(run: str, point: int | None, from_modelopt: str | None, **options: Any) -> Answer:
    """Choose a format for each layer.

    RUN is the folder of a sweep. Engines at several divergence levels are built and measured on
    the sweep split, and repaired where layers break together; the cheapest that is shown to keep
    the metric becomes plan.yaml. With --point or --from-modelopt the formats are taken as they
    are; build and verify then say what they are worth.
    """
    from pathlib import Path

    from qbench.cli.bars import ProgressBars
    from qbench.cli.reopening import reopened
    from qbench.pipeline import make_plan, take_plan, verdict_of
    from qbench.planner import plan_of_modelopt, plan_of_point
    from qbench.report.run_records import load_records
    from qbench.report.summary import plan_summary

    if point is not None and from_modelopt is not None:
        raise ConfigError("--point and --from-modelopt: got both; give one of them")
    with reopened(run, overrides_from(options)) as work, ProgressBars() as bars:
        if point is not None:
            plan = take_plan(work, plan_of_point(work, point))
        elif from_modelopt is not None:
            plan = take_plan(work, plan_of_modelopt(work, Path(from_modelopt)))
        else:
            plan = make_plan(work, bars)
    facts = work.run.read_run()
    verdict = verdict_of(work)
    content = {
        "run": str(work.run.path),
        "plan": str(work.run.plan_path),
        "verdict_words": facts.get("verdict_words"),
        "formats": plan.formats(),
        "front": work.run.known_front(),
        "history": list(plan.history),
    }

    def show(console: Console) -> None:
        console.print(plan_summary(load_records(work.run)))
        console.print(f"plan: {work.run.plan_path}", markup=False)

    return Answer(content, show, verdict)
