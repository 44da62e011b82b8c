"""The end of a run, for people and for machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qbench.cli.answers import Answer
from qbench.pipeline import verdict_of
from qbench.workbench import Workbench

if TYPE_CHECKING:
    from rich.console import Console


def outcome_of(work: Workbench, with_report: bool = False) -> Answer:
    """Return what a run has come to; with ``with_report`` its page is written too."""
    from qbench.report.page import write_report
    from qbench.report.run_records import load_records
    from qbench.report.summary import run_summary

    records = load_records(work.run)
    page = str(write_report(records, work.run.report_path)) if with_report else None
    verdict = verdict_of(work)
    content: dict[str, Any] = {
        "run": str(work.run.path),
        "report": page,
        "verdict_words": work.run.read_run().get("verdict_words"),
        "judgements": list(records.judgements),
        "engines": list(records.engines),
        "bench": list(records.bench.summaries) if records.bench else [],
    }

    def show(console: Console) -> None:
        console.print(run_summary(records, top=10 if with_report else 0))
        for remark in (records.facts.get("data") or {}).get("remarks") or ():
            console.print(f"data: {remark}", markup=False)
        console.print(f"run: {work.run.path}", markup=False)
        if page:
            console.print(f"report: {page}", markup=False)

    return Answer(content, show, verdict)
