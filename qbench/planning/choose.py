"""Which measured proposal becomes the plan, and what is said where none does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qbench.planning.problem import BALANCE, Objective, Proposal
from qbench.records import Judgement, Verdict
from qbench.statistics import describe, non_inferior, samples_needed

_NO_GAIN: dict[Objective, str] = {
    "balanced": "neither faster nor smaller",
    "divergence": "neither faster nor smaller",
    "latency": "not faster",
    "bytes": "not smaller",
}

#: Share of the time within which engines may count as equally fast.
_SAME_TIME = 0.02


@dataclass(frozen=True, slots=True)
class Cost:
    """What an engine was measured to cost.

    Attributes:
        bytes: Size of the engine's file and its external data.
        seconds: Time of the same work for each engine compared (a batch, or all batches).
        spread: Half the width of the interval of ``seconds``.
    """

    bytes: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A proposal that was built and measured.

    Attributes:
        proposal: What was asked for.
        judgement: What its engine gave on the split that decides.
        cost: What its engine costs.
    """

    proposal: Proposal
    judgement: Judgement
    cost: Cost


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a measured engine may not exceed; ``None`` is no bound.

    Attributes:
        bytes: Size of the engine's file and its external data.
        seconds: Time of the same work, in the unit of ``Cost``.
    """

    bytes: int | None = None
    seconds: float | None = None

    def exceeded(self, cost: Cost) -> str:
        """Return what a cost exceeds, in words, or ""."""
        said = []
        if self.bytes is not None and cost.bytes > self.bytes:
            said.append(f"{cost.bytes:,} bytes, and {self.bytes:,} are allowed")
        if self.seconds is not None and cost.seconds > self.seconds:
            said.append(
                f"{cost.seconds:.1%} of the reference's time, and {self.seconds:.1%} is allowed"
            )
        return "; ".join(said)


@dataclass(frozen=True, slots=True)
class Choice:
    """What came of the front.

    Attributes:
        verdict: ``verified`` (there is a plan: non-inferior, and faster or smaller), ``no_gain``,
            ``not_resolvable`` or ``budget_unreachable``.
        candidate: The plan, or the nearest to one, which a reader wants to see.
        words: The reason in a sentence or two.
    """

    verdict: Verdict
    candidate: Candidate | None
    words: str


def choose(
    candidates: Sequence[Candidate],
    reference: Cost,
    *,
    margin: float,
    objective: Objective = "latency",
    bounds: Bounds | None = None,
) -> Choice:
    """Return the cheapest candidate whose measured drop is non-inferior at ``margin``.

    Cheap is what was measured on the engines, not what was predicted. Of equally cheap ones the
    one with less of the other cost is taken, then the one with the smaller drop. Where time counts,
    times that their intervals do not tell apart, and that are within 2 %, are equal: then
    the size counts where it does not already, and the divergence.

    Args:
        candidates: Proposals that were built and judged.
        reference: Cost of the reference engine, measured the same way.
        margin: Largest drop allowed, in the metric's unit.
        objective: What is minimised; for ``divergence`` the measured one counts.
        bounds: What was asked of the engine's own cost.
    """
    if not candidates:
        return Choice(
            Verdict.NO_GAIN, None, "no format that was measured is cheaper than the reference"
        )
    within = [c for c in candidates if bounds is None or not bounds.exceeded(c.cost)]
    if bounds is not None and not within:
        return _none_within(candidates, bounds)
    ranked = sorted(
        within, key=lambda c: (*_costs(c, reference, objective), c.judgement.drop.value)
    )
    verdicts = [non_inferior(c.judgement.drop, margin) for c in ranked]
    accepted = [c for c, v in zip(ranked, verdicts, strict=True) if v is Verdict.VERIFIED]
    if not accepted:
        open_ones = [c for c, v in zip(ranked, verdicts, strict=True) if v is not Verdict.FAILED]
        return _none_accepted(ranked, open_ones, margin)
    gaining = [c for c in accepted if _gains(c.cost, reference, objective)]
    if not gaining:
        best = accepted[0]
        return Choice(
            Verdict.NO_GAIN,
            best,
            f"do not quantize: {best.judgement.engine} keeps the accuracy but is "
            f"{_NO_GAIN[objective]} than the reference: {_against(best.cost, reference)}",
        )
    passed_over = ranked.index(gaining[0])
    best = _least_divergent(_near(gaining, reference, objective), reference, objective)
    place = "the cheapest" if best is gaining[0] else "the least divergent of the cheapest ones"
    words = (
        f"{best.judgement.engine} is {place} of {len(candidates)} measured whose drop stays "
        f"within {margin:.4g}: {_against(best.cost, reference)}"
    )
    if passed_over:
        words += f"; {passed_over} cheaper did not show it at n = {best.judgement.n:,}"
    if objective != "bytes" and best.cost.seconds == reference.seconds:
        words += "; its speed was not measured"
    elif objective != "bytes" and best.cost.seconds > reference.seconds:
        words += "; it is smaller, not faster: keep the reference if latency is all that counts"
    return Choice(Verdict.VERIFIED, best, words)


def contenders(
    candidates: Sequence[Candidate], reference: Cost, objective: Objective, most: int
) -> list[Candidate]:
    """Return at most so many candidates whose time does not tell them from the cheapest one."""
    ranked = sorted(candidates, key=lambda c: _costs(c, reference, objective))
    if objective in ("bytes", "divergence") or not ranked:
        return []
    edge = _costs(ranked[0], reference, objective)[0] + _spread(ranked[0], reference)
    near = [c for c in ranked if _costs(c, reference, objective)[0] - _spread(c, reference) <= edge]
    return near[:most]


def _spread(candidate: Candidate, reference: Cost) -> float:
    return candidate.cost.spread / (reference.seconds or 1.0)


def _near(ranked: Sequence[Candidate], reference: Cost, objective: Objective) -> list[Candidate]:
    """Return the candidates whose times are not told from the first one's."""
    if objective in ("bytes", "divergence"):
        return [ranked[0]]
    least = _costs(ranked[0], reference, objective)[0]
    allowed = _SAME_TIME * ranked[0].cost.seconds

    def is_near(candidate: Candidate) -> bool:
        spread = max(candidate.cost.spread, ranked[0].cost.spread)
        return _costs(candidate, reference, objective)[0] - least <= min(spread, allowed)

    return [ranked[0], *filter(is_near, ranked[1:])]


def _least_divergent(
    candidates: Sequence[Candidate], reference: Cost, objective: Objective
) -> Candidate:
    def key(candidate: Candidate) -> tuple[float, float]:
        share = candidate.cost.bytes / reference.bytes if reference.bytes else 0.0
        size = round(share, 2) if objective == "latency" else 0.0
        return size, candidate.judgement.divergence.value

    return min(candidates, key=key)


def _none_accepted(
    ranked: Sequence[Candidate], unresolved: Sequence[Candidate], margin: float
) -> Choice:
    if unresolved:
        best = min(
            unresolved, key=lambda c: samples_needed(c.judgement.drop, margin) or float("inf")
        )
        return Choice(
            Verdict.NOT_RESOLVABLE,
            best,
            f"no drop was shown to stay within {margin:.4g}; nearest, {best.judgement.engine}: "
            f"{describe(best.judgement.drop, margin)}",
        )
    best = min(ranked, key=lambda c: c.judgement.drop.value)
    drop = best.judgement.drop
    return Choice(
        Verdict.BUDGET_UNREACHABLE,
        best,
        f"each of the {len(ranked)} measured drops by more than {margin:.4g}; the least, "
        f"{best.judgement.engine}: {drop.value:.4g} [{drop.low:.4g}, {drop.high:.4g}]; "
        "allow a larger max_drop, or let the sweep try more formats",
    )


def _none_within(candidates: Sequence[Candidate], bounds: Bounds) -> Choice:
    best = min(
        candidates,
        key=lambda c: (
            max(0.0, c.cost.bytes / bounds.bytes - 1.0) if bounds.bytes else 0.0,
            max(0.0, c.cost.seconds / bounds.seconds - 1.0) if bounds.seconds else 0.0,
        ),
    )
    return Choice(
        Verdict.BUDGET_UNREACHABLE,
        best,
        f"none of the {len(candidates)} measured keeps what was asked; nearest, "
        f"{best.judgement.engine}: {bounds.exceeded(best.cost)}",
    )


def _costs(candidate: Candidate, reference: Cost, objective: Objective) -> tuple[float, float]:
    cost = candidate.cost
    if objective == "divergence":
        return candidate.judgement.divergence.value, cost.seconds
    if objective == "balanced":
        share = cost.bytes / reference.bytes if reference.bytes else 0.0
        return cost.seconds / (reference.seconds or 1.0) + BALANCE * share, float(cost.bytes)
    pair = (cost.seconds, float(cost.bytes))
    return pair if objective == "latency" else (pair[1], pair[0])


def _gains(cost: Cost, reference: Cost, objective: Objective) -> bool:
    """Whether an engine gives what was asked for; the batcher decides later on speed."""
    faster, smaller = cost.seconds < reference.seconds, cost.bytes < reference.bytes
    return {"latency": faster, "bytes": smaller}.get(objective, faster or smaller)


def _against(cost: Cost, reference: Cost) -> str:
    """Return a cost beside the reference's, in words."""
    parts = []
    if cost.seconds > 0 and reference.seconds > 0 and cost.seconds != reference.seconds:
        parts.append(f"{reference.seconds / cost.seconds:.2f}x as fast")
    if reference.bytes > 0:
        parts.append(f"{cost.bytes / reference.bytes:.0%} of its size")
    return ", ".join(parts)
