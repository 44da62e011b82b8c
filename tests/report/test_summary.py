from __future__ import annotations

import io
import re
from dataclasses import replace

from rich.console import Console

from qbench.records import Estimate
from qbench.report.run_records import RunRecords
from qbench.report.summary import SUMMARY_WIDTH, plan_summary, run_summary
from qbench.statistics import describe
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
    for engine in ("plan", "fp32 (reference)", "int8", "int8_dynamic", "w8a16", "w4a16", "random"):
        assert f"\n{engine} " in text


def test_names_are_text_and_no_markup(records: RunRecords) -> None:
    assert ODD_NAME in printed(records)


def test_summary_fits_a_narrow_console(records: RunRecords) -> None:
    assert max(len(line) for line in printed(records, width=80).splitlines()) <= 80


def test_summary_of_an_empty_run_is_empty() -> None:
    assert printed(RunRecords("empty")) == ""


def test_the_reference_is_recognised_and_drops_nothing(records: RunRecords) -> None:
    row = next(line for line in printed(records).splitlines() if "(reference)" in line)
    assert row.startswith("fp32 (reference)")
    assert row.split("0.4210")[1].split()[:2] == ["–", "–"]


def test_a_plan_that_lowers_nothing_has_no_interval_around_its_own_zero(
    records: RunRecords,
) -> None:
    idle = tuple(
        replace(report, asked={"fp32": 35}) if report.name == "plan" else report
        for report in records.engines
    )
    text = printed(replace(records, engines=idle))
    assert re.search(r"^plan .* – +nothing", text, re.MULTILINE)
    assert "The plan lowers nothing: its engine is the reference." in text


def test_captions_stand_in_one_line(records: RunRecords) -> None:
    assert "~ is noise: the interval of the drop holds 0\n" in re.sub(
        " +\n", "\n", printed(records)
    )


def test_plan_summary_shows_the_front_and_no_single_layers(records: RunRecords) -> None:
    console = Console(width=SUMMARY_WIDTH, file=io.StringIO(), color_system=None)
    console.print(plan_summary(records))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "What the planner proposed" in text and "Verdict: " in text
    assert "most divergent layers" not in text


def test_every_column_is_whole_where_intervals_are_wide(records: RunRecords) -> None:
    assert records.bench is not None
    wide = tuple(
        replace(s, throughput_rps=Estimate(4983.0, 3462.0, 16504.0, 30), cpu_ms_per_request=0.3456)
        for s in records.bench.summaries
    )
    text = printed(replace(records, bench=replace(records.bench, summaries=wide)))
    assert text.count(" 0.346\n") == len(wide)
    assert "CPU" in text


def test_a_verdict_says_each_thing_once(records: RunRecords) -> None:
    judged = tuple(
        replace(j, remark=f"{describe(j.drop, j.margin or 0.0)}; the outputs are all alike")
        for j in records.judgements
    )
    facts = {**records.facts, "verdict_words": judged[1].remark}
    text = printed(replace(records, judgements=judged, facts=facts))
    assert f"at n = {judged[0].n}\n" not in text
    assert text.count("The outputs are all alike") == 1
