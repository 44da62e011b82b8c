from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qbench.records import BenchSummary, EngineReport, Estimate, Judgement, Verdict
from qbench.report.comparison import (
    Comparison,
    bench_table,
    compare_engines,
    dominance_words,
    engines_table,
    front_table,
    judgements_table,
)
from qbench.report.run_records import RunRecords


def engine(
    name: str,
    drop: tuple[float, float],
    megabytes: float,
    rps: tuple[float, float],
    verdict: Verdict = Verdict.VERIFIED,
) -> Comparison:
    middle, speed = sum(drop) / 2, sum(rps) / 2
    judgement = Judgement(
        engine=name, split="verification", metric="mrr", reference=0.4, value=0.4 - middle,
        drop=Estimate(middle, *drop, 330), margin=0.02, verdict=verdict, n=330, n_needed=None,
        divergence=Estimate(0.001, 0.0009, 0.0011, 330), flip_rate=0.0, cosine=1.0,
    )  # fmt: skip
    report = EngineReport(name, f"{name}.onnx", "ort-cpu", int(megabytes * 1e6), "0", {}, {}, {})
    bench = BenchSummary(
        engine=name, requests=100, throughput_rps=Estimate(speed, *rps, 6),
        speedup=Estimate(1.0, 0.9, 1.1, 6), p50_ms=1.0, p95_ms=2.0, p99_ms=3.0, stages_ms={},
        batch_sizes={}, cpu_ms_per_request=1.0,
    )  # fmt: skip
    return Comparison(name, judgement, report, bench)


PLAN = engine("plan", (-0.002, 0.006), 30, (140, 150))


def words(*others: Comparison, plan: Comparison = PLAN) -> Sequence[str]:
    return dominance_words([plan, *others])


def test_a_smaller_faster_engine_of_equal_drop_is_said_to_win() -> None:
    (sentence,) = words(engine("int8", (0.0, 0.008), 22, (160, 170)))
    assert sentence == (
        "int8 is faster (165 against 145 requests/s) and smaller (22.0 against 30.0 MB) and its "
        "drop cannot be told from the plan's: here the plan does not dominate."
    )


def test_a_trade_is_said_as_a_trade() -> None:
    (sentence,) = words(engine("w4a16", (0.03, 0.05), 17, (40, 42), Verdict.FAILED))
    assert sentence.startswith("w4a16 is smaller (17.0 against 30.0 MB); the plan is faster")
    assert sentence.endswith("Yet w4a16 breaks the limit that was asked for.")


def test_an_unresolved_rival_is_said_to_be_unresolved() -> None:
    rival = engine("int8", (0.0, 0.03), 22, (140, 150), Verdict.NOT_RESOLVABLE)
    (sentence,) = words(rival)
    assert "not resolvable at n = 330 whether int8 keeps the limit" in sentence


def test_an_engine_that_is_worse_is_dominated() -> None:
    (sentence,) = words(engine("random", (0.03, 0.05), 30, (100, 110)))
    assert sentence == "The plan is better than random at one thing at least, worse at none."


def test_noise_decides_nothing() -> None:
    (sentence,) = words(engine("int8", (0.0, 0.008), 30.05, (145, 155)))
    assert sentence == "No measurement tells the plan from int8."


def test_nothing_to_say_without_a_plan_or_measurements() -> None:
    assert dominance_words([engine("int8", (0, 1), 1, (1, 2))]) == []
    assert words(Comparison("int8"), plan=Comparison("plan")) == []


def test_engines_are_joined_and_ordered(records: RunRecords) -> None:
    rows = compare_engines(records.judgements, records.engines, records.bench)
    assert [row.engine for row in rows][:2] == ["plan", "reference"]
    assert all(row.judgement and row.report and row.bench for row in rows)
    frame = engines_table(rows)
    assert frame["bytes"][0] == 31_200_000
    assert frame["fallbacks"][0] == 1
    assert frame["throughput_rps"][0] == 148.0


def test_engines_without_measurements_are_shown_on_request(records: RunRecords) -> None:
    assert compare_engines((), records.engines, None) == ()
    rows = compare_engines((), records.engines, None, built=True)
    assert {row.engine for row in rows} == {report.name for report in records.engines}
    assert engines_table(rows)["drop"].isna().all()


def test_the_first_metric_of_an_engine_counts(records: RunRecords) -> None:
    first = records.judgements[0]
    rows = compare_engines([first, *records.judgements], (), None)
    assert len(rows) == len(records.judgements)
    assert len(judgements_table([first, first])) == 2


def test_bench_table_has_stages_and_batches(records: RunRecords) -> None:
    assert records.bench is not None
    frame = bench_table(records.bench)
    assert (frame[["queue_ms", "inference_ms"]] > 0).all().all()
    assert frame["batch_largest"].tolist() == [12] * len(frame)
    assert frame["batch_median"].between(4, 12).all()


def test_front_joins_predictions_and_measurements(records: RunRecords) -> None:
    frame = front_table(records.front, records.deciding, records.engines, records.plan)
    rows = frame.set_index("engine")
    assert rows.loc["front-2", "predicted"] == 0.0016
    assert rows.loc["front-2", "bytes"] == 73_000_000
    assert rows.loc["front-2", "drop_low"] == 0.0
    assert rows["role"].tolist() == ["front"] * 4 + ["plan", "front"]
    assert rows["chosen"].tolist() == [False] * 4 + [True, False]


def test_a_plan_edited_since_is_no_proposal(records: RunRecords) -> None:
    assert records.plan is not None
    layers = tuple(replace(layer, format="fp32") for layer in records.plan.layers)
    edited = replace(records.plan, layers=layers)
    frame = front_table(records.front, records.deciding, records.engines, edited)
    assert not frame["chosen"].any()
    assert set(frame["role"]) == {"front"}


def test_front_takes_plain_numbers() -> None:
    frame = front_table([{"divergence_sum": 0.5, "bytes": 10, "seconds": -0.1}], (), ())
    assert frame["engine"].tolist() == ["front-1"]
    assert frame["predicted_low"].tolist() == [0.5]
    assert frame["drop"].isna().all()
