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
        best: The look at the remedy to measure on all samples; ``None`` where none diverges less
            than the plain cell.
        stopped: Final records of all others, in their order.
    """

    best: SweepRecord | None
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
    records = [_look(pools, layer, plain.format, last, treatment) for treatment in treatments]
    means = [_mean(record, last) for record in records]
    bar = _plain_mean(pools, layer, plain, last)
    place = int(np.argmin(means))
    best = records[place] if means[place] < bar else None
    part = f"stopped after {pools.samples[last]} of {pools.bench.task.n} samples"
    stopped = []
    for record, mean in zip(records, means, strict=True):
        if record is best:
            continue
        if record.status is Status.OK:
            why = "it diverges no less than without"
            if best is not None and mean < bar:
                why = f"{best.variant} diverges less"
            values = scale * np.array(record.samples[look_name(last)])
            divergence = mean_interval(values, seed=pools.bench.seed)
            record = replace(record, divergence=divergence, effort=f"{part}: {why}")
        stopped.append(record)
    return Screened(best and _comparable(pools, layer, plain, best), tuple(stopped))


def _comparable(pools: Pools, layer: Layer, plain: SweepRecord, best: SweepRecord) -> SweepRecord:
    """Return a remedy's look with the samples of the largest one that the plain cell had too."""
    looks = [k for k in range(len(pools.looks)) if look_name(k) in plain.samples]
    if not looks or look_name(looks[-1]) in best.samples:
        return best
    other = _look(pools, layer, plain.format, looks[-1], best.treatment)
    return replace(best, samples={**other.samples, **best.samples})


def _look(
    pools: Pools, layer: Layer, form: str, look: int, treatment: Treatment | None
) -> SweepRecord:
    record = pools.look_at(layer, form, look, treatment)
    pools.forget((layer.name, f"{form} {record.variant}".rstrip()))
    return record


def _mean(record: SweepRecord, look: int) -> float:
    values = record.samples.get(look_name(look), ()) if record.status is Status.OK else ()
    return float(np.mean(values)) if values else float("inf")


def _plain_mean(pools: Pools, layer: Layer, plain: SweepRecord, look: int) -> float:
    """Return the plain cell's mean divergence on a look; infinity where it does not end ``ok``."""
    if plain.status is Status.OK and look_name(look) not in plain.samples:
        plain = _look(pools, layer, plain.format, look, None)
    return _mean(plain, look)
