"""``qbench calibrate``: the range of every tensor that a format could touch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from qbench.cli.answers import Answer, answering
from qbench.cli.options import config_from, data_options, model_options, run_options

if TYPE_CHECKING:
    from rich.console import Console

    from qbench.records import TensorRange


@click.command(
    "calibrate",
    epilog="""\b
Examples:
  qbench calibrate configs/demo.yaml
  qbench calibrate model.onnx --tokenizer ./tokenizer --task none --data texts.csv
""",
)
@click.argument("model")
@model_options
@data_options
@run_options
@answering()
def command(model: str, **options: Any) -> Answer:
    """Find the range of every tensor that a format needs.

    MODEL is a model or a configuration file. One pass over the calibration split.
    """
    from qbench.cli.bars import ProgressBars
    from qbench.pipeline import calibrate, start

    with ProgressBars() as bars:
        work = start(config_from(model, options), bars)
        ranges = calibrate(work, bars)
    content = {"run": str(work.run.path), "ranges": list(ranges)}
    return Answer(content, lambda console: _show(console, ranges, str(work.run.path)))


def _show(console: Console, ranges: tuple[TensorRange, ...], path: str) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("tensor", "layer"):
        table.add_column(heading, overflow="fold")
    for heading in ("min", "max", "p99.99", "kurtosis", "fp16 headroom"):
        table.add_column(heading, justify="right")
    for seen in ranges:
        table.add_row(
            seen.tensor,
            seen.layer,
            f"{seen.min:.4g}",
            f"{seen.max:.4g}",
            f"{seen.percentiles.get('99.99', float('nan')):.4g}",
            f"{seen.kurtosis:.3g}",
            f"{seen.fp16_headroom:.3g}",
        )
    console.print(table)
    console.print(f"run: {path}", markup=False)
