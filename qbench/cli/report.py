"""``qbench report``: the page of a run."""

from __future__ import annotations

from pathlib import Path

import click

from qbench.cli.answers import Answer, answering


@click.command(
    "report",
    epilog="""\b
Examples:
  qbench report results/demo
  qbench report results/demo --out demo.html --figures figures/
""",
)
@click.argument("run")
@click.option("--out", metavar="FILE", help="The page; report.html in the run by default.")
@click.option("--figures", metavar="DIR", help="Write every figure as PNG and SVG there too.")
@answering(needs_runtime=False)
def command(run: str, out: str | None, figures: str | None) -> Answer:
    """Write the report of a run: one self-contained page that needs no network.

    RUN is the folder of a run, finished or not; what it lacks is named on the page.
    """
    from qbench.report.figures import save_figures
    from qbench.report.page import write_report
    from qbench.report.run_records import load_records
    from qbench.rundir import RunDir

    rundir = RunDir.open(run)
    records = load_records(rundir)
    page = write_report(records, Path(out) if out else rundir.report_path)
    saved = [str(path) for path in save_figures(records, Path(figures))] if figures else []
    content = {"run": run, "report": str(page), "figures": saved}
    return Answer(content, lambda console: console.print(f"report: {page}", markup=False))
