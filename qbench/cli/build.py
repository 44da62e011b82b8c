"""``qbench build``: the engine of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from qbench.cli.answers import Answer, answering

if TYPE_CHECKING:
    from rich.console import Console

    from qbench.records import EngineReport


@click.command(
    "build",
    epilog="""\b
Examples:
  qbench build results/demo
  qbench build results/demo --plan my-edited-plan.yaml --out engines/mine
""",
)
@click.argument("run")
@click.option(
    "--plan", "plan_file", metavar="FILE", help="Plan to build; the run's own by default."
)
@click.option("--out", metavar="DIR", help="Folder of the engine; in the run by default.")
@answering()
def command(run: str, plan_file: str | None, out: str | None) -> Answer:
    """Build the engine of a plan.

    RUN is the folder of a run. Its plan.yaml may be edited by hand first: every layer's format
    can be changed. The engine is loaded, run and compared before success is said.
    """
    from pathlib import Path

    from qbench.cli.bars import ProgressBars
    from qbench.pipeline import build_engine
    from qbench.workbench import Workbench

    work = Workbench.reopen(run)
    with ProgressBars() as bars:
        report = build_engine(
            work, bars, Path(plan_file) if plan_file else None, Path(out) if out else None
        )
    return Answer({"run": run, "engine": report}, lambda console: _show(console, report))


def _show(console: Console, report: EngineReport) -> None:
    from qbench.report.wording import rewritten_words

    console.print(f"engine: {report.path} ({report.bytes / 1e6:.1f} MB)", markup=False)
    console.print(f"asked for: {_counts(report.asked)}", markup=False)
    console.print(f"realised:  {_counts(report.realised)}", markup=False)
    console.print(f"self-test: {report.self_test}", markup=False)
    if report.rewritten:
        console.print(f"masks:     {rewritten_words(report.rewritten)}", markup=False)
    for fallback in report.fallbacks:
        console.print(
            f"fallback: {fallback.layer} {fallback.asked} → {fallback.realised}: {fallback.reason}",
            markup=False,
        )


def _counts(counts: object) -> str:
    assert hasattr(counts, "items")
    return ", ".join(f"{number} × {name}" for name, number in sorted(counts.items()))
