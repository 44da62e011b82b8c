"""``qbench sweep``: every layer in every format."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from qbench.cli.answers import Answer, answering
from qbench.cli.options import (
    config_from,
    data_options,
    model_options,
    plan_options,
    run_options,
    sweep_options,
)

if TYPE_CHECKING:
    from rich.console import Console


@click.command(
    "sweep",
    epilog="""\b
Examples:
  qbench sweep configs/demo.yaml
  qbench sweep ./my-embedder --task retrieval --data pairs.csv --column query=question
  qbench sweep model.onnx --tokenizer ./tokenizer --pooling mean --task similarity --data sts.tsv
""",
)
@click.argument("model")
@model_options
@data_options
@sweep_options
@plan_options
@run_options
@answering()
def command(model: str, **options: Any) -> Answer:
    """Measure every layer in every format.

    MODEL is a model or a configuration file. A sweep that was stopped continues with the same
    command; what was measured is kept.
    """
    from qbench.cli.bars import ProgressBars
    from qbench.pipeline import calibrate, start, sweep
    from qbench.report.run_records import load_records
    from qbench.report.summary import run_summary

    with ProgressBars() as bars:
        work = start(config_from(model, options), bars)
        work.run.write_run({"goal": "sweep"})
        calibrate(work, bars)
        records = list(sweep(work, bars))
    counts = Counter(str(record.status) for record in records)
    content = {
        "run": str(work.run.path),
        "cells": dict(counts),
        **(work.run.read_run().get("sweep") or {}),
        "records": records,
        "remedies": work.run.read_remedies(),
        "causes": work.run.known_causes(),
    }

    def show(console: Console) -> None:
        console.print(run_summary(load_records(work.run)))
        data = work.run.read_run().get("data") or {}
        for remark in data.get("remarks") or ():
            console.print(f"data: {remark}", markup=False)
        told = ", ".join(f"{n} {status}" for status, n in counts.items())
        console.print(f"{len(records)} cells: {told}", markup=False)
        if not counts.get("ok"):
            for reason, number in Counter(r.reason for r in records).most_common(3):
                console.print(f"  {number} × {reason}", markup=False)
        console.print(f"run: {work.run.path}", markup=False)

    return Answer(content, show)
