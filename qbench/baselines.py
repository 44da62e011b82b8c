"""Engines that a plan is compared with: uniform ones, and a random one of equal cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qbench import base, budgets
from qbench.backends import Variant, applicability
from qbench.errors import InputError
from qbench.judging import Candidate
from qbench.planning.costs import weight_elements
from qbench.planning.front import random_plan
from qbench.planning.problem import cost_of
from qbench.planning.solve import propose
from qbench.records import Plan, Status, SweepRecord
from qbench.workbench import Workbench

#: Uniform engines: one format for every matrix that can take it.
UNIFORM = ("int8", "int8_dynamic", "w8a16", "w4a16")
RANDOM = "random"
BASELINES = (*UNIFORM, "fp16", RANDOM)


def propose_baselines(work: Workbench, plan: Plan) -> list[Candidate]:
    """Return the engines that a plan is compared with: uniform ones, and a random one of equal
    cost. Activations, and layers whose cell did not end ``ok``, keep the high precision there."""
    records = work.run.read_sweep()
    fine = {(r.layer, r.format) for r in records if r.status is Status.OK}
    candidates = []
    for name in UNIFORM:
        formats = {
            layer.name: name
            for layer in work.layers.layers
            if (layer.name, name) in fine
            and applicability(layer.kind, name, work.backend)[0] is Status.OK
            and weight_elements(layer)
        }
        if formats:
            candidates.append(base.candidate(work, name, formats))
    if work.backend.variant is Variant.ISLANDS:  # the model itself is in fp32
        candidates.append(base.candidate(work, work.backend.high_precision, {}))
    if random := _random_formats(work, plan, records):
        candidates.append(base.candidate(work, RANDOM, random))
    return candidates


def _random_formats(
    work: Workbench, plan: Plan, records: Sequence[SweepRecord]
) -> Mapping[str, str]:
    problem = budgets.problem_for(work, base.offer_of(work, records))
    try:
        own = propose(plan.formats(), problem)
        target = cost_of(own, "bytes" if problem.objective == "bytes" else "latency")
        return random_plan(problem, target_cost=target, seed=work.config.run.seed).formats
    except InputError:  # a plan edited by hand may hold formats that were never measured
        return {}
