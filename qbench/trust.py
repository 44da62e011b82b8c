"""How far a sweep can be trusted: noise floors, halves of its samples, and the restored view.

These verbs work on the bench of a sweep that is still open (``Sweep.bench``): the reference has
run and its activations are kept. Each is done once a run: what lies in the folder and was made
from the same things is taken as it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from qbench.base import base_graph
from qbench.calibration.calibrators import clip_of
from qbench.calibration.collect import calibrate as observe_ranges
from qbench.formats import FORMATS
from qbench.graph.content import drop_weights
from qbench.progress import Listener, Silence
from qbench.provenance import sha256_of_json
from qbench.records import (
    CalibrationSpread,
    Layer,
    Layers,
    Noise,
    NoiseFloor,
    RestoredView,
    Status,
    SweepRecord,
)
from qbench.runtime.ort import open_session
from qbench.sensitivity.cells import Bench, measure_cell
from qbench.sensitivity.noise import (
    Ground,
    calibration_spread,
    engine_floors,
    reference_floors,
    sensitive_layers,
)
from qbench.sensitivity.restored import Restoring, lower_layers, lowerable
from qbench.tasks import Batch, batches_sha256, make_batches
from qbench.tasks.compositions import recompose
from qbench.workbench import Workbench

#: Draws of the calibration split (pairs of disjoint halves), and the cells measured on each.
CALIBRATION_DRAWS, CALIBRATION_CELLS = 4, 5
#: Seconds after which no further cell of the spread, or restored layer, is begun.
BUDGET_S = 120.0
#: The same for compositions in which a graph is run for its noise floor.
FLOOR_BUDGET_S = 60.0
_DYNAMIC = "int8_dynamic"
__all__ = ["integer_format", "measure_noise", "measure_restored"]


def measure_noise(
    work: Workbench,
    bench: Bench,
    records: Sequence[SweepRecord],
    listener: Listener | None = None,
    *,
    budget_s: float = BUDGET_S,
) -> Noise:
    """Measure what moves the sweep's numbers without a layer's doing; write and return it.

    Args:
        work: The workbench of the run.
        bench: The open sweep's bench.
        records: All cells of the sweep.
        listener: Hears of progress.
        budget_s: Seconds for the spread over calibration draws.
    """
    listener = listener or Silence()
    key = _key(work, records, "noise")
    known = work.run.known_noise()
    if known is not None and known.key == key:
        return known
    listener.stage("sweep: noise floor")
    remarks: list[str] = []
    floors = _floors(work, bench, remarks)
    spread = _calibration_spread(work, bench, records, budget_s, remarks)
    calls = sensitive_layers(records, floors, seed=bench.seed)
    noise = Noise(floors, spread, calls, tuple(remarks), key)
    work.run.write_noise(noise)
    return noise


def _key(work: Workbench, records: Sequence[SweepRecord], what: str) -> str:
    cells = sorted(
        (r.layer, r.format, str(r.status), r.divergence.value if r.divergence else 0.0)
        for r in records
    )
    return sha256_of_json(
        {"what": what, "batches": batches_sha256(work.batches("sweep")), "cells": cells}
    )


def _floors(work: Workbench, bench: Bench, remarks: list[str]) -> tuple[NoiseFloor, ...]:
    """Return how far graphs are from themselves; what there was no time for is remarked."""
    task = bench.task
    others = recompose(
        task.encoded,
        work.model.inputs,
        max_tokens=work.config.sweep.max_tokens,
        pad_id=work.tokenizer.pad_id,
        seed=bench.seed,
    )
    ground = Ground(
        task,
        bench.replay.batches,
        others,
        work.settings,
        work.model.output,
        bench.seed,
        FLOOR_BUDGET_S,
    )
    reference = bench.reference.outputs
    bench.replay.make_room()
    found = reference_floors(ground, base_graph(work), reference)
    low = lowerable(bench, work.chosen, _DYNAMIC) if _DYNAMIC in bench.backend.formats else ()
    if low and _DYNAMIC in work.config.sweep.formats:
        graph = lower_layers(bench.replay.model.clone(), bench, low, _DYNAMIC)
        found += engine_floors(ground, graph, _DYNAMIC, reference)
        drop_weights(graph)
    for what in dict.fromkeys(floor.what for floor in found):
        ran = sum(floor.what == what for floor in found)
        if ran < 1 + len(others):
            remarks.append(
                f"the noise floor of {what} covers {ran} of {1 + len(others)} compositions: "
                f"{FLOOR_BUDGET_S:g} s were used up"
            )
    return found


def _calibration_spread(
    work: Workbench,
    bench: Bench,
    records: Sequence[SweepRecord],
    budget_s: float,
    remarks: list[str],
) -> tuple[CalibrationSpread, ...]:
    """Return the spread of the most divergent calibrated cells; what is not covered is remarked."""
    calibrated = [
        r
        for r in records
        if r.status is Status.OK and r.divergence is not None and FORMATS[r.format].needs_range
    ]
    calibrated.sort(key=lambda r: -(r.divergence.value if r.divergence else 0.0))
    by_name = work.layers.by_name()
    cells = [(by_name[r.layer], r.format) for r in calibrated[:CALIBRATION_CELLS]]
    if not cells:
        return ()
    began = time.perf_counter()
    bench.replay.make_room()
    draws = _clip_draws(work, [layer for layer, _ in cells])
    if not draws:
        remarks.append(
            "the spread over calibration draws was not measured: fewer than 4 calibration samples"
        )
        return ()
    left = max(0.0, budget_s - (time.perf_counter() - began))
    found = tuple(calibration_spread(bench, cells, draws, left))
    if len(found) < len(cells):
        remarks.append(
            f"the spread over calibration draws covers {len(found)} of {len(cells)} cells: its "
            f"{budget_s:g} s were used up"
        )
    return found


def _clip_draws(work: Workbench, layers: Sequence[Layer]) -> list[dict[str, float]]:
    """Return the clips of these layers from halves of the calibration split, pair by pair."""
    task = work.task("calibration")
    if task.items < 4:
        return []
    rng = np.random.default_rng([work.config.run.seed, task.items, 6])
    draws = []
    for _ in range(CALIBRATION_DRAWS // 2):
        order = rng.permutation(task.items)
        for rows in np.array_split(order, 2):
            draws.append(_clips_on(work, layers, rows))
    return draws


def _clips_on(work: Workbench, layers: Sequence[Layer], rows: np.ndarray) -> dict[str, float]:
    encoded = work.task("calibration").encoded
    batches: tuple[Batch, ...] = make_batches(
        [encoded[row] for row in rows],
        work.model.inputs,
        max_tokens=work.config.sweep.max_tokens,
        pad_id=work.tokenizer.pad_id,
    )
    found = observe_ranges(
        work.model.ir,
        Layers(tuple({layer.name: layer for layer in layers}.values()), ()),
        batches,
        lambda graph: open_session(graph, work.settings),
    )
    how = work.config.calibrate
    return {
        seen.tensor: clip_of(
            seen, how.calibrator, how.percentile, found.histograms.get(seen.tensor)
        )
        for seen in found.ranges
        if not seen.implicit
    }


def integer_format(records: Sequence[SweepRecord]) -> str | None:
    """Return the sweep's first format with integer weights and activations that has a cell."""
    measured = [r.format for r in records if r.status is Status.OK]
    integer = [f for f in dict.fromkeys(measured) if FORMATS[f].activation_bits < 16]
    return next(iter([*integer, *(f for f in measured if not FORMATS[f].is_float)]), None)


def measure_restored(
    work: Workbench,
    bench: Bench,
    records: Sequence[SweepRecord],
    listener: Listener | None = None,
    *,
    format_name: str | None = None,
    budget_s: float = BUDGET_S,
) -> RestoredView | None:
    """Measure the view with all layers low and one restored; write and return it.

    Args:
        work: The workbench of the run.
        bench: The open sweep's bench.
        records: All cells of the sweep.
        listener: Hears of progress.
        format_name: The low format; ``integer_format`` by default.
        budget_s: Seconds after which no further layer is begun; the most divergent come first.

    Returns:
        The view; ``None`` where no cell has an integer format.
    """
    listener = listener or Silence()
    chosen = format_name or integer_format(records)
    if chosen is None:
        return None
    key = _key(work, records, f"restored {chosen}")
    known = work.run.known_restored()
    if known is not None and known.key == key:
        return known
    single = {r.layer: r for r in records if r.format == chosen and r.status is Status.OK}
    low = [x for x in lowerable(bench, work.chosen, chosen) if x.name in single]
    if not low:
        return None
    view = _restored(work, bench, low, (chosen, single), listener, budget_s)
    view = replace(view, key=key)
    work.run.write_restored(view)
    return view


def _restored(
    work: Workbench,
    bench: Bench,
    low: Sequence[Layer],
    singles: tuple[str, dict[str, SweepRecord]],
    listener: Listener,
    budget_s: float,
) -> RestoredView:
    format_name, single = singles
    listener.stage(f"sweep: all {format_name}, one layer restored", len(low))
    began, found = time.perf_counter(), {}
    restoring = Restoring(bench, low, format_name, work.model.output)
    order = sorted(low, key=lambda x: -_divergence_of(single[x.name]))
    try:
        for layer in order:
            if time.perf_counter() - began >= budget_s:
                break
            alone = _alone(bench, layer, single[layer.name])
            found[layer.name] = restoring.measure(layer, alone)
            listener.step(layer.name)
        all_low = restoring.all_low
    finally:
        restoring.close()
    remarks = []
    if len(found) < len(low):
        remarks.append(
            f"{len(found)} of {len(low)} layers were restored, the most divergent first: "
            f"{budget_s:g} s were used up"
        )
    records = tuple(found[x.name] for x in low if x.name in found)
    return RestoredView(format_name, len(low), all_low, records, tuple(remarks))


def _divergence_of(record: SweepRecord) -> float:
    return 0.0 if record.divergence is None else record.divergence.value


def _alone(bench: Bench, layer: Layer, record: SweepRecord) -> tuple[float, ...]:
    """Return the divergence of each sample with a layer alone low.

    A cell that the race stopped has none on all samples: it is measured here, for this view alone.
    """
    known = record.samples.get("divergence", ())
    if known:
        return known
    whole = measure_cell(bench, layer, record.format, outputs_only=True)
    return whole.samples.get("divergence", ())
