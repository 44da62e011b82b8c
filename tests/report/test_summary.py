from __future__ import annotations

import io

from rich.console import Console

from qbench.report.run_records import RunRecords
from qbench.report.summary import SUMMARY_WIDTH, run_summary
from qbench.testing.runs import ODD_NAME


def printed(run: RunRecords, width: int = SUMMARY_WIDTH) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(run_summary(run))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_summary_tells_the_whole_end_of_a_run(records: RunRecords) -> None:
    text = printed(records)
    for part in (
        "most divergent layers in int8",
        "Agreement of two halves of the sweep split",
        "Layers by kind and format",
        "Paired drop of mrr on n = 44 verification samples",
        "here the plan does not dominate",
        "Verdict: verified",
    ):
        assert part in text
    for engine in ("plan", "reference", "int8", "int8_dynamic", "w8a16", "w4a16", "random"):
        assert f"\n{engine} " in text


def test_names_are_text_and_no_markup(records: RunRecords) -> None:
    assert ODD_NAME in printed(records)


def test_summary_fits_a_narrow_console(records: RunRecords) -> None:
    assert max(len(line) for line in printed(records, width=80).splitlines()) <= 80


def test_summary_of_an_empty_run_is_empty() -> None:
    assert printed(RunRecords("empty")) == ""
