"""From sweep records to a plan: propose, build, measure, choose; and what to compare it with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qbench import judging
from qbench.backends import applicability
from qbench.config import PlanConfig
from qbench.errors import InputError, MeasurementError
from qbench.judging import Candidate
from qbench.planning.choose import Candidate as Measured
from qbench.planning.choose import Choice, Cost, choose
from qbench.planning.costs import Offer, make_offer, sum_divergence
from qbench.planning.front import front, random_plan
from qbench.planning.reasons import plan_layers
from qbench.planning.solve import Proposal, cost_of, propose
from qbench.progress import Listener
from qbench.records import Judgement, Plan, Status, SweepRecord, Verdict, to_dict
from qbench.workbench import Workbench

#: Uniform engines: one format wherever it applies to a linear layer.
UNIFORM = ("int8", "int8_dynamic", "w8a16", "w4a16")
RANDOM = "random"
BASELINES = (*UNIFORM, RANDOM)


@dataclass(frozen=True, slots=True)
class Decision:
    """What planning came to.

    Attributes:
        plan: The plan; all high precision where nothing was accepted.
        verdict: Verdict on the sweep split.
        words: The reason.
        front: Every proposal that was measured, as plain mappings.
        judgements: What their engines gave on the sweep split.
    """

    plan: Plan
    verdict: Verdict
    words: str
    front: tuple[Mapping[str, Any], ...]
    judgements: tuple[Judgement, ...]


def decide(work: Workbench, listener: Listener) -> Decision:
    """Propose plans from divergences, measure their engines, and choose one."""
    records = work.run.read_sweep()
    offer = make_offer(records, work.layers, work.backend)
    how = work.config.plan
    proposals = proposals_of(offer, how)
    listener.stage("plan: engines of the front", len(proposals))
    measured, failed = _measure(work, proposals, listener)
    judge = judging.judge_for(work, "sweep")
    reference = Cost(judging.reference_report(work).bytes, 1.0)
    choice = choose(measured, reference, margin=judge.margin or 0.0, objective=how.objective)
    plan = _plan_of(work, offer, choice, records)
    rows = [_row(m, records, choice, work.config.run.seed) for m in measured]
    history = tuple({k: v for k, v in row.items() if k != "formats"} for row in rows)
    return Decision(
        replace(plan, history=(*history, *failed)),
        choice.verdict,
        choice.words,
        tuple(rows),
        tuple(m.judgement for m in measured),
    )


def proposals_of(offer: Offer, how: PlanConfig) -> list[Proposal]:
    """Return the proposals to build.

    Where no choice looks faster, the smaller ones are built all the same: the time of a single
    layer is noisy, and the engines that are measured decide.
    """
    found = front(offer.options, how.levels, objective=how.objective, ties=offer.ties)
    return found or front(offer.options, how.levels, objective="bytes", ties=offer.ties)


def _measure(
    work: Workbench, proposals: Sequence[Proposal], listener: Listener
) -> tuple[list[Measured], list[dict[str, Any]]]:
    clips = judging.clips_of(work, work.run.read_ranges())
    judge = judging.judge_for(work, "sweep")
    built: list[tuple[str, Proposal, int, Judgement]] = []
    failed: list[dict[str, Any]] = []
    for number, proposal in enumerate(proposals, 1):
        name = f"front-{number}"
        plan = judging.plan_for(work, Candidate(name, proposal.formats), clips)
        try:
            report = judging.build(work, name, plan)
            judgement = judging.judge(work, judge, name)
        except MeasurementError as error:
            failed.append({"engine": name, "level": proposal.level, "failed": str(error)})
        else:
            built.append((name, proposal, report.bytes, judgement))
        listener.step(name)
    names = [name for name, *_ in built]
    seconds = judging.time_engines(work, names) if names else {}
    judging.discard(work, names)
    return [
        Measured(proposal, judgement, Cost(size, seconds[name].value))
        for name, proposal, size, judgement in built
    ], failed


def _plan_of(work: Workbench, offer: Offer, choice: Choice, records: Sequence[SweepRecord]) -> Plan:
    high = work.backend.high_precision
    accepted = choice.candidate if choice.verdict is Verdict.VERIFIED else None
    formats = (
        dict(accepted.proposal.formats)
        if accepted is not None
        else {layer.name: high for layer in work.layers.layers}
    )
    clips = judging.clips_of(work, work.run.read_ranges())
    own = {
        layer.name: {e.tensor: clips[e.tensor] for e in layer.edges if e.tensor in clips}
        for layer in work.layers.layers
    }
    proposal = propose(formats, offer.options, offer.ties)
    how = work.config.plan
    predicted = {
        "divergence": to_dict(sum_divergence(formats, records, seed=work.config.run.seed)),
        "bytes": proposal.bytes,
        "seconds": proposal.seconds,
    }
    return Plan(
        version=1,
        backend=work.backend.name,
        model_source=work.config.model.source,
        model_sha256=work.model.sha256,
        layers=plan_layers(work.layers, offer, formats, clips=own, objective=how.objective),
        session_options=dict(work.backend.session_options),
        constraints={
            "metric": work.task("sweep").metrics[0].name,
            "max_drop": str(how.allowed_drop),
            "objective": how.objective,
        },
        predicted=predicted,
        measured=to_dict(accepted.judgement) if accepted is not None else None,
    )


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
        "time_ratio": measured.cost.seconds,
        "formats": counts,
        "drop": to_dict(judgement.drop),
        "verdict": str(judgement.verdict),
        "chosen": measured is choice.candidate and choice.verdict is Verdict.VERIFIED,
    }


def propose_baselines(work: Workbench, plan: Plan) -> list[Candidate]:
    """Return the engines that a plan is compared with: uniform ones, and a random one of equal
    cost. A layer whose cell did not end ``ok`` keeps the high precision in them too."""
    records = work.run.read_sweep()
    fine = {(r.layer, r.format) for r in records if r.status is Status.OK}
    candidates = []
    for name in UNIFORM:
        formats = {
            layer.name: name
            for layer in work.layers.layers
            if (layer.name, name) in fine
            and applicability(layer.kind, name, work.backend)[0] is Status.OK
        }
        if formats:
            candidates.append(Candidate(name, formats))
    random = _random_formats(work, plan, records)
    if random:
        candidates.append(Candidate(RANDOM, random))
    return candidates


def _random_formats(
    work: Workbench, plan: Plan, records: Sequence[SweepRecord]
) -> Mapping[str, str]:
    offer = make_offer(records, work.layers, work.backend)
    objective = work.config.plan.objective
    try:
        own = propose(plan.formats(), offer.options, offer.ties)
        return random_plan(
            offer.options,
            target_cost=cost_of(own, objective),
            objective=objective,
            seed=work.config.run.seed,
            ties=offer.ties,
        ).formats
    except InputError:  # a plan edited by hand may hold formats that were never measured
        return {}
