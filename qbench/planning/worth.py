"""What each cell would save: the planner's costs, for whoever decides what to measure next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qbench.backends import Backend
from qbench.planning.costs import make_offer
from qbench.planning.problem import Objective, combined_costs, group_options, problem_of
from qbench.records import Layers, SweepRecord


def savings(
    records: Sequence[SweepRecord], layers: Layers, backend: Backend, objective: Objective
) -> Mapping[tuple[str, str], float]:
    """Return what each measured cell saves against the high precision, by layer and format.

    In the unit in which the planner weighs seconds and bytes; below zero it costs more. Layers
    that share storage share a saving.

    Args:
        records: The records so far, provisional ones too.
        layers: All layers of the model.
        backend: The backend to plan for.
        objective: ``balanced``, ``latency`` or ``bytes``; ``divergence`` means ``balanced``.
    """
    offer = make_offer(records, layers, backend)
    groups = group_options(problem_of(offer))
    saved: dict[tuple[str, str], float] = {}
    objective = "balanced" if objective == "divergence" else objective
    for group, costs in zip(groups, combined_costs(groups, objective), strict=True):
        for option, cost in zip(group.options[1:], costs[1:], strict=True):
            for layer in group.layers:
                saved[layer, option.format] = (costs[0] - cost) / len(group.layers)
    return saved
