"""Noise: what moves a sweep's numbers without a layer's doing, and which layers stand above it.

A layer is called sensitive only where two disjoint halves of the sweep split, each with a ranking
of its own, both call it so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qbench.lowering import lowering_for
from qbench.records import (
    CalibrationSpread,
    Layer,
    LayerCall,
    NoiseFloor,
    Status,
    SweepRecord,
)
from qbench.runtime.ort import SessionSettings, open_session
from qbench.runtime.passes import run_batches
from qbench.sensitivity.cells import Bench
from qbench.statistics import difference_interval, mean_interval
from qbench.tasks.base import Array, Task
from qbench.tasks.batches import Batch

#: Name of the reference among floors, and of what runs the sweep's own batches.
REFERENCE, UNCUT, AS_SWEPT = "reference", "uncut graph", "as in the sweep"
#: Why a cell that has a divergence is called neither sensitive nor not.
UNCALLED = "measured on a part of the samples only: no two halves to compare"
#: Share of a format's layers that can be in the top set of a half.
TOP_SHARE = 0.25

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Ground:
    """What floors are measured on.

    Attributes:
        task: The task on the sweep split.
        batches: The sweep's own batches.
        others: The same items in other compositions, by name.
        settings: Session settings of the sweep.
        output: Name of the output that is scored.
        seed: Seed of the resamples.
        budget_s: Seconds after which no further composition of a graph is begun; two always run.
    """

    task: Task
    batches: Sequence[Batch]
    others: Mapping[str, Sequence[Batch]]
    settings: SessionSettings
    output: str
    seed: int = 0
    budget_s: float = math.inf

    def outputs(self, graph: ir.Model, first: str) -> dict[str, Array]:
        """Return a graph's outputs in its own batches, called ``first``, and in the others."""
        began, found = time.perf_counter(), dict[str, Array]()
        with open_session(graph, self.settings) as session:
            for name, batches in {first: self.batches, **self.others}.items():
                if len(found) > 1 and time.perf_counter() - began >= self.budget_s:
                    break
                found[name] = run_batches(session, batches, self.output)
        return found


def reference_floors(ground: Ground, graph: ir.Model, reference: Array) -> tuple[NoiseFloor, ...]:
    """Return how far the reference is from itself in other compositions.

    Args:
        ground: What to measure on.
        graph: The whole graph, unchanged.
        reference: Outputs of the sweep's reference (the chained run), shape [items, …].
    """
    outputs = ground.outputs(graph, UNCUT)
    return tuple(_floor(ground, REFERENCE, n, reference, out) for n, out in outputs.items())


def engine_floors(
    ground: Ground, graph: ir.Model, format_name: str, reference: Array
) -> tuple[NoiseFloor, ...]:
    """Return how far an engine in one format is from itself in other compositions.

    Where a format takes its scales from the batch (``int8_dynamic``), an answer depends on its
    batch-mates; each floor also says what the engine's divergence from the reference is then.

    Args:
        ground: What to measure on.
        graph: The lowered graph.
        format_name: Its format.
        reference: Outputs of the reference, shape [items, …].
    """
    outputs = ground.outputs(graph, AS_SWEPT)
    own = outputs[AS_SWEPT]
    return tuple(_floor(ground, format_name, n, own, o, reference) for n, o in outputs.items())


def _floor(
    ground: Ground,
    what: str,
    composition: str,
    before: Array,
    after: Array,
    reference: Array | None = None,
) -> NoiseFloor:
    task = ground.task
    moved = task.divergence(before, after)
    answers = task.score(before, before).answers, task.score(after, before).answers
    apart = None
    if reference is not None:
        apart = mean_interval(task.divergence(reference, after), seed=ground.seed)
    return NoiseFloor(
        what,
        composition,
        mean_interval(moved, seed=ground.seed),
        float(np.mean(answers[0] != answers[1])),
        apart,
        tuple(float(v) for v in moved),
    )


def floor_samples(floors: Sequence[NoiseFloor], n: int) -> Floats:
    """Return the reference's floor by sample, the worst composition of each [n]; 0 without one."""
    rows = [f.samples for f in floors if f.what == REFERENCE and len(f.samples) == n]
    return np.max(np.asarray(rows, dtype=np.float64), axis=0) if rows else np.zeros(n)


def calibration_spread(
    bench: Bench,
    cells: Sequence[tuple[Layer, str]],
    clip_draws: Sequence[Mapping[str, float]],
    budget_s: float = math.inf,
) -> Iterator[CalibrationSpread]:
    """Yield each cell's divergence over draws of the calibration split, until time is up.

    Args:
        bench: The sweep's bench.
        cells: Layers and formats, the most important first.
        clip_draws: Clips by tensor, one mapping a draw; a tensor that is missing keeps its own.
        budget_s: Seconds after which no further cell is begun.
    """
    began = time.perf_counter()
    for layer, format_name in cells:
        if time.perf_counter() - began >= budget_s:
            return
        draws = tuple(
            _divergence_with(bench, layer, format_name, {**bench.clips, **clips})
            for clips in clip_draws
        )
        own = _divergence_with(bench, layer, format_name, bench.clips)
        yield CalibrationSpread(layer.name, format_name, own, draws)


def _divergence_with(
    bench: Bench, layer: Layer, format_name: str, clips: Mapping[str, float]
) -> float:
    lowering = lowering_for(format_name, backend=bench.backend)
    changed = bench.replay.change(layer, lambda graph, own: lowering.apply(graph, own, clips))
    try:
        outputs = bench.replay.run_changed(changed)
    finally:
        changed.close()
    return float(bench.task.divergence(bench.reference.outputs, outputs).mean())


# --- which layers are called sensitive ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Half:
    """What one half of the samples says of the layers of a format, each array [layers].

    Attributes:
        rank: Rank by divergence, 1 for the most divergent.
        beyond: Whether the layer stands above the noise floor.
        top: Whether it is in the top set.
    """

    rank: NDArray[np.int64]
    beyond: Bools = field(default_factory=lambda: np.zeros(0, bool))
    top: Bools = field(default_factory=lambda: np.zeros(0, bool))


def sensitive_layers(
    records: Sequence[SweepRecord],
    floors: Sequence[NoiseFloor] = (),
    *,
    top_share: float = TOP_SHARE,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[LayerCall, ...]:
    """Return for each measured layer and format whether it is called sensitive, and why.

    The samples of the sweep split are divided into two halves. A half calls a layer sensitive
    where its divergence is beyond the noise floor (the paired interval of the difference excludes
    zero) and it is in the top set: among the most divergent quarter of the layers, and above the
    middle of them, again by the paired interval. The middle are the layers between the quartiles
    of the *other* half's ranking, so that no half chooses whom it is compared with. A layer is
    called sensitive where both halves call it so.

    Args:
        records: Cells of the sweep. Those that stopped before all samples take no part in any
            ranking and have no ranks; those without a number are left out.
        floors: The reference's noise floors.
        top_share: Largest share of the layers in a top set.
        seed: Seed of the halves and resamples.
        level: Two-sided coverage of the intervals.
    """
    found: list[LayerCall] = []
    for format_name, own in _by_format(records).items():
        samples = np.asarray([r.samples["divergence"] for r in own], dtype=np.float64)
        floor = floor_samples(floors, samples.shape[1])
        halves = _two_halves(samples, floor, top_share, seed, level)
        for place, record in enumerate(own):
            sensitive, reason = _call(halves, place, top_share)
            ranks = tuple(int(half.rank[place]) for half in halves)
            found.append(LayerCall(record.layer, format_name, sensitive, ranks, reason))
    told = {(call.layer, call.format) for call in found}
    found += [
        LayerCall(record.layer, record.format, False, (), UNCALLED)
        for record in records
        if record.divergence is not None and (record.layer, record.format) not in told
    ]
    return tuple(found)


def called_sensitive(calls: Sequence[LayerCall], format_name: str | None = None) -> dict[str, str]:
    """Return the layers that are called sensitive with the reason, of one format or all."""
    return {
        call.layer: call.reason
        for call in calls
        if call.sensitive and format_name in (None, call.format)
    }


def _by_format(records: Sequence[SweepRecord]) -> dict[str, list[SweepRecord]]:
    found: dict[str, list[SweepRecord]] = {}
    for record in records:
        if record.status is Status.OK and len(record.samples.get("divergence", ())) >= 4:
            found.setdefault(record.format, []).append(record)
    whole = {}
    for name, own in found.items():
        most = max(len(r.samples["divergence"]) for r in own)
        whole[name] = [r for r in own if len(r.samples["divergence"]) == most]
    return whole


def halves_of(n: int, seed: int = 0) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the two disjoint halves of n samples; the same for all cells of a sweep."""
    order = np.random.default_rng([seed, n, 5]).permutation(n)
    return np.sort(order[: n // 2]), np.sort(order[n // 2 :])


def _two_halves(
    samples: Floats, floor: Floats, top_share: float, seed: int, level: float
) -> tuple[_Half, _Half]:
    parts = halves_of(samples.shape[1], seed)
    ranks = [_ranks(samples[:, rows].mean(axis=1)) for rows in parts]
    count = max(1, math.ceil(top_share * len(samples)))
    halves = []
    for rows, own, other in zip(parts, ranks, ranks[::-1], strict=True):
        quarter = len(samples) // 4
        middle = samples[(other > quarter) & (other <= len(samples) - quarter)].mean(axis=0)
        beyond = _above(samples[:, rows], floor[rows], seed, level)
        raised = _above(samples[:, rows], middle[rows], seed, level)
        halves.append(_Half(own, beyond, (own <= count) & raised))
    return halves[0], halves[1]


def _ranks(means: Floats) -> NDArray[np.int64]:
    ranks = np.empty(len(means), dtype=np.int64)
    ranks[np.argsort(-means, kind="stable")] = np.arange(1, len(means) + 1)
    return ranks


def _above(samples: Floats, base: Floats, seed: int, level: float) -> Bools:
    """Return which rows [cells] of samples [cells, n] lie above a base [n] beyond noise."""
    lows = [difference_interval(row - base, seed=seed, level=level).low for row in samples]
    return np.array(lows) > 0


def _call(halves: tuple[_Half, _Half], place: int, top_share: float) -> tuple[bool, str]:
    ranks = " and ".join(str(half.rank[place]) for half in halves)
    beyond = [bool(half.beyond[place]) for half in halves]
    top = [bool(half.top[place]) for half in halves]
    if all(beyond) and all(top):
        return True, f"ranks {ranks} in two halves of the samples; above floor and middle in both"
    if not any(beyond):
        return False, f"ranks {ranks}; not beyond the noise floor in either half"
    if not all(beyond):
        return False, f"ranks {ranks}; beyond the noise floor in one half only"
    if any(top):
        return False, f"ranks {ranks}; the second draw does not call it sensitive"
    return False, f"ranks {ranks}; not in the top {top_share:.0%} above the middle in either half"
