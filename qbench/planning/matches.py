"""Whether engines that nobody had to choose are as good as the plan's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qbench.records import Estimate, Verdict

#: Engines whose sizes differ by less than this share are equally large.
SAME_SIZE = 0.005


@dataclass(frozen=True, slots=True)
class Standing:
    """How an engine stands.

    Attributes:
        name: Its name.
        bytes: Its size.
        drop: Its paired drop on the verification split.
        verdict: What the drop means.
        throughput: Requests a second under load, ``None`` before the benchmark.
    """

    name: str
    bytes: int
    drop: Estimate
    verdict: Verdict
    throughput: Estimate | None = None


def matched_by(plan: Standing, others: Sequence[Standing]) -> list[str]:
    """Return the engines that no measurement shows to be worse than the plan in anything.

    Such an engine keeps the limit as the plan does, is not larger, its drop is not shown to be
    larger, and its throughput not shown to be lower: the plan's choice of layers gained nothing
    over it.
    """
    return [other.name for other in others if _matches(plan, other)]


def _matches(plan: Standing, other: Standing) -> bool:
    if plan.verdict is Verdict.VERIFIED and other.verdict is not Verdict.VERIFIED:
        return False
    if other.bytes > plan.bytes * (1 + SAME_SIZE) or other.drop.low > plan.drop.high:
        return False
    if plan.throughput is None or other.throughput is None:
        return plan.throughput is None and other.throughput is None
    return other.throughput.high >= plan.throughput.low


def match_words(names: Sequence[str], timed: bool) -> str:
    """Return in words that engines match the plan, or ""."""
    if not names:
        return ""
    what = "size, drop and throughput" if timed else "size and drop"
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    verb = "matches" if len(names) == 1 else "match"
    return f"{listed} {verb} it in {what}: choosing layers gained nothing over that"
