"""What the sweep costs: a full pass a cell, suffix replay, and the race, in one run, as ratios.

For every cell (layer, format) that can be measured:

* naive: the layer is lowered in the whole graph, the graph is loaded, all batches run;
* replay: it is lowered in its segment, and its segment and those after it run;
* race: the raced sweep, with everything that it does: latencies, local errors, looks, survivors.

Naive and replay take turns cell by cell, and the race runs when half of the cells are done, so that
a busy machine is busy for all of them. Their times hold lowering, loading, running and divergence;
latencies come from the race and are shared, so that plans differ by divergences alone.

    python benchmarks/sweep.py
    python benchmarks/sweep.py --json
    python benchmarks/sweep.py --quick     # every eighth cell of each format, no engines: a trial

Ratios are to naive. ``replay_work_ratio`` is the work of the segments that replay runs, and
``replay_floor_ratio`` that of the changed layers' descendants: no replay can do less. Work is
estimated as bytes written times the length of the sums. ``plan_cost_ratio`` is time and bytes of
the race's plan over those of the full sweep's plan, both by the full sweep's records; 1 where
both keep everything as it is.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from qbench import judging, pipeline
from qbench.config import load_config
from qbench.graph.segments import TensorFact, node_costs, read_names
from qbench.lowering import lowering_for
from qbench.planning.costs import make_offer
from qbench.planning.front import front
from qbench.planning.problem import BALANCE, problem_of
from qbench.planning.solve import propose
from qbench.raced import racer_for
from qbench.records import Layer, SweepRecord, Verdict
from qbench.runtime.ort import open_session
from qbench.runtime.probe import probe_tensors
from qbench.sensitivity.activations import Limits
from qbench.sensitivity.cells import Bench, base_record, refuse
from qbench.sensitivity.replay import Replay
from qbench.sensitivity.sweep import Sweep
from qbench.statistics import mean_interval, spearman
from qbench.tasks.base import Array
from qbench.tasks.batches import gather_outputs
from qbench.workbench import Workbench

#: With ``--quick``, one of so many cells of each format is measured.
STRIDE = 8
CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"
ENGINE = "tried"
Cell = tuple[Layer, str]


@dataclass(slots=True)
class Spent:
    """What one way of sweeping took.

    Attributes:
        wall_s: Seconds.
        work: Estimated work; a full pass is 1.
        peak_mb: Peak resident memory while it ran, MB; 0 where the system does not tell.
        divergence: Mean divergence of each cell.
    """

    wall_s: float = 0.0
    work: float = 0.0
    peak_mb: float = 0.0
    divergence: dict[tuple[str, str], float] = field(default_factory=dict)


def measurable(bench: Bench, layers: Sequence[Layer], formats: Sequence[str]) -> list[Cell]:
    """Return the cells that nothing forbids, in the order of the graph."""
    cells = [(layer, name) for layer in layers for name in formats]
    return [cell for cell in cells if refuse(bench, *cell) is None]


def stratified(cells: Sequence[Cell], stride: int) -> list[Cell]:
    """Return every ``stride``-th cell of each format."""
    seen: dict[str, int] = {}
    picked = []
    for cell in cells:
        at = seen.get(cell[1], 0)
        seen[cell[1]] = at + 1
        if at % stride == 0:
            picked.append(cell)
    return picked


class Work:
    """Estimated work of a layer's descendants and of the segments that replay them, a full pass 1.

    Args:
        replay: The cut graph.
    """

    def __init__(self, replay: Replay) -> None:
        model = replay.model
        smallest = min(replay.batches, key=lambda batch: batch.padded_tokens)
        facts: Mapping[str, TensorFact] = probe_tensors(model, smallest.feeds, replay.settings)
        costs = np.array(node_costs(model, facts)) / sum(node_costs(model, facts))
        nodes = list(model.graph)
        self._replay = replay
        self._costs = {str(node.name): float(cost) for node, cost in zip(nodes, costs, strict=True)}
        self._readers: dict[str, list[ir.Node]] = {}
        for node in nodes:
            for name in read_names(node):
                self._readers.setdefault(name, []).append(node)
        self._nodes = {str(node.name): node for node in nodes}

    def floor(self, layer: Layer) -> float:
        """Return the work of the layer's nodes and all that reads what they give."""
        todo = [*layer.nodes, *(edge.node for edge in layer.edges)]
        reached: set[str] = set()
        while todo:
            name = todo.pop()
            if name in reached:
                continue
            reached.add(name)
            for value in self._nodes[name].outputs:
                todo += [str(node.name) for node in self._readers.get(str(value.name), ())]
        return sum(self._costs[name] for name in reached)

    def replayed(self, layer: Layer) -> float:
        """Return the work of the segments from the layer's first one on."""
        first = self._replay.segments_of(layer)[0]
        later = self._replay.segments[first:]
        return sum(self._costs[name] for segment in later for name in segment.nodes)


def run_naive(bench: Bench, model: ir.Model, cell: Cell, output: str) -> Array:
    """Return all outputs of the whole graph with one layer lowered."""
    graph, batches = model.clone(), bench.replay.batches
    lowering_for(cell[1]).apply(graph, cell[0], bench.clips)
    with open_session(graph, bench.replay.settings) as session:
        given = [session.run(batch.feeds, [output])[output] for batch in batches]
    return gather_outputs(batches, given)


def run_replay(bench: Bench, cell: Cell) -> Array:
    """Return all outputs with one layer lowered, from the cut before it on."""
    layer, name = cell
    clips = bench.clips
    changed = bench.replay.change(layer, lambda m, own: lowering_for(name).apply(m, own, clips))
    try:
        return bench.replay.run_changed(changed)
    finally:
        changed.close()


def compare(
    bench: Bench, cells: Sequence[Cell], model: ir.Model, output: str, spent: Mapping[str, Spent]
) -> Iterator[SweepRecord]:
    """Measure cells both ways in turns, and yield replay's records without latencies."""
    work = Work(bench.replay)
    reference = bench.reference.outputs
    for at, cell in enumerate(cells):
        ways: dict[str, Callable[[], Array]] = {
            "naive": lambda cell=cell: run_naive(bench, model, cell, output),  # type: ignore[misc]
            "replay": lambda cell=cell: run_replay(bench, cell),  # type: ignore[misc]
        }
        key = (cell[0].name, cell[1])
        for way in list(ways) if at % 2 else reversed(list(ways)):
            reset_peak()
            started = time.perf_counter()
            samples = bench.task.divergence(reference, ways[way]())
            spent[way].wall_s += time.perf_counter() - started
            spent[way].peak_mb = max(spent[way].peak_mb, peak_mb())
            spent[way].divergence[key] = float(samples.mean())
            if way == "replay":
                found = samples
        spent["naive"].work += 1.0
        spent["replay"].work += work.replayed(cell[0])
        spent["floor"].work += work.floor(cell[0])
        yield replace(
            base_record(bench, *cell),
            n=len(found),
            divergence=mean_interval(found, seed=bench.seed),
            samples={"divergence": tuple(map(float, found))},
        )


def race(
    work: Workbench, cells: Sequence[Cell], ranges: Sequence[object], spent: Spent
) -> list[SweepRecord]:
    """Run the raced sweep from its beginning, the reference included; return its records."""
    reset_peak()
    started = time.perf_counter()
    runner = make_sweep(work, ranges, side_by_side=True)
    racer = racer_for(work, runner)
    if racer is None:
        sys.exit("no part of this task can be measured on its own: there is no race")
    found = {(r.layer, r.format): r for r in racer.run([(x.name, name) for x, name in cells])}
    spent.wall_s = time.perf_counter() - started
    spent.peak_mb = peak_mb()
    pools, share = racer.pools, Work(runner.bench.replay)
    layers = work.layers.by_name()
    whole = sum(batch.padded_tokens for batch in runner.bench.replay.batches)
    for job in racer.jobs:
        tokens = whole if job.look is None else pools.added_tokens(job.look)
        spent.work += share.replayed(layers[job.cell[0]]) * tokens / whole
    spent.divergence = {c: r.divergence.value for c, r in found.items() if r.divergence}
    racer.close()
    runner.close()
    return list(found.values())


def make_sweep(work: Workbench, ranges: Sequence[object], side_by_side: bool = False) -> Sweep:
    """Return the sweep of a run, its reference run; cells side by side have one thread each."""
    seen, settings, limits = tuple(ranges), work.settings, Limits()
    if side_by_side:
        settings, limits = replace(settings, threads=1), Limits(cells=settings.threads)
    batches = work.batches("sweep")
    replay = Replay(work.model.ir, work.layers, batches, settings, work.model.output, limits)
    clips = judging.clips_of(work, seen)  # type: ignore[arg-type]
    return Sweep(replay, work.task("sweep"), work.backend, clips, seen, work.config.run.seed)  # type: ignore[arg-type]


def with_costs(
    full: Sequence[SweepRecord], raced: Sequence[SweepRecord]
) -> tuple[SweepRecord, ...]:
    """Return the full sweep's records with the race's latencies and bytes."""
    by_cell = {(r.layer, r.format): r for r in raced}
    out = []
    for record in full:
        other = by_cell[record.layer, record.format]
        out.append(
            replace(
                record, latency_delta_ms=other.latency_delta_ms, weight_bytes=other.weight_bytes
            )
        )
    return tuple(out)


class Verdicts:
    """The plans of two sweeps: of each front the cheapest whose engine is non-inferior.

    Engines are built and judged on the sweep split; what they cost is taken from the full sweep's
    records for both, so that the noise of timing engines does not tell the plans apart.

    Args:
        work: The workbench of the run.
        full: Records of the full sweep.
    """

    def __init__(self, work: Workbench, full: Sequence[SweepRecord]) -> None:
        self._work, self._offer = work, make_offer(full, work.layers, work.backend)
        self._judge = judging.judge_for(work, "sweep")
        self._clips = judging.clips_of(work, work.run.read_ranges())
        self._seen: dict[tuple[str, ...], Verdict] = {}
        with open_session(work.model.path, work.settings) as session:
            started = time.perf_counter()
            batches = work.batches("sweep")
            for batch in batches:
                session.run(batch.feeds)
        self._batch_s = (time.perf_counter() - started) / len(batches)

    def cost(self, formats: Mapping[str, str]) -> float:
        """Return time over the reference's plus a tenth of bytes over the reference's."""
        offer = self._offer
        chosen = propose(formats, problem_of(offer))
        high = dict.fromkeys(offer.options, offer.high_precision)
        kept = propose(high, problem_of(offer))
        return 1.0 + chosen.seconds / self._batch_s + BALANCE * chosen.bytes / kept.bytes

    def plan(self, records: Sequence[SweepRecord]) -> tuple[float, Verdict]:
        """Return cost and verdict of the plan that records lead to."""
        offer, how = make_offer(records, self._work.layers, self._work.backend), self._work.config
        proposals = front(problem_of(offer, how.plan.objective), how.plan.levels)
        for proposal in sorted(proposals, key=lambda p: self.cost(p.formats)):
            if self._verdict(proposal.formats) is Verdict.VERIFIED:
                return self.cost(proposal.formats), Verdict.VERIFIED
        kept = dict.fromkeys(offer.options, offer.high_precision)
        return self.cost(kept), Verdict.BUDGET_UNREACHABLE

    def _verdict(self, formats: Mapping[str, str]) -> Verdict:
        key = tuple(formats.values())
        if key not in self._seen:
            plan = judging.plan_for(self._work, judging.Candidate(ENGINE, formats), self._clips)
            judging.build(self._work, ENGINE, plan)
            self._seen[key] = judging.judge(self._work, self._judge, ENGINE).verdict
            judging.discard(self._work, [ENGINE])
        return self._seen[key]


def plans(
    work: Workbench, full: Sequence[SweepRecord], raced: Sequence[SweepRecord]
) -> tuple[float, bool, str]:
    """Return the race's plan's cost over the full sweep's, whether verdicts agree, and words."""
    verdicts = Verdicts(work, full)
    (cost, verdict), (full_cost, full_verdict) = verdicts.plan(raced), verdicts.plan(full)
    words = f"{verdict} after the race, {full_verdict} after the full sweep"
    return cost / full_cost, verdict is full_verdict, words


def reset_peak() -> None:
    """Start a new peak of resident memory, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_mb() -> float:
    """Return the peak of resident memory since the last reset, MB."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(x.split()[1]) for x in lines if x.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(work: Workbench, quick: bool) -> tuple[dict[str, Spent], dict[str, object], str]:
    """Run all three ways and return what they took, the ratios and words on the plans."""
    pipeline.calibrate(work)
    ranges = work.run.read_ranges()
    runner = make_sweep(work, ranges)
    cells = measurable(runner.bench, work.chosen, work.config.sweep.formats)
    cells = stratified(cells, STRIDE) if quick else cells
    spent = {name: Spent() for name in ("naive", "replay", "race", "floor")}
    half = len(cells) // 2
    arguments = (work.model.ir, work.model.output, spent)
    full = list(compare(runner.bench, cells[:half], *arguments))
    raced = race(work, cells, ranges, spent["race"])
    full += compare(runner.bench, cells[half:], *arguments)
    runner.close()
    ratio, same, words = 1.0, True, "not built"
    if not quick:
        ratio, same, words = plans(work, with_costs(full, raced), raced)
    return spent, ratios(spent, ratio, same), words


def ratios(spent: Mapping[str, Spent], plan_cost_ratio: float, same: bool) -> dict[str, object]:
    """Return the object that ``--json`` prints."""
    naive, replay, raced = spent["naive"], spent["replay"], spent["race"]
    keys = sorted(replay.divergence)
    rank = spearman([raced.divergence[k] for k in keys], [replay.divergence[k] for k in keys])
    return {
        "replay_work_ratio": replay.work / naive.work,
        "replay_floor_ratio": spent["floor"].work / naive.work,
        "replay_wall_ratio": replay.wall_s / naive.wall_s,
        "race_wall_ratio": raced.wall_s / naive.wall_s,
        "rank_spearman": rank.value,
        "plan_cost_ratio": plan_cost_ratio,
        "plan_same_verdict": same,
        "peak_rss_mb": raced.peak_mb,
    }


def table(spent: Mapping[str, Spent], said: Mapping[str, object], words: str) -> str:
    """Return the figures as text."""
    naive = spent["naive"]
    cells = len(naive.divergence)
    keys = sorted(naive.divergence)
    truth = [naive.divergence[key] for key in keys]
    head = f"{'':8}{'wall s':>9}{'of naive':>10}{'forwards':>10}{'of naive':>10}"
    lines = [f"{cells} cells", head + f"{'peak MB':>9}{'Spearman':>10}"]
    for name in ("naive", "replay", "race"):
        own = spent[name]
        rank = spearman([own.divergence[key] for key in keys], truth).value
        lines.append(
            f"{name:8}{own.wall_s:9.1f}{own.wall_s / naive.wall_s:10.3f}"
            f"{own.work:10.1f}{own.work / naive.work:10.3f}{own.peak_mb:9.0f}{rank:10.4f}"
        )
    floor = spent["floor"].work / naive.work
    work = spent["replay"].work / spent["floor"].work
    lines.append(
        f"descendants of the changed layers: {floor:.3f} of naive; replay does {work:.3f}x"
    )
    lines.append(f"plans: {words}; cost of the race's over the full: {said['plan_cost_ratio']:.4f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--quick", action="store_true", help="a stratified part, no engines")
    parser.add_argument("--json", action="store_true", help="print one object and nothing else")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(chosen.config, {"run.results": folder, "run.id": "sweep"})
        spent, said, words = measure(pipeline.start(config), chosen.quick)
    print(json.dumps(said) if chosen.json else table(spent, said, words))


if __name__ == "__main__":
    main()
