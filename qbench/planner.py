"""From sweep records to a plan: propose, build, measure, repair, choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qbench import base, budgets, judging
from qbench.config import PlanConfig
from qbench.errors import BudgetError, InputError, MeasurementError, RunDirError
from qbench.planning.blocks import with_blocks
from qbench.planning.choose import Bounds, Choice, Cost, choose, contenders
from qbench.planning.choose import Candidate as Measured
from qbench.planning.costs import Offer, sum_divergence
from qbench.planning.foreign import formats_of, read_modelopt
from qbench.planning.front import front, without_mixture
from qbench.planning.pins import apply_pins
from qbench.planning.prices import Price, reprice
from qbench.planning.problem import Problem, Proposal
from qbench.planning.reasons import plan_layers, with_treatment
from qbench.planning.solve import propose
from qbench.planning.targets import offer_on
from qbench.planning.wide import offer_pinned
from qbench.pricing import profile_prices
from qbench.progress import Listener
from qbench.records import Judgement, Plan, SweepRecord, Verdict, to_dict
from qbench.remedying import records_to_plan
from qbench.repairs import repair
from qbench.statistics import non_inferior
from qbench.trials import Trials, names_of
from qbench.workbench import Workbench

#: Engines that are timed again beside each other, where times do not tell them apart.
_CONTENDERS = 5


@dataclass(frozen=True, slots=True)
class Decision:
    """What planning came to.

    Attributes:
        plan: The plan; all high precision where nothing was accepted.
        verdict: Verdict on the sweep split; ``None`` where nothing was measured.
        words: The reason.
        front: Every proposal that was measured, as plain mappings.
        judgements: What their engines gave on the sweep split.
        prices: What formats cost, from segments and from profiles of built engines.
    """

    plan: Plan
    verdict: Verdict | None
    words: str
    front: tuple[Mapping[str, Any], ...] = ()
    judgements: tuple[Judgement, ...] = ()
    prices: tuple[Price, ...] = ()


def decide(work: Workbench, listener: Listener) -> Decision:
    """Propose plans from divergences, measure their engines, repair them, and choose one.

    Raises:
        InputError: If a pin matches nothing, contradicts another, or was not measured.
    """
    records = records_to_plan(work)
    pins = base.pins_on(work, budgets.pins_of(work))
    whole = offer_pinned(base.offer_of(work, records), pins, work.layers)
    offer = apply_pins(offer_on(whole, work.config.plan.hardware, work.backend), pins)
    offer = replace(offer, tied_bytes=budgets.tied_bytes(work, offer))
    try:
        problem, bounds = _problem(work, offer)
        proposals = proposals_of(problem, work.config.plan)
    except BudgetError as error:
        return Decision(_kept(work, offer), Verdict.BUDGET_UNREACHABLE, str(error))
    listener.stage("plan: engines of the front", len(proposals))
    trials = Trials(work, offer, listener)
    named = names_of("front", proposals)
    measured = trials.measure(named)
    trials.discard(named)
    measured += _tightened(trials, problem, measured, bounds)
    prices = profile_prices(work, offer, _spread(proposals), records)
    offer = reprice(offer, prices, work.layers, work.backend)
    problem = replace(problem, options=offer.options)
    repaired = repair(trials, problem, measured, bounds, listener)
    reference = Cost(base.base_bytes(work), 1.0)
    measured = _timed_together(trials, [*measured, *repaired.measured], reference, bounds)
    choice = choose(
        measured,
        reference,
        margin=trials.judge.margin or 0.0,
        objective=problem.objective,
        bounds=bounds,
    )
    rows = [_row(m, records, choice, work.config.run.seed) for m in measured]
    short = [{k: v for k, v in row.items() if k not in ("formats", "layers")} for row in rows]
    history = (*short, *trials.failed, *repaired.history, {"stopped": repaired.stopped})
    return Decision(
        replace(_plan_of(work, offer, problem, choice), history=history),
        choice.verdict,
        choice.words,
        tuple(rows),
        tuple(m.judgement for m in measured),
        tuple(prices),
    )


def _tightened(
    trials: Trials, problem: Problem, measured: Sequence[Measured], bounds: Bounds
) -> list[Measured]:
    """Return one more front within tighter limits, where no engine kept those that were asked.

    An engine is a little larger than its weights, and its time is not the sum of its layers': by
    how much was just measured, and the limits are lowered by that.
    """
    if not measured or not all(bounds.exceeded(m.cost) for m in measured):
        return []
    work, limits = trials.work, problem.limits
    graph = budgets.graph_bytes(work)
    tight: dict[str, float] = {}
    if bounds.bytes is not None:
        over = max(m.cost.bytes - m.proposal.bytes - graph for m in measured)
        tight["bytes"] = bounds.bytes - graph - over
    if bounds.seconds is not None and limits.seconds is not None and bounds.seconds < 1:
        batch_s = limits.seconds / (bounds.seconds - 1)
        over_s = max((m.cost.seconds - 1) * batch_s - m.proposal.seconds for m in measured)
        tight["seconds"] = limits.seconds - max(0.0, over_s)
    try:
        proposals = front(replace(problem, limits=replace(limits, **tight)), 2)
    except BudgetError:
        return []  # what was measured says how near it came
    named = names_of("front", proposals, len(measured) + len(trials.failed))
    found = trials.measure(named)
    trials.discard(named)
    return found


def _timed_together(
    trials: Trials, measured: Sequence[Measured], reference: Cost, bounds: Bounds
) -> list[Measured]:
    """Return all engines; those that may become the plan are timed again, longer and in one run.

    That is where times decide and do not tell engines apart yet.
    """
    margin, objective = trials.judge.margin or 0.0, trials.work.config.plan.objective

    def may_be_chosen(m: Measured) -> bool:
        fine = non_inferior(m.judgement.drop, margin) is Verdict.VERIFIED
        return fine and not bounds.exceeded(m.cost)

    able = [] if trials.work.backend.stand_in else [m for m in measured if may_be_chosen(m)]
    final = contenders(able, reference, objective, _CONTENDERS)
    if len(final) < 2:
        return list(measured)
    again = {m.judgement.engine: m for m in trials.time_together(final)}
    return [again.get(m.judgement.engine, m) for m in measured]


def _spread(proposals: Sequence[Proposal]) -> list[Proposal]:
    """Return the proposals that are profiled: the cheapest one, and one from the middle."""
    picked = {len(proposals) - 1, len(proposals) // 2}
    return [p for index, p in enumerate(proposals) if index in picked]


def _problem(work: Workbench, offer: Offer) -> tuple[Problem, Bounds]:
    """Return the choice to be made and what its engine may cost.

    Raises:
        BudgetError: If a limit cannot be kept, alone or with the others.
    """
    latency = budgets.max_latency_of(work)
    reference_ms = None if latency is None else judging.reference_ms(work)
    limits = budgets.limits_of(work, reference_ms)
    share = None if latency is None or reference_ms is None else latency.share(reference_ms)
    return (
        budgets.problem_for(work, offer, limits),
        Bounds(budgets.max_bytes_of(work), share),
    )


def proposals_of(problem: Problem, how: PlanConfig) -> list[Proposal]:
    """Return the proposals to build.

    The time of a single layer is noisy, and the engines that are measured decide: where no choice
    looks faster the smaller ones are built, and the fastest is built without its mixture as well.

    Raises:
        BudgetError: If no choice keeps the limits.
    """
    found = front(problem, how.levels)
    if all(form in (problem.high_precision, "fp32") for p in found for form in p.formats.values()):
        smaller = front(replace(problem, objective="bytes"), how.levels)
        return [*found, *(p for p in smaller if p.formats not in [q.formats for q in found])]
    pure = without_mixture(problem, found) if problem.objective in ("balanced", "latency") else ()
    return sorted((*found, *pure), key=lambda p: p.divergence_sum)


def _kept(work: Workbench, offer: Offer) -> Plan:
    """Return the plan that lowers nothing but what the user pinned."""
    return _plan_with(work, offer, {name: own[0].format for name, own in offer.options.items()})


def _plan_of(work: Workbench, offer: Offer, problem: Problem, choice: Choice) -> Plan:
    accepted = choice.candidate if choice.verdict is Verdict.VERIFIED else None
    if accepted is None:
        return _kept(work, offer)
    how = work.config.plan
    proposal = accepted.proposal
    if how.max_bits is not None and proposal.bits > how.max_bits * (1 + 1e-9):
        raise MeasurementError(
            f"the plan has {proposal.bits:.4g} mean bits and {how.max_bits:g} were asked for: a "
            "defect of the planner; please report it"
        )
    return _plan_with(work, offer, proposal.formats, accepted.judgement)


def _plan_with(
    work: Workbench,
    offer: Offer,
    formats: Mapping[str, str],
    judgement: Judgement | None = None,
) -> Plan:
    """Return a plan of given formats with all its evidence."""
    records = records_to_plan(work)
    clips = judging.clips_of(work, work.run.read_ranges())
    own = {
        layer.name: {e.tensor: clips[e.tensor] for e in layer.edges if e.tensor in clips}
        for layer in work.layers.layers
    }
    rows = plan_layers(work.layers, offer, formats, clips=own, objective=budgets.objective_of(work))
    rows = with_blocks(rows, records)
    treatments = offer.treatments_of(formats)
    return Plan(
        version=1,
        backend=work.backend.name,
        model_source=work.config.model.source,
        model_sha256=work.model.sha256,
        layers=tuple(with_treatment(row, treatments.get(row.name)) for row in rows),
        session_options=dict(work.backend.session_options),
        constraints=constraints_of(work),
        predicted=_predicted(work, offer, formats, records),
        measured=None if judgement is None else to_dict(judgement),
    )


def _predicted(
    work: Workbench, offer: Offer, formats: Mapping[str, str], records: Sequence[SweepRecord]
) -> dict[str, Any]:
    """Return what a choice is expected to cost; nothing where a cell of it was not measured."""
    try:
        proposal = propose(formats, budgets.problem_for(work, offer))
    except InputError:  # formats that came from elsewhere may never have been swept
        return {}
    return {
        "divergence": to_dict(sum_divergence(formats, records, seed=work.config.run.seed)),
        "bytes": proposal.bytes,
        "seconds": proposal.seconds,
        "mean_bits": proposal.bits,
        "mean_bits_with_scales": proposal.stored_bits,
    }


def constraints_of(work: Workbench) -> dict[str, Any]:
    """Return what was asked of a plan, as its file and the report tell it."""
    how = work.config.plan
    told = {
        "metric": work.task("sweep").metrics[0].name,
        "max_drop": str(how.allowed_drop),
        "objective": how.objective,
        "hardware": how.hardware,
        "max_latency": how.max_latency,
        "max_bytes": how.max_bytes,
        "max_bits": how.max_bits,
        "batch": work.config.sweep.batch,
        "keep": list(how.keep) or None,
        "ban": list(how.ban) or None,
    }
    return {key: value for key, value in told.items() if value is not None}


def plan_of_point(work: Workbench, number: int) -> Decision:
    """Return the plan of a point of the measured front, whatever the choice was.

    Its verdict is what was measured on the sweep split; verification is still to come.

    Args:
        work: The workbench of a run that was planned.
        number: The point's place in the front's table, from 1.

    Raises:
        RunDirError: If there is no front, or it has no such point.
    """
    rows = work.run.read_front()
    if not 1 <= number <= len(rows):
        raise RunDirError(
            f"--point: got {number}; the front of {work.run.path} has points 1 to {len(rows)}"
            if rows
            else f"{work.run.path} has no front yet; qbench plan {work.run.path} measures it"
        )
    row = rows[number - 1]
    if "layers" not in row:
        raise RunDirError(
            f"point {number} of {work.run.path} does not tell its layers: it was measured by an "
            f"older version; qbench plan {work.run.path} measures it again"
        )
    offer = base.offer_of(work, records_to_plan(work))
    judged = next((j for j in work.run.read_judgements("sweep") if j.engine == row["engine"]), None)
    plan = _plan_with(work, offer, row["layers"], judged)
    told = {"point": number, "engine": row["engine"], "level": row["level"]}
    verdict = Verdict.NOT_RESOLVABLE if judged is None else judged.verdict
    words = f"point {number} of the front ({row['engine']}) was taken as the plan"
    return Decision(replace(plan, history=(told,)), verdict, words)


def plan_of_modelopt(work: Workbench, path: Path) -> Decision:
    """Return the plan that a result of ModelOpt's ``auto_quantize`` says; nothing was measured.

    Raises:
        PlanError: If the file is no such result, names what is no layer here, or a recipe that
            this backend has no format for.
    """
    own = formats_of(read_modelopt(path), work.layers, work.backend, str(path))
    formats = own | base.base_formats(work)
    offer = base.offer_of(work, work.run.read_sweep())
    plan = _plan_with(work, offer, formats)
    high = work.backend.high_precision
    rows = tuple(
        replace(row, reason=f"{row.format}: ModelOpt's choice ({path.name})", treatment=None)
        if row.format != high
        else row
        for row in plan.layers
    )
    lowered = sum(row.format != high for row in rows)
    words = f"{lowered} layers lowered as {path.name} says; build, then verify the engine"
    told = {"imported": path.name, "lowered": lowered}
    return Decision(replace(plan, layers=rows, history=(told,)), None, words)


def _row(
    measured: Measured, records: Sequence[SweepRecord], choice: Choice, seed: int
) -> dict[str, Any]:
    proposal, judgement = measured.proposal, measured.judgement
    counts: dict[str, int] = {}
    for form in proposal.formats.values():
        counts[form] = counts.get(form, 0) + 1
    total = sum_divergence(proposal.formats, records, seed=seed)
    return {
        "engine": judgement.engine,
        "level": proposal.level,
        "divergence_sum": to_dict(total) if total is not None else proposal.divergence_sum,
        "bytes": measured.cost.bytes,
        "seconds": proposal.seconds,
        "mean_bits": proposal.bits,
        "time_ratio": measured.cost.seconds,
        "formats": counts,
        "layers": dict(proposal.formats),
        "drop": to_dict(judgement.drop),
        "verdict": str(judgement.verdict),
        "chosen": measured is choice.candidate and choice.verdict is Verdict.VERIFIED,
    }
