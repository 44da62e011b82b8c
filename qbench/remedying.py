"""Remedies in a run: the worst cells lowered in other ways, each a cell of its own.

What a remedy is made of comes from calibration alone; what it gives is measured on the sweep split
as any cell is. The plan then takes the best variant of a cell that was shown to be better.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from qbench import budgets
from qbench.calibration.calibrators import find_clip
from qbench.calibration.rows import Activation, sample_activations
from qbench.errors import BudgetError
from qbench.formats import FORMATS
from qbench.lowering.smooth import product_weight
from qbench.lowering.weight_only import RAGGED, own_block
from qbench.planning.costs import make_offer
from qbench.planning.front import front
from qbench.planning.worth import as_expected
from qbench.progress import Listener, Silence
from qbench.records import Kind, Layer, Status, SweepRecord, Treatment
from qbench.remedies import BLOCKS, REMEDIES
from qbench.runtime.ort import open_session
from qbench.sensitivity.cells import Bench, base_record, measure_cell
from qbench.sensitivity.looking import Pools
from qbench.sensitivity.remedies import (
    cells_to_treat,
    find_awq,
    find_smoothquant,
    with_best_variants,
)
from qbench.sensitivity.screening import screen
from qbench.torch_scales import SUFFIX, foreign_scales, treatment_from_scale
from qbench.workbench import Workbench

#: What is tried, by remedy.
_TRIED: Mapping[str, tuple[str, ...]] = {
    "percentile": ("percentile:99.99", "percentile:99.9"),
    "block": tuple(f"block:{size}" for size in BLOCKS),
}
#: Remedies whose numbers are searched on rows of the activation.
_SEARCHED = ("smoothquant", "awq")


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A cell that is to get a remedy.

    Attributes:
        layer: The layer.
        format: Name of the format.
        name: The remedy: a variant, or the name of one whose number is searched.
    """

    layer: Layer
    format: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class LayerInput:
    """What enters a linear layer, and its weight.

    Attributes:
        tensor: Name of the activation's tensor.
        activation: What calibration saw of it.
        weight: W, shape [K, N].
        block: Elements of K that share a scale in the plain cell; 0 for formats without blocks.
    """

    tensor: str
    activation: Activation
    weight: np.ndarray
    block: int


def try_remedies(
    work: Workbench,
    bench: Bench,
    records: Sequence[SweepRecord],
    listener: Listener | None = None,
    pools: Pools | None = None,
) -> tuple[SweepRecord, ...]:
    """Measure the worst cells with every remedy of their format; append and return the records.

    Where there are looks, a cell's remedies are looked at first, and the best one is measured on
    all samples. What the journal holds already is not measured again. With ``sweep.remedies: 0``
    nothing is tried. Where ``sweep.budget`` is given, no further cell is begun after as much time
    again.

    Args:
        work: The workbench of the run.
        bench: The open sweep's bench.
        records: The plain cells of the sweep.
        listener: Hears of progress.
        pools: The looks of a race; ``None`` where there is none.
    """
    listener = listener or Silence()
    trials = trials_of(work, records)
    known = work.run.read_remedies()
    waiting = [trial for trial in trials if not _is_known(trial, known)]
    if waiting:
        listener.stage("sweep: remedies", len(waiting))
        began = time.perf_counter()
        treatments = list(_treatments(work, bench, waiting))
        given = work.config.sweep.budget_s
        left = float("inf") if given is None else given - (time.perf_counter() - began)
        plain = {(r.layer, r.format): r for r in records}
        for record in _measured(work, bench, _by_cell(treatments, plain), pools, left):
            work.run.append_sweep(record)
            listener.step(f"{record.layer} {record.format} {record.variant}")
    found = work.run.read_remedies()
    if trials:
        reached = sum(_is_known(trial, found) for trial in trials)
        work.run.write_run({"remedies": {"tried": reached, "not_reached": len(trials) - reached}})
    return found


def records_to_plan(work: Workbench) -> tuple[SweepRecord, ...]:
    """Return the cells that a plan chooses from: each with its best remedy, where one is better."""
    plain = work.run.read_sweep()
    return with_best_variants(plain, work.run.read_remedies(), work.config.run.seed)


def trials_of(work: Workbench, records: Sequence[SweepRecord]) -> list[Trial]:
    """Return what is to be tried: the worst cells of each format, with each of its remedies.

    Layers that most plans would leave in high precision come first.
    """
    count = work.config.sweep.remedies
    if not count:
        return []
    layers, kept = work.layers.by_name(), left_in_high_precision(work, records)
    return [
        Trial(layers[record.layer], record.format, name)
        for record in cells_to_treat(records, count, kept)
        for remedy, formats in REMEDIES.items()
        if record.format in formats
        for name in _names_of(work, remedy)
    ]


def left_in_high_precision(work: Workbench, records: Sequence[SweepRecord]) -> frozenset[str]:
    """Return the layers that at least half of the proposals from plain cells do not lower.

    Latencies are those expected, so that two runs try the same cells.
    """
    priced = as_expected(records, work.layers, work.backend)
    offer = make_offer(priced, work.layers, work.backend)
    try:
        proposals = front(budgets.problem_for(work, offer), work.config.plan.levels)
    except BudgetError:  # planning tells it; the worst cells are tried all the same
        return frozenset()
    high = offer.high_precision
    return frozenset(
        name
        for name in offer.options
        if proposals and 2 * sum(p.formats[name] == high for p in proposals) >= len(proposals)
    )


def _names_of(work: Workbench, remedy: str) -> tuple[str, ...]:
    names = _TRIED.get(remedy, (remedy,))
    if remedy in _SEARCHED and work.config.sweep.scales == "modelopt":
        return (*names, f"{remedy}:{SUFFIX}")
    return names


def _is_known(trial: Trial, known: Sequence[SweepRecord]) -> bool:
    variants = {r.variant for r in known if (r.layer, r.format) == (trial.layer.name, trial.format)}
    if trial.name not in _SEARCHED:
        return trial.name in variants
    foreign = f"{trial.name}:{SUFFIX}"
    return any(v.partition(":")[0] == trial.name and v != foreign for v in variants)


def _treatments(
    work: Workbench, bench: Bench, trials: Sequence[Trial]
) -> Iterator[tuple[Trial, Treatment | str]]:
    """Yield the treatment of each trial, or why there is none."""
    scaled = [t for t in trials if t.name.partition(":")[0] in _SEARCHED]
    tensors = [edge.tensor for trial in scaled for edge in trial.layer.edges]
    bench.replay.make_room()
    seen = sample_activations(
        work.model.ir,
        tensors,
        work.batches("calibration") if tensors else (),
        lambda graph: open_session(graph, work.settings),
        seed=work.config.run.seed,
    )
    inputs = {trial: _input_of(bench, trial, seen) for trial in scaled}
    foreign = _foreign(work, inputs)
    histograms = work.run.read_histograms()
    for trial in trials:
        if trial in inputs:
            own = inputs[trial]
            if isinstance(own, str):
                yield trial, own
            elif trial.name in _SEARCHED:
                yield trial, _searched(bench, work.layers.layers, trial, own)
            else:
                yield trial, foreign.get(trial, "modelopt gives no scale for it")
        elif trial.name == "rows":
            yield trial, Treatment("rows")
        elif trial.name.startswith("block"):
            yield trial, _in_blocks(bench, trial)
        else:
            yield trial, _calibrated(bench, trial, histograms)


def _foreign(work: Workbench, inputs: Mapping[Trial, LayerInput | str]) -> dict[Trial, Treatment]:
    """Return the treatments whose scales come from modelopt; none where it was not asked."""
    found: dict[Trial, Treatment] = {}
    for remedy in _SEARCHED:
        own = {
            trial: given
            for trial, given in inputs.items()
            if trial.name == f"{remedy}:{SUFFIX}" and not isinstance(given, str)
        }
        if not own:
            continue
        blocks = {trial.layer.name: given.block for trial, given in own.items()}
        scales = foreign_scales(work, remedy, [trial.layer for trial in own], blocks)
        for trial, given in own.items():
            scale = scales.get(trial.layer.name)
            if scale is not None and len(scale) == len(given.weight):
                absmax, block = given.activation.absmax, given.block
                found[trial] = treatment_from_scale(remedy, scale, given.tensor, absmax, block)
    return found


def _in_blocks(bench: Bench, trial: Trial) -> Treatment | str:
    block = int(trial.name.partition(":")[2])
    weight = product_weight(bench.replay.model, trial.layer)
    if isinstance(weight, str):
        return weight
    if len(weight) % block and trial.format not in RAGGED:
        return f"{block} does not divide its {len(weight)} inputs"
    if own_block(weight, trial.format) == block:
        return "it is the block of the plain cell"
    return Treatment(trial.name, block=block)


def _calibrated(
    bench: Bench, trial: Trial, histograms: Mapping[str, np.ndarray]
) -> Treatment | str:
    calibrator, _, percentile = trial.name.partition(":")
    tensors = {edge.tensor for edge in trial.layer.edges if edge.tensor in bench.ranges}
    clips = {
        tensor: find_clip(
            bench.ranges[tensor],
            calibrator,
            float(percentile or 99.99),
            histograms.get(tensor),
        ).magnitude
        for tensor in sorted(tensors)
    }
    if all(clip == bench.clips.get(tensor) for tensor, clip in clips.items()):
        return "it clips where the plain cell does"
    return Treatment(trial.name, clips)


def _input_of(bench: Bench, trial: Trial, seen: Mapping[str, Activation]) -> LayerInput | str:
    """Return what enters a layer whose activation is to be scaled, or why it cannot be."""
    weight = product_weight(bench.replay.model, trial.layer)
    if isinstance(weight, str):
        return weight
    tensors = {edge.tensor for edge in trial.layer.edges}
    activation = seen.get(next(iter(tensors), ""))
    if len(tensors) != 1 or activation is None or activation.rows.shape[1] != len(weight):
        return "what enters it has no fixed channels, or it has several uses"
    in_blocks = FORMATS[trial.format].weight_bits == 4
    block = own_block(weight, trial.format) if in_blocks else 0
    return LayerInput(tensors.pop(), activation, weight, block)


def _searched(bench: Bench, layers: Sequence[Layer], trial: Trial, given: LayerInput) -> Treatment:
    if trial.name == "awq":
        bits = FORMATS[trial.format].weight_bits
        return find_awq(given.activation, given.weight, bits, given.block)
    rows = [np.abs(given.weight).max(axis=1)]
    for other in layers:
        reads = other.kind is Kind.LINEAR and any(e.tensor == given.tensor for e in other.edges)
        beside = product_weight(bench.replay.model, other) if reads else ""
        if not isinstance(beside, str) and len(beside) == len(given.weight):
            rows.append(np.abs(beside).max(axis=1))
    return find_smoothquant(given.activation, given.weight, given.tensor, np.max(rows, axis=0))


@dataclass(frozen=True, slots=True, eq=False)
class _Remedies:
    """The remedies of one cell.

    Attributes:
        plain: The cell's record without one.
        trials: What is tried, with what it is made of or why there is nothing.
    """

    plain: SweepRecord
    trials: tuple[tuple[Trial, Treatment | str], ...]

    def measure(self, bench: Bench, pools: Pools | None, scale: float) -> list[SweepRecord]:
        """Return the records of all of them."""
        layer = self.trials[0][0].layer
        records = [_impossible(bench, t, why) for t, why in self.trials if isinstance(why, str)]
        found = [made for _, made in self.trials if not isinstance(made, str)]
        form = self.plain.format
        if pools is None or not found:
            return records + [measure_cell(bench, layer, form, treatment=own) for own in found]
        seen = screen(pools, layer, self.plain, found, scale)
        records += seen.stopped
        if seen.best is not None:
            best = measure_cell(bench, layer, form, treatment=seen.best.treatment)
            records.append(replace(best, samples={**seen.best.samples, **best.samples}))
        return records


def _by_cell(
    treatments: Sequence[tuple[Trial, Treatment | str]],
    plain: Mapping[tuple[str, str], SweepRecord],
) -> list[_Remedies]:
    cells: dict[tuple[str, str], list[tuple[Trial, Treatment | str]]] = {}
    for trial, made in treatments:
        cells.setdefault((trial.layer.name, trial.format), []).append((trial, made))
    return [_Remedies(plain[cell], tuple(own)) for cell, own in cells.items()]


def _measured(
    work: Workbench,
    bench: Bench,
    cells: Sequence[_Remedies],
    pools: Pools | None,
    budget_s: float,
) -> Iterator[SweepRecord]:
    """Yield the records in order; several cells are treated side by side, one thread each."""
    deadline = time.perf_counter() + budget_s
    waiting = deque(cells)
    running: deque[Future[list[SweepRecord]]] = deque()
    workers, scale = work.settings.threads, pools.scales[-1] if pools is not None else 1.0
    pool = ThreadPoolExecutor(workers)
    try:
        while waiting or running:
            while waiting and len(running) <= workers and time.perf_counter() < deadline:
                running.append(pool.submit(waiting.popleft().measure, bench, pools, scale))
            if not running:
                return
            yield from running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _impossible(bench: Bench, trial: Trial, why: str) -> SweepRecord:
    return replace(
        base_record(bench, trial.layer, trial.format),
        status=Status.NOT_APPLICABLE,
        reason=why,
        treatment=Treatment(trial.name),
    )
