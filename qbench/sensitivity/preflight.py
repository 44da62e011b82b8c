"""Preflight: before the first cell, each one is lowered, loaded and run once on one batch.

What fails fails here, in seconds, as a record with its reason; the rest is forecast: how long the
sweep will take, and how much memory and disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from qbench.errors import InputError, MeasurementError
from qbench.lowering import lowering_for
from qbench.records import Estimate, Layer, Status, SweepRecord
from qbench.runtime.memory import resident_bytes
from qbench.sensitivity.cells import Bench, base_record, refuse
from qbench.sensitivity.replay import Replay

#: Largest difference, relative to the largest output, between chained and whole reference.
CHAIN_TOLERANCE = 1e-5
#: The same where the graph itself holds half-precision tensors: runtimes keep single precision
#: between their nodes, and round where the graph is cut.
HALF_TOLERANCE = 1e-2
#: Bytes that one record takes in the journal, a sample and metric.
_BYTES_A_SAMPLE = 24


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a sweep is expected to take.

    Attributes:
        cells: Cells that will be measured.
        wall_s: Seconds, with an interval from the spread of what was timed.
        memory_bytes: Resident bytes at the peak, activations in memory included.
        disk_bytes: Bytes that the journal and the engines to come will take.
        activation_bytes: Bytes of the reference's activations: in memory, and on the disk, where
            they lie already.
    """

    cells: int
    wall_s: Estimate
    memory_bytes: int
    disk_bytes: int
    activation_bytes: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Preflight:
    """What the preflight found.

    Attributes:
        records: Records of cells that failed or do not apply, by (layer, format).
        overhead_s: Seconds that lowering and loading a tried cell took, by (layer, format).
        chain_difference: Largest difference of chained and whole reference on one batch, relative.
    """

    records: dict[tuple[str, str], SweepRecord] = field(default_factory=dict)
    overhead_s: dict[tuple[str, str], float] = field(default_factory=dict)
    chain_difference: float = 0.0


def check_chain(replay: Replay, whole: np.ndarray, batch: int = 0) -> float:
    """Return how far the chained reference is from the whole graph on one batch, relative.

    A cell that changes nothing is the chained reference: if this is not the whole graph's answer,
    no cell is worth anything.

    Args:
        replay: The cut graph, its reference run.
        whole: Output of the whole graph for that batch.
        batch: Index of the batch.

    Raises:
        MeasurementError: If they differ by more than 1e-5 of the largest output (1e-2 where the
            graph holds half-precision tensors).
    """
    chained = replay.reference_output(batch)
    top = float(np.abs(whole).max()) or 1.0
    difference = float(np.abs(chained - whole).max()) / top
    allowed = HALF_TOLERANCE if replay.holds_half else CHAIN_TOLERANCE
    if not difference <= allowed:
        raise MeasurementError(
            f"the graph run in {len(replay.segments)} segments differs from the whole graph by "
            f"{difference:.2g} of its largest output; allowed {allowed:g}; please report it: "
            "nothing is measured on a wrong reference"
        )
    return difference


def try_cells(
    bench: Bench, layers: Sequence[Layer], formats: Sequence[str]
) -> Iterator[tuple[Layer, str, SweepRecord | None, float]]:
    """Lower, load and run each cell once on the shortest batch.

    Yields:
        Layer, format, the record of a cell that cannot be measured (else ``None``), and seconds.
    """
    batches = bench.replay.batches
    shortest = min(range(len(batches)), key=lambda i: batches[i].padded_tokens)
    for layer in layers:
        for name in formats:
            began = time.perf_counter()
            record = _try_cell(bench, layer, name, shortest)
            yield layer, name, record, time.perf_counter() - began


def stand_ins(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return the first layer of each kind and weight shape: the others do the same work."""
    first = {_work_of(layer): layer for layer in reversed(layers)}
    return tuple(layer for layer in layers if first[_work_of(layer)] is layer)


def _work_of(layer: Layer) -> tuple[str, tuple[int, ...]]:
    return layer.kind, layer.weight_shape


def _try_cell(bench: Bench, layer: Layer, name: str, batch: int) -> SweepRecord | None:
    base = base_record(bench, layer, name)
    refusal = refuse(bench, layer, name)
    if refusal is not None:
        return replace(base, status=refusal.status, reason=refusal.reason, remedy=refusal.remedy)
    lowering, clips = lowering_for(name, backend=bench.backend), bench.clips
    try:
        changed = bench.replay.change(layer, lambda model, own: lowering.apply(model, own, clips))
        try:
            bench.replay.run_one(changed, batch)
        finally:
            changed.close()
    except Exception as error:  # whatever one cell runs into is its record: the others go on
        return replace(
            base,
            status=Status.FAILED,
            reason=f"preflight: {type(error).__name__}: {error}"[:500],
            remedy="exclude the layer or the format; the other cells go on",
        )
    return None


def forecast(
    bench: Bench,
    flight: Preflight,
    layers: Sequence[Layer],
    pending: Sequence[tuple[str, str]],
    looks: Sequence[int] = (),
) -> Forecast:
    """Return what the cells that are still to be measured will take.

    A cell costs its overhead (lowering and loading, several times) and the segments from its own
    on, as the reference's runs were timed; the interval is from the spread between those runs. A
    cell that was not tried has the overhead of one that does the same work.

    Args:
        bench: What the cells share.
        flight: What the preflight found.
        layers: Layers of the cells.
        pending: The cells, by (layer, format).
        looks: Samples of each look, where cells race: none of them may need more than the first
            look, and all of them the full pool; the value takes every look, and the full pool for
            one cell in ten.
    """
    suffix = bench.replay.suffix_seconds()
    by_name = {layer.name: layer for layer in layers}
    alike = {(_work_of(by_name[name]), form): s for (name, form), s in flight.overhead_s.items()}
    share = [look / bench.task.n for look in looks]
    low = high = value = 0.0
    todo = [cell for cell in pending if refuse(bench, by_name[cell[0]], cell[1]) is None]
    for name, form in todo:
        layer = by_name[name]
        first = bench.replay.segments_of(layer)[0]
        overhead = flight.overhead_s.get((name, form), alike.get((_work_of(layer), form), 0.0))
        least, full = float(suffix[:, first].min()), float(np.mean(suffix[:, first]))
        high += 9 * overhead + float(suffix[:, first].max()) * 1.5
        if share:
            low += overhead * 0.5 + least * share[0]
            value += overhead * len(share) + full * (share[-1] + 0.1)
        else:
            low += overhead * 1.5 + least
            value += overhead * 3 + full
    metrics = len(bench.task.metrics) + 1
    return Forecast(
        cells=len(todo),
        wall_s=Estimate(value, low, high, len(suffix), method="timed"),
        memory_bytes=resident_bytes() + bench.replay.reserved_bytes(),
        disk_bytes=len(todo) * metrics * bench.task.n * _BYTES_A_SAMPLE,
        activation_bytes=bench.replay.activation_bytes,
    )


def check_limits(expected: Forecast, max_memory: int | None, free_disk: int) -> None:
    """Refuse a sweep that would not fit.

    Raises:
        InputError: If the forecast passes the memory allowed, or the disk that is free.
    """
    if max_memory is not None and expected.memory_bytes > max_memory:
        memory, disk = map(_size, expected.activation_bytes)
        raise InputError(
            f"the sweep is forecast to take {_size(expected.memory_bytes)}, and --max-memory "
            f"allows {_size(max_memory)}; of the activations {memory} are in memory and "
            f"{disk} on the disk already; allow more, use fewer threads (each measures a cell) "
            "or smaller batches (sweep.max_tokens)"
        )
    if expected.disk_bytes > free_disk:
        raise InputError(
            f"the sweep is forecast to write {_size(expected.disk_bytes)}, and "
            f"{_size(free_disk)} are free; make room, or use fewer sweep samples"
        )


def _size(count: float) -> str:
    """Return bytes in words; small ones in megabytes, so that none but nothing reads as 0."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"
