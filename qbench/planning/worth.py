"""What each cell would save: the planner's costs, for whoever decides what to measure next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from qbench.backends import Backend
from qbench.planning.costs import make_offer
from qbench.planning.problem import Objective, combined_costs, group_options, problem_of
from qbench.records import Estimate, Kind, Layers, SweepRecord

#: Time of a product of matrices over that in fp32, where its kernel is the backend's own. A first
#: guess: it decides what is measured longest and no plan, which is priced by what was measured.
EXPECTED_TIME: Mapping[str, float] = MappingProxyType(
    {"int8": 0.5, "int8_dynamic": 0.5, "w4a8": 0.9, "w4a16": 1.0, "w8a16": 1.5}
)
_PRODUCTS = frozenset({Kind.LINEAR, Kind.CONV})
#: Milliseconds of an fp32 product a parameter: any number will do, for savings are compared.
_MS_A_PARAMETER = 1e-6


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


def as_expected(
    records: Sequence[SweepRecord], layers: Layers, backend: Backend
) -> tuple[SweepRecord, ...]:
    """Return records with the latencies that are to be expected in place of those measured.

    Measured latencies differ between two runs; what was expected before either does not, so that
    what depends on it is the same again.

    Args:
        records: The records so far.
        layers: All layers of the model.
        backend: The backend that they were measured for.
    """
    names = layers.by_name()
    made = []
    for record in records:
        if record.latency_delta_ms is not None:
            layer = names[record.layer]
            native = not backend.emulates(layer.kind, record.format)
            known = native and layer.kind in _PRODUCTS
            gain = EXPECTED_TIME.get(record.format, 1.0) - 1.0 if known else 0.0
            delta = gain * layer.parameters * _MS_A_PARAMETER
            record = replace(record, latency_delta_ms=Estimate(delta, delta, delta, 1))
        made.append(record)
    return tuple(made)
