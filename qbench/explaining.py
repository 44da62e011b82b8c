"""Causes in a run: why its cells are in trouble, from what calibration and the sweep left."""

from __future__ import annotations

from collections.abc import Sequence

from qbench import judging
from qbench.calibration.searched import cut_off
from qbench.lowering.smooth import product_weight
from qbench.records import Cause, Kind, SweepRecord, WeightFacts
from qbench.sensitivity.causes import Clipping, Evidence, find_causes, weight_facts
from qbench.workbench import Workbench


def explain_cells(work: Workbench, records: Sequence[SweepRecord]) -> tuple[Cause, ...]:
    """Find the causes of every cell in trouble; write and return them.

    Args:
        work: The workbench of the run.
        records: The plain cells of the sweep.
    """
    ranges = work.run.read_ranges()
    histograms = work.run.read_histograms()
    clipping = {}
    tops = {seen.tensor: seen.absmax for seen in ranges}
    for tensor, clip in judging.clips_of(work, ranges).items():
        if tensor in histograms and clip < tops[tensor]:
            share, error = cut_off(histograms[tensor], tops[tensor], clip)
            clipping[tensor] = Clipping(clip, share, error)
    evidence = Evidence(
        work.layers.layers, {seen.tensor: seen for seen in ranges}, _weights(work), clipping
    )
    causes = find_causes(records, evidence)
    work.run.write_causes(causes)
    return causes


def _weights(work: Workbench) -> dict[str, WeightFacts]:
    facts = {}
    for layer in work.chosen:
        weight = product_weight(work.model.ir, layer) if layer.kind is Kind.LINEAR else ""
        if not isinstance(weight, str):
            facts[layer.name] = weight_facts(layer.name, weight)
    return facts
