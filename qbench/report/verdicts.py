"""The verdict of a run, what it means, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Iterable

from qbench.records import Judgement, Verdict
from qbench.report.comparison import Comparison, compare_engines
from qbench.report.run_records import RunRecords
from qbench.report.wording import (
    PLAN,
    PLANNED_MEANING,
    REFERENCE,
    VERDICT_MEANING,
    estimate,
    megabytes,
    not_resolvable,
    number,
)
from qbench.statistics import describe

#: How good news each verdict is.
VERDICT_TONE = {
    Verdict.VERIFIED: "good",
    Verdict.FAILED: "bad",
    Verdict.NOT_RESOLVABLE: "open",
    Verdict.NO_GAIN: "open",
    Verdict.BUDGET_UNREACHABLE: "bad",
}
_REFERENCES = (REFERENCE, "fp32")


def plan_judgement(judgements: Iterable[Judgement]) -> Judgement | None:
    """Return the first judgement of the plan's engine."""
    return next((item for item in judgements if item.engine == PLAN), None)


def verdict_of(run: RunRecords) -> Verdict | None:
    """Return the verdict of a run, or ``None`` where nothing was verified yet.

    What the run itself recorded counts first: ``no_gain`` and ``budget_unreachable`` are not
    found by looking at the plan's engine.
    """
    recorded = run.facts.get("verdict")
    if recorded in set(Verdict):
        return Verdict(recorded)
    judged = plan_judgement(run.judgements)
    return judged.verdict if judged is not None else None


def verdict_words(run: RunRecords) -> list[str]:
    """Say what the verdict means, with the numbers that it rests on."""
    verdict = verdict_of(run)
    if verdict is None:
        return ["Nothing was verified yet: there is no verdict."]
    words = [VERDICT_MEANING[verdict]]
    judged = plan_judgement(run.judgements)
    if judged is None:
        words = [PLANNED_MEANING.get(verdict, words[0])]
        return [*words, *_remarks(run, "")]
    rows = compare_engines(run.judgements, run.engines, None)
    if any(row.engine == PLAN and row.lowers_nothing for row in rows):
        return [*words, "The plan lowers nothing: its engine is the reference.", *_remarks(run, "")]
    text = (
        f"The plan's engine gives {judged.metric} = {number(judged.value, 4)} where the reference "
        f"gives {number(judged.reference, 4)}: a drop of {estimate(judged.drop)} on "
        f"n = {judged.n:,} {judged.split} samples"
    )
    if judged.margin is not None:
        text += f", where {number(judged.margin)} is allowed"
    words.append(text + ".")
    if judged.verdict is Verdict.NOT_RESOLVABLE:
        words.append(f"This is {not_resolvable(judged.n, judged.n_needed)}.")
    elif not judged.drop.resolvable and judged.drop.low != judged.drop.high:
        words.append("The interval of the drop holds 0: no loss was seen at this n.")
    return [*words, *_remarks(run, judged.remark, describe(judged.drop, judged.margin or 0.0))]


def _remarks(run: RunRecords, remark: str, known: str = "") -> list[str]:
    """Return what stages said about their verdict, each once, without ``known`` in front."""
    said = [remark, str(run.facts.get("verdict_words") or "")]
    new = dict.fromkeys(text.removeprefix(known).removeprefix("; ") for text in said)
    return [text[:1].upper() + text[1:] for text in new if text]


def key_figures(rows: Iterable[Comparison]) -> list[tuple[str, str, str]]:
    """Return the plan's key figures: what, number, condition."""
    by_name = {row.engine: row for row in rows}
    plan = by_name.get(PLAN)
    if plan is None:
        return []
    reference = next((by_name[name] for name in _REFERENCES if name in by_name), None)
    found: list[tuple[str, str, str]] = []
    if (judged := plan.judgement) is not None:
        note = f"95 % {estimate(judged.drop).partition(' ')[2]}, n = {judged.n:,}"
        found.append((f"drop of {judged.metric}", number(judged.drop.value, 2), note))
    if plan.bytes:
        note = ""
        if reference is not None and reference.bytes:
            note = f"reference {megabytes(reference.bytes)} MB: {reference.bytes / plan.bytes:.2f}×"
        found.append(("size", f"{megabytes(plan.bytes)} MB", note))
    if (bench := plan.bench) is not None:
        speed = f"{number(bench.speedup.value)}× the reference"
        rate, ends = number(bench.throughput_rps.value), estimate(bench.speedup).partition(" ")[2]
        found.append(("throughput", f"{rate}/s", f"{speed} {ends}"))
        note = f"median {number(bench.p50_ms)} ms"
        found.append(("latency, P95", f"{number(bench.p95_ms)} ms", note))
    return found
