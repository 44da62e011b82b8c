"""Profiling built engines, and refining the planner's prices by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from qbench import base, judging
from qbench.engine.build import label_nodes, lower_graph
from qbench.engine.profiled import layer_times
from qbench.planning.costs import Offer, pool_latency
from qbench.planning.prices import Price, compare, pool_profile
from qbench.planning.problem import Proposal
from qbench.records import SweepRecord
from qbench.runtime.profiling import profile_nodes
from qbench.workbench import Workbench


def profile_prices(
    work: Workbench,
    offer: Offer,
    proposals: Sequence[Proposal],
    records: Sequence[SweepRecord],
) -> list[Price]:
    """Return prices from the node times of engines against those of the reference.

    On one thread, as the segments of the sweep are timed. The reference is profiled before and
    after, and each batch of it counts by its better time.

    Args:
        work: The workbench of a run.
        offer: Knows the remedies of the proposals' layers.
        proposals: What to profile.
        records: The sweep.

    Returns:
        The prices; none where another backend runs the graphs in this one's place.
    """
    if work.backend.stand_in:
        return []
    feeds = [batch.feeds for batch in work.timed_batches()]
    clips = judging.clips_of(work, work.run.read_ranges())

    def times(formats: Mapping[str, str]) -> dict[str, np.ndarray]:
        candidate = base.candidate(work, "profile", formats, offer.treatments_of(formats))
        plan = judging.plan_for(work, candidate, clips)
        graph = lower_graph(work.model.ir, work.layers, plan)
        label_nodes(graph, work.layers)
        settings = replace(judging.settings_of(work, plan), threads=1)
        return layer_times(profile_nodes(graph, settings, feeds), graph, work.layers)

    before = times({})
    profiles = [(proposal, times(proposal.formats)) for proposal in proposals]
    after = times({})
    deltas: dict[tuple[str, str], list[float]] = {}
    for proposal, own in profiles:
        for layer, form in proposal.formats.items():
            if form != offer.high_precision:
                change = own[layer] - np.minimum(before[layer], after[layer])
                deltas.setdefault((layer, form), []).extend(change.tolist())
    return compare(pool_latency(records, work.layers), pool_profile(deltas, work.layers))
