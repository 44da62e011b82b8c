"""``qbench build``: the engine of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from qbench.cli.answers import Answer, answering

if TYPE_CHECKING:
    from rich.console import Console

    from qbench.records import EngineReport, Serialized


@click.command(
    "build",
    epilog="""\b
Examples:
  qbench build results/demo
  qbench build results/demo --plan my-edited-plan.yaml --out engines/mine
  qbench build results/rtx --backend tensorrt-rtx --dim batch=1,8,32 --dim sequence=8,64,256
""",
)
@click.argument("run")
@click.option(
    "--plan", "plan_file", metavar="FILE", help="Plan to build; the run's own by default."
)
@click.option("--out", metavar="DIR", help="Folder of the engine; in the run by default.")
@click.option("--backend", metavar="NAME", help="The backend that the run must be for.")
@click.option(
    "--dim",
    "dims",
    multiple=True,
    metavar="NAME=LEAST,BEST,MOST",
    help="Sizes of a dynamic axis that a TensorRT engine takes; from the data by default; repeat.",
)
@answering()
def command(
    run: str, plan_file: str | None, out: str | None, backend: str | None, dims: tuple[str, ...]
) -> Answer:
    """Build the engine of a plan.

    RUN is the folder of a run. Its plan.yaml may be edited by hand first: every layer's format
    can be changed. The engine is loaded, run and compared before success is said.

    A run for tensorrt or tensorrt-rtx gets the strongly typed ONNX file and the serialized engine
    beside it; where TensorRT is not installed, the exact command that builds it.
    """
    from pathlib import Path

    from qbench.cli.bars import ProgressBars
    from qbench.pipeline import build_engine
    from qbench.serializing import check_backend
    from qbench.workbench import Workbench

    work = Workbench.reopen(run)
    check_backend(work, backend)
    with ProgressBars() as bars:
        report = build_engine(
            work, bars, Path(plan_file) if plan_file else None, Path(out) if out else None, dims
        )
    return Answer({"run": run, "engine": report}, lambda console: _show(console, report))


def _show(console: Console, report: EngineReport) -> None:
    from qbench.report.wording import rewritten_words

    console.print(f"engine: {report.path} ({report.bytes / 1e6:.1f} MB)", markup=False)
    console.print(f"asked for: {_counts(report.asked)}", markup=False)
    console.print(f"realised:  {_counts(report.realised)}", markup=False)
    if report.providers:
        ran = _counts(report.providers)
        console.print(f"nodes:     {ran}; {report.casts} casts inserted", markup=False)
    console.print(f"self-test: {report.self_test}", markup=False)
    if report.serialized is not None:
        _show_serialized(console, report.serialized)
    if report.rewritten:
        console.print(f"masks:     {rewritten_words(report.rewritten)}", markup=False)
    for fallback in report.fallbacks:
        console.print(
            f"fallback: {fallback.layer} {fallback.asked} → {fallback.realised}: {fallback.reason}",
            markup=False,
        )


def _show_serialized(console: Console, made: Serialized) -> None:
    if made.path:
        targets = ", ".join(made.targets) or "what the builder takes itself"
        console.print(
            f"serialized: {made.path} ({made.bytes / 1e6:.1f} MB) by {made.builder} for {targets}",
            markup=False,
        )
    sizes = "; ".join(f"{name} {', '.join(map(str, s))}" for name, s in made.shapes.items())
    console.print(f"sizes (least, best, most): {sizes or 'fixed'}", markup=False)
    if made.command:
        console.print(f"command: {made.command}", markup=False, soft_wrap=True)
    console.print(f"note: {made.remark}", markup=False)


def _counts(counts: object) -> str:
    assert hasattr(counts, "items")
    return ", ".join(f"{number} × {name}" for name, number in sorted(counts.items()))
