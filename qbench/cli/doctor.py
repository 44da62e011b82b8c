"""``qbench doctor``: what is installed, which backends build and run here, what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from qbench.cli.answers import Answer, answering

if TYPE_CHECKING:
    from rich.console import Console

    from qbench.cli.checkup import Checkup

_MARKS = {"runs": "[green]runs[/]", "builds": "[green]builds[/]", "fails": "[red]fails[/]"}


@click.command(
    "doctor",
    epilog="""\b
Examples:
  qbench doctor
  qbench doctor --backend ort-cuda
  qbench doctor --json | python -m json.tool
""",
)
@click.option("--backend", metavar="NAME", help="Look at this backend alone.")
@answering(needs_runtime=False)
def command(backend: str | None) -> Answer:
    """Say what is installed, what can run here, and what is missing.

    Each backend that is here is really tried: every format is given to a layer of each kind that
    takes it, in a tiny model that is loaded and run, and the kernel is read back from the runtime's
    optimised graph. For TensorRT-RTX a tiny engine of every format is built. Exit code 2 if no
    backend can run, or the one that was named cannot.
    """
    from qbench.cli.checkup import examine

    found = examine(backend)
    return Answer(
        content={
            "machine": found.machine,
            "versions": found.versions,
            "missing": found.missing,
            "backends": found.backends,
            "problems": found.problems,
        },
        show=lambda console: _show(found, console),
        failed=bool(found.problems),
    )


def _show(found: Checkup, console: Console) -> None:
    from rich.table import Table

    machine = found.machine
    console.print(
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB, {machine.system}, "
        f"Python {machine.python}"
    )
    console.print(", ".join(f"{name} {version}" for name, version in found.versions.items()))
    table = Table(title="Backends and formats", title_justify="left")
    table.add_column("backend")
    table.add_column("format")
    table.add_column("here", no_wrap=True)
    for heading in ("native", "emulated", "hardware", "kernels seen", "remark"):
        table.add_column(heading, overflow="fold")
    for backend in found.backends:
        for probe in backend.formats:
            table.add_row(
                backend.name,
                probe.format,
                _MARKS.get(probe.status, probe.status),
                probe.native,
                probe.emulated,
                probe.hardware,
                ", ".join(probe.kernels),
                probe.remark,
            )
    console.print(table)
    for backend in found.backends:
        if backend.remark:
            console.print(f"{backend.name}: {backend.remark}", markup=False)
    for gap in found.missing:
        told = f"not installed: {gap.package} ({gap.purpose}); add it: {gap.command}"
        console.print(told, markup=False)
    for problem in found.problems:
        console.print(f"problem: {problem}", markup=False, style="red")
