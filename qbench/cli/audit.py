"""``qbench audit``: which cheap proxy orders layers as the measurement does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from qbench.cli.answers import Answer, answering

if TYPE_CHECKING:
    from rich.console import Console


@click.command(
    "audit",
    epilog="""\b
Examples:
  qbench audit results/demo
  qbench audit results/demo --json
""",
)
@click.argument("run")
@answering()
def command(run: str) -> Answer:
    """Say which cheap proxy orders layers as the measurement does.

    RUN is the folder of a run whose sweep is done. Each proxy (noise at the layer's output,
    rounding error of the weight, squared gradient times the layer's error) gets its rank
    correlation with the divergence over all cells, and with the metric's drop over the cells whose
    drop is beyond noise, both with intervals. A proxy may be used alone where the whole interval of
    its correlation with the divergence lies above 0.8. The gradient needs a Hugging Face model: an
    ONNX file has no backward pass.
    """
    from qbench.auditing import audit
    from qbench.cli.bars import ProgressBars
    from qbench.report.summary import rich_table
    from qbench.report.trust_tables import audit_words, shown_audit
    from qbench.workbench import Workbench

    work = Workbench.reopen(run)
    with ProgressBars() as bars:
        found = audit(work, bars)

    def show(console: Console) -> None:
        console.print(rich_table(shown_audit(found)))
        for words in audit_words(found):
            console.print(f"• {words}", markup=False)

    content = {
        "run": run,
        "metric": found.metric,
        "threshold": found.threshold,
        "scores": list(found.scores),
        "skipped": found.skipped,
        "cells": list(found.cells),
    }
    return Answer(content, show)
