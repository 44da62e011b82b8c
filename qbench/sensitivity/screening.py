"""A look at a cell's remedies: the best of them is measured on all samples, the others stop.

Remedies of a cell differ by far more than the samples of a look do, and there are several of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from qbench.records import Layer, Status, SweepRecord, Treatment
from qbench.sensitivity.looking import Pools, look_name
from qbench.statistics import mean_interval


@dataclass(frozen=True, slots=True)
class Screened:
    """What a look at the remedies of one cell says.

    Attributes:
        best: The remedy to measure on all samples; ``None`` where none diverges less than the
            plain cell.
        stopped: Final records of all others, in their order.
    """

    best: Treatment | None
    stopped: tuple[SweepRecord, ...]


def screen(
    pools: Pools,
    layer: Layer,
    plain: SweepRecord,
    treatments: Sequence[Treatment],
    scale: float,
) -> Screened:
    """Look at every remedy of a cell once, on the samples of the last look.

    Args:
        pools: The looks of the sweep.
        layer: The cell's layer.
        plain: Its record without a remedy.
        treatments: The remedies.
        scale: What the look's mean divergence is multiplied with to compare with all samples'.
    """
    last = len(pools.looks) - 1
    name = look_name(last)
    records = []
    for treatment in treatments:
        records.append(pools.look_at(layer, plain.format, last, treatment))
        pools.forget((layer.name, f"{plain.format} {treatment.variant}"))
    means = [float(np.mean(r.samples[name])) if r.status is Status.OK else np.inf for r in records]
    bar = _plain_mean(pools, layer, plain, last)
    best = int(np.argmin(means)) if means and min(means) < bar else None
    part = f"stopped after {pools.samples[last]} of {pools.bench.task.n} samples"
    stopped = []
    for index, record in enumerate(records):
        if index == best:
            continue
        if record.status is Status.OK:
            better = best is not None and means[index] < bar
            why = (
                f"{treatments[best].variant} diverges less"
                if better and best is not None
                else ("it diverges no less than without")
            )
            values = scale * np.array(record.samples[name])
            divergence = mean_interval(values, seed=pools.bench.seed)
            record = replace(record, divergence=divergence, effort=f"{part}: {why}")
        stopped.append(record)
    return Screened(None if best is None else treatments[best], tuple(stopped))


def _plain_mean(pools: Pools, layer: Layer, plain: SweepRecord, look: int) -> float:
    """Return the plain cell's mean divergence on a look; infinity where it does not end ``ok``."""
    if plain.status is not Status.OK:
        return float("inf")
    name = look_name(look)
    if name not in plain.samples:
        plain = pools.look_at(layer, plain.format, look)
        pools.forget((layer.name, plain.format))
    return float(np.mean(plain.samples[name])) if plain.status is Status.OK else float("inf")
