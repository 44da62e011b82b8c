"""Driving the repair of a plan: measures and builds what ``planning.repair`` asks for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qbench.errors import MeasurementError
from qbench.planning.choose import Bounds
from qbench.planning.choose import Candidate as Measured
from qbench.planning.problem import Problem
from qbench.planning.repair import Build, Built, Measure, Repair, Stop, step_words
from qbench.progress import Listener
from qbench.records import Verdict
from qbench.statistics import non_inferior
from qbench.trials import Trials

#: Seconds of measuring sets after which a round solves again with what it has.
LOOKS_BUDGET_S = 40.0


@dataclass(slots=True)
class Repaired:
    """What the repair of a plan came to.

    Attributes:
        measured: Engines that were built for it.
        history: One mapping a round: what was measured, built, expected and seen.
        stopped: Why it ended.
    """

    measured: list[Measured] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    stopped: str = ""


def repair(
    trials: Trials,
    problem: Problem,
    measured: Sequence[Measured],
    bounds: Bounds,
    listener: Listener,
) -> Repaired:
    """Measure interactions and build further engines until nothing better is left to try.

    Args:
        trials: Builds and measures.
        problem: What the proposals were chosen from.
        measured: Engines of the front.
        bounds: What an engine may cost.
        listener: Hears of rounds.
    """
    state = Repair(problem, trials.work.config.plan.rounds)
    margin = trials.judge.margin or 0.0
    for candidate in measured:
        state.learn_engine(_built(candidate, margin, bounds))
    done, looked, spent_s = Repaired(), list[dict[str, Any]](), 0.0
    while not isinstance(request := state.next(), Stop):
        if isinstance(request, Measure):
            listener.stage(f"plan: round {state.round}, {request.why}", len(request.sets))
            seen, seconds = _look(trials, state, request, listener)
            looked, spent_s = looked + seen, spent_s + seconds
            if spent_s > LOOKS_BUDGET_S:
                state.end_looks()
            continue
        listener.stage(f"plan: round {state.round}, {request.why}", 1)
        done.history.append(_build(trials, state, request, done, bounds) | {"looked": looked})
        looked, spent_s = [], 0.0
    done.stopped = request.why
    return done


def _look(
    trials: Trials, state: Repair, request: Measure, listener: Listener
) -> tuple[list[dict[str, Any]], float]:
    """Measure sets of cells and tell the state; return what was seen, and the seconds it took."""
    seen = []
    started = time.perf_counter()
    for cells in request.sets:
        own = sum(
            o.divergence
            for layer, form in sorted(cells)
            for o in state.problem.options[layer]
            if o.format == form
        )
        try:
            divergence = trials.divergence_of(cells)
        except MeasurementError as error:
            # What gives no number breaks together: it counts as the worst that was seen.
            worst = max((engine.divergence.value for engine in state.built), default=1.0)
            divergence, told = worst, str(error)
        else:
            told = ""
        state.learn_set(cells, divergence)
        listener.step(f"{len(cells)} layers together")
        names = [f"{layer} {form}" for layer, form in sorted(cells)]
        entry: dict[str, Any] = {"layers": len(names), "sum": own, "divergence": divergence}
        if len(names) <= 4:
            entry["cells"] = names
        if told:
            entry["failed"] = told
        seen.append(entry)
    return seen, time.perf_counter() - started


def _build(
    trials: Trials, state: Repair, request: Build, done: Repaired, bounds: Bounds
) -> dict[str, Any]:
    """Build and measure one repaired engine and tell the state; return the round's entry."""
    name, number = f"repair-{state.round}", state.round
    entry: dict[str, Any] = {
        "round": number,
        "engine": name,
        "why": request.why,
        "level": request.proposal.level,
        "predicted": request.proposal.divergence_sum,
        "interactions": [
            {"cells": [" ".join(cell) for cell in term.cells], "extra": term.extra}
            for term in sorted(state.interactions, key=lambda term: -abs(term.extra))[:8]
        ],
    }
    found = trials.measure({name: request.proposal})
    trials.discard([name])
    if not found:
        state.end_round()
        return entry | {"step": "back", "failed": trials.failed[-1]["failed"]}
    done.measured += found
    built = _built(found[0], trials.judge.margin or 0.0, bounds)
    step = step_words(built, state.built)
    state.learn_engine(built, repaired=True)
    judgement = found[0].judgement
    return entry | {
        "measured": judgement.divergence.value,
        "drop": judgement.drop.value,
        "verdict": str(judgement.verdict),
        "step": step,
    }


def _built(candidate: Measured, margin: float, bounds: Bounds) -> Built:
    drop = candidate.judgement.drop
    accepted = non_inferior(drop, margin) is Verdict.VERIFIED
    return Built(
        candidate.judgement.engine,
        candidate.proposal,
        candidate.judgement.divergence,
        accepted and not bounds.exceeded(candidate.cost),
        drop.high - margin,
    )
