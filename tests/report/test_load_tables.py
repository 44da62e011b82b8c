"""The verdict under load on the page."""

from __future__ import annotations

from dataclasses import replace

from qbench.records import Estimate, to_dict
from qbench.report.comparison import bench_table
from qbench.report.load_tables import (
    load_badge,
    load_words,
    shown_rates,
    shown_trials,
    verdict_under_load,
)
from qbench.report.page import render_page
from qbench.report.run_records import RunRecords
from qbench.serving.rate import Confirmation, RateFound, RateTrial, Sla
from qbench.serving.verdict import ServingVerdict, reach_verdict


def about(value: float) -> Estimate:
    return Estimate(value, 0.9 * value, 1.2 * value, 400, 0.95, "block_bootstrap")


def trial(rate: float, kept: bool) -> RateTrial:
    tail = about(46.0 if kept else 91.0)
    share = 0.996 if kept else 0.93
    return RateTrial(
        rate, kept, share, rate, about(14.0), about(31.0), tail, {"ok": 400}, 0.3, False
    )


def found(name: str, rate: float, above: float) -> RateFound:
    return RateFound(name, rate, above, (trial(rate, True), trial(above, False)))


def verdict(engine_rate: float, price: float | None = 0.36) -> ServingVerdict:
    engine = found("plan", engine_rate, 1.05 * engine_rate)
    return reach_verdict(found("reference", 100.0, 105.0), engine, Sla(50.0), price_per_hour=price)


def test_rates_latencies_and_costs_are_told() -> None:
    table = shown_rates(verdict(200.0))
    assert [column.heading for column in table.columns][-1] == "cost a million"
    assert table.rows[1] == (
        "plan", "200", "210", "14 [13, 17]", "31 [28, 37]", "46 [41, 55]", "99.6%",
        "0.500",
    )  # fmt: skip
    assert load_badge(verdict(200.0)) == ("gain under load", "good")
    assert any("2.00 [1.9, 2.1]" in words for words in load_words(verdict(200.0)))
    assert len(shown_rates(verdict(200.0, price=None)).columns) == 7


def test_no_gain_says_not_to_quantize() -> None:
    name, tone = load_badge(verdict(102.0))
    assert "do not quantize" in name and tone == "open"
    assert any(words.startswith("No gain under this load") for words in load_words(verdict(102.0)))


def test_an_sla_that_nothing_keeps_is_told() -> None:
    never = [RateFound(name, 0.0, 0.05, (trial(0.05, False),)) for name in ("reference", "plan")]
    said = reach_verdict(never[0], never[1], Sla(1.0))
    assert load_badge(said) == ("SLA not kept", "bad")
    assert shown_rates(said).rows[0][:3] == ("reference", "none", "0.0500")
    assert len(shown_trials(said).rows) == 2


def test_pairs_side_by_side_are_told() -> None:
    slow, quick = found("reference", 100.0, 105.0), found("plan", 200.0, 210.0)
    pairs = Confirmation(
        145.0, (trial(145.0, False), trial(145.0, True)), (trial(145.0, True),) * 2
    )
    said = reach_verdict(slow, quick, Sla(50.0), confirmation=pairs)
    assert said.no_gain and "at 145/s only 1 of 2 pairs of trials showed it" in said.words
    assert any("in 1 of 2 pairs" in words for words in load_words(said))
    rows = shown_trials(said).rows
    assert len(rows) == 8 and [row[0] for row in rows[-2:]] == ["plan", "reference"]
    open_ended = replace(quick, above=None)
    said = reach_verdict(slow, open_ended, Sla(50.0))
    assert shown_rates(said).rows[1][1:3] == ("≥ 200", "–")


def test_the_page_has_it_where_it_was_searched(records: RunRecords) -> None:
    said = to_dict(verdict(200.0))
    page = render_page(replace(records, facts={**records.facts, "serving": said}))
    assert 'id="load"' in page and "gain under load" in page
    assert page.count("p99_ms") == render_page(records).count("p99_ms")  # raw facts stay out
    assert 'id="load"' not in render_page(records)
    said["searches"][0]["trials"][0].pop("p95_ms")  # of an earlier layout
    assert verdict_under_load({"serving": said}) is None


def test_percentiles_of_the_closed_loop_have_intervals(records: RunRecords) -> None:
    assert records.bench is not None
    for row in bench_table(records.bench).itertuples():
        assert row.p50_low_ms <= row.p50_ms <= row.p50_high_ms
        assert row.p99_low_ms <= row.p99_ms <= row.p99_high_ms
