"""Engines side by side: accuracy on held-out samples, size, latency and throughput in one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from qbench.backends import BACKENDS
from qbench.records import (
    BenchRun,
    BenchSummary,
    EngineReport,
    Estimate,
    Judgement,
    Plan,
    Verdict,
)
from qbench.report.tables import estimate_columns
from qbench.report.wording import PLAN, RANDOM, REFERENCE, estimate, listed, megabytes, role_of
from qbench.serving.percentiles import percentile_interval

_HIGH_PRECISIONS = {backend.high_precision for backend in BACKENDS.values()}
#: Sizes closer than this ratio count as equal.
SAME_SIZE = 0.005
_DRAWS = 200
_PARTS = 8  # of a slice, in order of time

ENGINE_COLUMNS = (
    "engine", "role", "metric", "reference_value", "value", "drop", "drop_low", "drop_high",
    "margin", "verdict", "n", "n_needed", "divergence", "divergence_low", "divergence_high",
    "flip_rate", "cosine", "bytes", "throughput_rps", "throughput_low_rps",
    "throughput_high_rps", "speedup", "speedup_low", "speedup_high", "p50_ms", "p95_ms",
    "p99_ms", "cpu_ms_per_request", "asked", "realised", "fallbacks", "self_test", "remark",
)  # fmt: skip
FRONT_COLUMNS = (
    "engine", "role", "point", "level", "chosen", "pareto", "formats", "mean_bits", "predicted",
    "predicted_low", "predicted_high", "bytes", "time_ratio", "metric", "drop", "drop_low",
    "drop_high", "margin", "verdict", "n", "n_needed", "divergence", "divergence_low",
    "divergence_high",
)  # fmt: skip
BENCH_COLUMNS = (
    "engine", "requests", "throughput_rps", "throughput_low_rps", "throughput_high_rps",
    "speedup", "speedup_low", "speedup_high", "p50_ms", "p50_low_ms", "p50_high_ms", "p95_ms",
    "p95_low_ms", "p95_high_ms", "p99_ms", "p99_low_ms", "p99_high_ms", "queue_ms",
    "preprocess_ms", "formation_ms", "inference_ms", "postprocess_ms", "cpu_ms_per_request",
    "batch_median", "batch_largest", "rejected",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """One engine with everything that was measured of it; what was not is ``None``.

    Attributes:
        engine: Name of the engine.
        judgement: Its accuracy on one split.
        report: What was built.
        bench: How it served.
    """

    engine: str
    judgement: Judgement | None = None
    report: EngineReport | None = None
    bench: BenchSummary | None = None

    @property
    def role(self) -> str:
        """What the engine is: plan, reference, random, uniform or front."""
        return role_of(self.engine)

    @property
    def lowers_nothing(self) -> bool:
        """Whether every layer keeps one floating-point format: the reference, or an idle plan."""
        if self.role != PLAN or self.report is None:
            return self.role == REFERENCE
        asked = list(self.report.asked)
        return len(asked) == 1 and asked[0] in _HIGH_PRECISIONS

    @property
    def bytes(self) -> int | None:
        """Size of its files."""
        return self.report.bytes if self.report is not None else None


def compare_engines(
    judgements: Iterable[Judgement],
    reports: Iterable[EngineReport],
    bench: BenchRun | None,
    *,
    built: bool = False,
) -> tuple[Comparison, ...]:
    """Join what was measured of each engine: the plan first, then the reference, then the rest.

    Of an engine that was judged by several metrics the first judgement counts. Engines that were
    built and neither judged nor benchmarked are left out, unless ``built`` asks for them.
    """
    judged: dict[str, Judgement] = {}
    for judgement in judgements:
        judged.setdefault(judgement.engine, judgement)
    reported = {report.name: report for report in reports}
    served = {summary.engine: summary for summary in (bench.summaries if bench else ())}
    names = dict.fromkeys([*judged, *served, *(reported if built else ())])
    roles = [PLAN, REFERENCE, "uniform", RANDOM, "front"]
    ordered = sorted(names, key=lambda name: roles.index(role_of(name)))
    return tuple(
        Comparison(name, judged.get(name), reported.get(name), served.get(name)) for name in ordered
    )


def engines_table(rows: Sequence[Comparison]) -> pd.DataFrame:
    """Return one row an engine."""
    return pd.DataFrame([_engine_row(row) for row in rows], columns=list(ENGINE_COLUMNS))


def _engine_row(row: Comparison) -> dict[str, Any]:
    found: dict[str, Any] = {"engine": row.engine, "role": row.role, "bytes": row.bytes}
    if row.judgement is not None:
        found |= _judgement_columns(row.judgement)
        found |= {
            "reference_value": row.judgement.reference,
            "value": row.judgement.value,
            "flip_rate": row.judgement.flip_rate,
            "cosine": row.judgement.cosine,
            "remark": row.judgement.remark,
        }
    if row.report is not None:
        found |= {
            "asked": dict(row.report.asked),
            "realised": dict(row.report.realised),
            "fallbacks": len(row.report.fallbacks),
            "self_test": row.report.self_test,
        }
    if row.bench is not None:
        found |= {k: v for k, v in _bench_row(row.bench).items() if k in ENGINE_COLUMNS}
    return found


def judgements_table(judgements: Iterable[Judgement]) -> pd.DataFrame:
    """Return one row an engine and metric."""
    rows = [
        {
            "engine": item.engine,
            "split": item.split,
            "reference_value": item.reference,
            "value": item.value,
            **_judgement_columns(item),
            "flip_rate": item.flip_rate,
            "cosine": item.cosine,
            "remark": item.remark,
        }
        for item in judgements
    ]
    columns = ["engine", "split", *ENGINE_COLUMNS[2:17], "remark"]
    return pd.DataFrame(rows, columns=columns)


def _judgement_columns(judgement: Judgement) -> dict[str, Any]:
    return {
        "metric": judgement.metric,
        "margin": judgement.margin,
        "verdict": str(judgement.verdict),
        "n": judgement.n,
        "n_needed": judgement.n_needed,
        **estimate_columns("drop", judgement.drop),
        **estimate_columns("divergence", judgement.divergence),
    }


def bench_table(bench: BenchRun) -> pd.DataFrame:
    """Return one row an engine with its statistics under load."""
    rows = [_bench_row(item) | _tail_interval(bench, item) for item in bench.summaries]
    return pd.DataFrame(rows, columns=BENCH_COLUMNS)


def _tail_interval(bench: BenchRun, item: BenchSummary) -> dict[str, float]:
    """Return the intervals of an engine's percentiles; parts of slices are drawn anew."""
    slices: dict[int, list[tuple[float, float]]] = {}
    for one in bench.latencies:
        if one.engine == item.engine and not one.warmup:
            slices.setdefault(one.round, []).append((one.start_s, one.total_ms))
    blocks = [
        part[:, 1]
        for _, timed in sorted(slices.items())
        for part in np.array_split(np.array(sorted(timed)), _PARTS)
    ]
    if not blocks:
        return {}
    found: dict[str, float] = {}
    for percent in (50, 95, 99):
        tail = percentile_interval(blocks, percent, draws=_DRAWS)
        value = getattr(item, f"p{percent}_ms")
        found[f"p{percent}_low_ms"] = min(tail.low, value)
        found[f"p{percent}_high_ms"] = max(tail.high, value)
    return found


def _bench_row(item: BenchSummary) -> dict[str, Any]:
    sizes = pd.Series(dict(item.batch_sizes)).sort_index()
    half = sizes.cumsum() >= sizes.sum() / 2 if len(sizes) else sizes
    return {
        "engine": item.engine,
        "requests": item.requests,
        **estimate_columns("throughput", item.throughput_rps, unit="_rps"),
        **estimate_columns("speedup", item.speedup),
        **{name: getattr(item, name) for name in ("p50_ms", "p95_ms", "p99_ms")},
        **{f"{stage}_ms": value for stage, value in item.stages_ms.items()},
        "cpu_ms_per_request": item.cpu_ms_per_request,
        "batch_median": half.idxmax() if len(sizes) else None,
        "batch_largest": sizes.index.max() if len(sizes) else None,
        "rejected": item.rejected,
    }


def front_table(
    front: Iterable[Mapping[str, Any]],
    judgements: Iterable[Judgement],
    reports: Iterable[EngineReport],
    plan: Plan | None = None,
) -> pd.DataFrame:
    """Return one row for each proposal of the planner, with what its engine gave.

    Args:
        front: Proposals; the keys ``engine`` (else they are numbered), ``level``,
            ``divergence_sum`` (a number or an estimate), ``bytes``, ``time_ratio``, ``formats``
            and ``chosen`` are shown where present.
        judgements: What the built engines gave on the sweep split.
        reports: What was built; engines of the front may have been removed again.
        plan: The plan; a chosen proposal counts as the plan unless the plan was edited since.

    Returns:
        ``point`` is what ``qbench plan --point`` takes; ``pareto`` says that no other engine is at
        least as good in drop, time and bytes and better in one, by the point estimates.
    """
    proposed: dict[str, Mapping[str, Any]] = {
        str(row.get("engine", f"front-{place}")): row for place, row in enumerate(front, 1)
    }
    judged: dict[str, Judgement] = {}
    for judgement in judgements:
        judged.setdefault(judgement.engine, judgement)
    built = {report.name: report for report in reports}
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys([*proposed, *judged]):
        row = _front_row(name, proposed.get(name, {}), judged.get(name), built.get(name))
        row["point"] = len(rows) + 1
        chosen = bool(row["chosen"]) and not _was_edited(plan, row["formats"])
        rows.append(row | {"chosen": chosen, "role": PLAN if chosen else row["role"]})
    frame = pd.DataFrame(rows, columns=list(FRONT_COLUMNS))
    frame["pareto"] = np.array(_best_points(frame), dtype=bool)
    return frame


def _best_points(frame: pd.DataFrame) -> list[bool]:
    """Return which engines no other one beats or equals in drop, time and bytes at once.

    Args:
        frame: What ``front_table`` gives. Rows without all three numbers are no points.
    """
    costs = frame[["drop", "time_ratio", "bytes"]].astype(float).to_numpy()
    known = ~np.isnan(costs).any(axis=1)
    found = []
    for own, is_point in zip(costs, known, strict=True):
        others = costs[known]
        beaten = ((others <= own).all(axis=1) & (others < own).any(axis=1)).any()
        found.append(bool(is_point and not beaten))
    return found


def _was_edited(plan: Plan | None, formats: Any) -> bool:
    """Whether a plan no longer has as many layers of each format as the chosen proposal."""
    if plan is None or not isinstance(formats, Mapping):
        return False
    return dict(Counter(plan.formats().values())) != dict(formats)


def _front_row(
    name: str,
    proposal: Mapping[str, Any],
    judgement: Judgement | None,
    report: EngineReport | None,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "engine": name,
        "role": role_of(name),
        "level": proposal.get("level"),
        "chosen": bool(proposal.get("chosen", name == PLAN)),
        "formats": proposal.get("formats"),
        "mean_bits": proposal.get("mean_bits"),
        "bytes": report.bytes if report is not None else proposal.get("bytes"),
        "time_ratio": proposal.get("time_ratio"),
        **predicted_columns(proposal.get("divergence_sum")),
    }
    return row | (_judgement_columns(judgement) if judgement is not None else {})


def predicted_columns(value: Any) -> dict[str, float | None]:
    """Return the columns of a predicted divergence: a number, or an estimate as a mapping."""
    if isinstance(value, Mapping):
        low, high = value.get("low"), value.get("high")
        return {"predicted": value["value"], "predicted_low": low, "predicted_high": high}
    return {"predicted": value, "predicted_low": value, "predicted_high": value}


def dominance_words(rows: Sequence[Comparison]) -> list[str]:
    """Say in words how the plan stands beside each other engine: where it wins and where not.

    An engine is better at an axis only beyond noise: throughput and drop where the two intervals
    do not overlap, size by more than half a per cent. Sentences about engines that the plan does
    not dominate come first.
    """
    plan = next((row for row in rows if row.engine == PLAN), None)
    if plan is None:
        return []
    others = [row for row in rows if row.role in ("uniform", "random", "reference")]
    found = [(row, _axes(plan, row)) for row in others]
    lost = [_sentence(plan, row, axes) for row, axes in found if "other" in axes.values()]
    won = [r.engine for r, a in found if "plan" in a.values() and "other" not in a.values()]
    same = [r.engine for r, a in found if a and set(a.values()) == {"same"}]
    if won:
        lost.append(f"The plan is better than {listed(won)} at one thing at least, worse at none.")
    if same:
        lost.append(f"No measurement tells the plan from {listed(same)}.")
    return lost


def _axes(plan: Comparison, other: Comparison) -> dict[str, str]:
    """Return who is better at each axis that both were measured on: plan, other or same."""
    axes: dict[str, str] = {}
    if plan.bench is not None and other.bench is not None:
        axes["speed"] = _better(plan.bench.throughput_rps, other.bench.throughput_rps, sign=1)
    if plan.bytes is not None and other.bytes is not None:
        ratio = other.bytes / plan.bytes if plan.bytes else 1.0
        near = abs(ratio - 1) <= SAME_SIZE
        axes["size"] = "same" if near else ("other" if ratio < 1 else "plan")
    if plan.judgement is not None and other.judgement is not None:
        axes["drop"] = _better(plan.judgement.drop, other.judgement.drop, sign=-1)
    return axes


def _better(plan: Estimate, other: Estimate, sign: int) -> str:
    """Return whose estimate is larger (``sign`` 1) or smaller (−1) beyond both intervals."""
    if plan.low <= other.high and other.low <= plan.high:
        return "same"
    return "plan" if (plan.value - other.value) * sign > 0 else "other"


def _sentence(plan: Comparison, other: Comparison, axes: Mapping[str, str]) -> str:
    wins = [_AXIS_WORDS[axis](plan, other) for axis, who in axes.items() if who == "other"]
    losses = [_AXIS_WORDS[axis](other, plan) for axis, who in axes.items() if who == "plan"]
    text = f"{other.engine} is {listed(wins)}"
    if losses:
        return f"{text}; the plan is {listed(losses)}.{_limit_words(other)}"
    if "drop" in axes and axes["drop"] == "same":
        text += " and its drop cannot be told from the plan's"
    return f"{text}: here the plan does not dominate.{_limit_words(other)}"


def _faster(slow: Comparison, fast: Comparison) -> str:
    assert slow.bench is not None and fast.bench is not None
    pair = (fast.bench.throughput_rps.value, slow.bench.throughput_rps.value)
    return f"faster ({pair[0]:.4g} against {pair[1]:.4g} requests/s)"


def _smaller(large: Comparison, small: Comparison) -> str:
    return f"smaller ({megabytes(small.bytes)} against {megabytes(large.bytes)} MB)"


def _more_accurate(worse: Comparison, better: Comparison) -> str:
    assert worse.judgement is not None and better.judgement is not None
    pair = (estimate(better.judgement.drop), estimate(worse.judgement.drop))
    return f"more accurate (drop {pair[0]} against {pair[1]})"


_AXIS_WORDS = {"speed": _faster, "size": _smaller, "drop": _more_accurate}


def _limit_words(other: Comparison) -> str:
    judgement = other.judgement
    if judgement is None or judgement.margin is None:
        return ""
    if judgement.verdict is Verdict.FAILED:
        return f" Yet {other.engine} breaks the limit that was asked for."
    if judgement.verdict is Verdict.NOT_RESOLVABLE:
        return (
            f" It is not resolvable at n = {judgement.n:,} whether {other.engine} keeps the limit."
        )
    return ""
