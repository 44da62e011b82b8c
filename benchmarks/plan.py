"""Plans against uniform engines, random plans and other tools, on two tasks, in one run.

MiniLM serves the demo's retrieval, and a sentiment probe: logistic regression on its embeddings,
folded into the graph. Each engine's size, throughput at batches of 1, 8 and 32 on one thread,
metric, paired drop and flip rate on the verification split stand beside the reference's.

    python benchmarks/plan.py
    python benchmarks/plan.py --json
    python benchmarks/plan.py --quick                  # few samples and levels: a trial
    python benchmarks/plan.py --keep FOLDER            # runs stay there; begun ones go on
    python benchmarks/plan.py --vader vaderSentiment-3.3.2.tar.gz   # else pip downloads it

Throughput is the median of paired ratios to the reference, engines in turns on the same batches,
with its order-statistic interval. Drops are paired, > 0 is worse. A row *beats* a plan where it is
both faster at some batch size and better in the metric than the plan, each interval excluding
equality. ``plan`` weighs time and a tenth of bytes, ``plan-latency`` time alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from plan_engines import bytes_of, is_built, outputs_of, serve
from plan_modelopt import INT8
from plan_nncf import NNCF_ONNX, NNCF_OPENVINO
from plan_peers import DYNAMIC, STATIC, build_peers
from plan_sentiment import (
    OUTPUT,
    TRAINING,
    fit_probe,
    read_archive,
    write_classifier,
    write_table,
)
from plan_torch import TorchModel

from qbench import judging, pipeline
from qbench.baselines import RANDOM, UNIFORM, propose_baselines
from qbench.cli.main import keep_output_ours
from qbench.config import Config, load_config, make_config
from qbench.engine.verify import Judge
from qbench.errors import MeasurementError
from qbench.judging import REFERENCE
from qbench.planner import decide
from qbench.progress import Silence
from qbench.records import Estimate, Judgement, Verdict
from qbench.serving.offline import time_batches
from qbench.statistics import median_interval, paired_drop
from qbench.tasks.base import Array
from qbench.workbench import Workbench

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"
#: Our plans: the name of each engine and the objective that its plan was made for.
OBJECTIVES = {"plan": "balanced", "plan-latency": "latency"}
#: Engines whose every product with a weight is one of INT8, and those that ONNX Runtime does not
#: serve.
ALL_INT8 = ("int8", "int8_dynamic", DYNAMIC, STATIC, INT8, NNCF_ONNX, NNCF_OPENVINO)
ELSEWHERE = (NNCF_OPENVINO,)
#: Texts of the sentiment task that decide; the rest, about 10,000, verify. Where 3 % of the answers
#: flip, half a per cent is not told from nothing with fewer on either side.
SWEPT = 9000
#: Time of its sweep, and engines of its front: each runs all those texts.
BUDGET, LEVELS = "6m", 5
#: Batches timed of each size, and rounds.
TIMED = {1: 12, 8: 6, 32: 3}
ROUNDS = 11
#: Share of the fastest all-INT8 engine's throughput that a plan is to reach.
REACH = 0.95
_HEAD = f"{'engine':23}{'kind':10}{'MB':>7}  {'batch 1':20}{'batch 8':20}{'batch 32':20}"


@dataclass(frozen=True, slots=True)
class Row:
    """One engine on one task.

    Attributes:
        name: Name of the engine.
        kind: ``reference``, ``uniform``, ``peer``, ``random`` or ``qbench``.
        task: Name of the task.
        bytes: Its size.
        throughput: Throughput over the reference's by batch size (> 1 is faster).
        judgement: What verification says.
        times_ms: Times by batch size, shape [rounds, batches].
        payload: What the metric needs of each sample, shape [n, k].
    """

    name: str
    kind: str
    task: str
    bytes: int
    throughput: Mapping[int, Estimate]
    judgement: Judgement
    times_ms: Mapping[int, Array] = field(repr=False)
    payload: Array = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the row as ``--json`` prints it."""
        judged, drop = self.judgement, self.judgement.drop
        return {
            "name": self.name,
            "kind": self.kind,
            "task": self.task,
            "bytes": self.bytes,
            "throughput_ratio": {str(b): own.value for b, own in self.throughput.items()},
            "throughput_interval": {
                str(b): [own.low, own.high] for b, own in self.throughput.items()
            },
            "metric": judged.value,
            "drop": drop.value,
            "drop_low": drop.low,
            "drop_high": drop.high,
            "n": judged.n,
            "flip_rate": judged.flip_rate,
        }


@dataclass(slots=True)
class Table:
    """All rows of one task.

    Attributes:
        judge: What judged them.
        rows: The rows, the reference first.
        missing: Why an engine has no row, by its name.
    """

    judge: Judge
    rows: list[Row]
    missing: Mapping[str, str]


def build_plans(work: Workbench) -> dict[str, str]:
    """Build the engine of each objective's plan; return why one lowers nothing, by name.

    The baselines' random plan costs what the first one does; without one there is none.
    """
    missing, first = {}, None
    given = work.config
    for name, objective in OBJECTIVES.items():
        wanted = {**given.to_dict(), "plan": {**given.to_dict()["plan"], "objective": objective}}
        work.config = make_config(wanted)
        decision = decide(work, Silence())
        if judging.is_gain(decision.plan):
            judging.build(work, name, decision.plan)
            first = first or decision.plan
        else:
            missing[name] = decision.words
    work.config = given
    clips = judging.clips_of(work, work.run.read_ranges())
    told = first or judging.plan_for(work, judging.Candidate(REFERENCE, {}), clips)
    for candidate in propose_baselines(work, told):
        if first is None and candidate.name == RANDOM:
            continue
        try:
            judging.build(work, candidate.name, judging.plan_for(work, candidate, clips))
        except MeasurementError as error:
            judging.discard(work, [candidate.name])
            missing[candidate.name] = str(error)
    return missing


def measure(work: Workbench, task: str, torch_model: TorchModel, quick: bool) -> Table:
    """Sweep, plan, build every engine of one task, judge and time them."""
    pipeline.calibrate(work)
    for _ in pipeline.sweep(work):
        pass
    missing = build_plans(work)
    clips = judging.clips_of(work, work.run.read_ranges())
    peers, failed = build_peers(work, torch_model, clips)
    kinds = dict.fromkeys(UNIFORM, "uniform") | {RANDOM: "random"}
    kinds |= dict.fromkeys(peers, "peer") | dict.fromkeys(OBJECTIVES, "qbench")
    kinds = {k: v for k, v in kinds.items() if is_built(work, k)}
    judge = judging.judge_for(work, "verification")
    return Table(
        judge,
        list(measure_rows(work, judge, {REFERENCE: "reference"} | kinds, task, quick)),
        missing | failed,
    )


def measure_rows(
    work: Workbench, judge: Judge, kinds: Mapping[str, str], task: str, quick: bool
) -> Iterator[Row]:
    """Yield the row of each engine that lies in the run, the reference first."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # an engine has one thread
        given = pool.map(lambda name: outputs_of(work, name, judge.split), kinds)
        outputs = dict(zip(kinds, given, strict=True))
    rounds = 3 if quick else ROUNDS
    times = {
        size: time_size(work, list(kinds), size, count, rounds) for size, count in TIMED.items()
    }
    for name, kind in kinds.items():
        own = {size: times[size][name] for size in TIMED}
        yield Row(
            name,
            kind,
            task,
            bytes_of(work, name),
            {size: throughput(times[size][REFERENCE], own[size]) for size in TIMED},
            judge.judge(name, outputs[name]),
            own,
            judge.task.score(outputs[name], judge.reference).payloads[judge.task.metrics[0].name],
        )


def time_size(
    work: Workbench, names: Sequence[str], size: int, count: int, rounds: int
) -> dict[str, Array]:
    """Return each engine's times of batches of one size, ms, shape [rounds, batches]."""
    texts = work.task("verification").texts
    encode, pad = judging.encoder(work), judging.padder(work)
    feeds = []
    for at in range(count):
        rows = [(at * size + i) % len(texts) for i in range(size)]
        feeds.append(pad(encode([texts[row] for row in rows])))
    engines = [serve(work, name) for name in names]
    timed = time_batches(engines, feeds, rounds, threads=1, seed=work.config.run.seed)
    return {own.engine: np.array(own.times_ms) for own in timed}


def throughput(base_ms: Array, own_ms: Array) -> Estimate:
    """Return the median of paired ratios of throughput (> 1: faster than the base)."""
    return median_interval((base_ms / own_ms).ravel())


def beats(other: Row, plan: Row, judge: Judge) -> list[str]:
    """Return at which batch sizes a row is faster than a plan while it is better in the metric."""
    metric = judge.task.metrics[0]
    drop = paired_drop(metric, plan.payload, other.payload, seed=judge.seed)
    if not drop.high < 0:
        return []
    sizes = plan.times_ms
    return [str(s) for s in sizes if throughput(plan.times_ms[s], other.times_ms[s]).low > 1]


def reached(plan: Row, int8: Sequence[Row]) -> list[str]:
    """Return in words what share of the fastest all-INT8 engine's throughput a plan reaches.

    Where another runtime serves that engine, the fastest one of ONNX Runtime is told too.
    """
    told = []
    for size in plan.throughput:
        ranked = sorted(int8, key=lambda row: row.throughput[size].value, reverse=True)
        served = [row for row in ranked if row.name not in ELSEWHERE]
        words = "of the fastest all-INT8 engine"
        picked = {row.name: (row, words) for row in ranked[:1]}
        for row in served[:1]:
            picked.setdefault(row.name, (row, f"{words} of ONNX Runtime"))
        for best, said in picked.values():
            near = throughput(best.times_ms[size], plan.times_ms[size])
            told.append(
                f"{plan.name}, batch {size}: {near.value:.3f} [{near.low:.3f}, {near.high:.3f}] "
                f"{said} ({best.name}); {REACH:g} {'reached' if near.value >= REACH else 'missed'}"
            )
    return told


def conclusions(table: Table) -> list[str]:
    """Return in words what the rows say of each of our plans."""
    judge, rows = table.judge, table.rows
    told = []
    int8 = [row for row in rows if row.name in ALL_INT8]
    for plan in (row for row in rows if row.kind == "qbench"):
        verdict = {Verdict.VERIFIED: "non-inferior", Verdict.FAILED: "inferior"}.get(
            plan.judgement.verdict, "not resolvable"
        )
        told.append(f"{plan.name}: {verdict} at a margin of {judge.margin or 0.0:.3g}")
        told += reached(plan, int8)
        found = {row.name: beats(row, plan, judge) for row in rows if row.kind != "qbench"}
        beating = [f"{name} (batch {', '.join(s)})" for name, s in found.items() if s]
        told.append(f"{plan.name}: faster and better than it: {', '.join(beating) or 'no row'}")
    return told


def shown(table: Table) -> str:
    """Return one task's rows and conclusions as text."""
    metric, first = table.judge.task.metrics[0].name, table.rows[0]
    lines = [f"{first.task}, n = {first.judgement.n}", f"{_HEAD}{metric:8}drop [95 %]{'':22}flips"]
    for row in table.rows:
        judged, drop = row.judgement, row.judgement.drop
        speeds = "".join(
            f"{f'{x.value:.2f} [{x.low:.2f}, {x.high:.2f}]':20}" for x in row.throughput.values()
        )
        interval = f"{drop.value:+.4f} [{drop.low:+.4f}, {drop.high:+.4f}]"
        lines.append(
            f"{row.name:23}{row.kind:10}{row.bytes / 1e6:7.1f}  {speeds}{judged.value:.4f}  "
            f"{interval:33}{judged.flip_rate:.3f}"
        )
    lines += [f"no row: {name}: {reason}" for name, reason in table.missing.items()]
    return "\n".join([*lines, *conclusions(table)])


def retrieval_config(folder: Path, quick: bool) -> Config:
    """Return the demo's configuration, on one thread and with its results in ``folder``."""
    few = {"data.limit": 300, "data.splits.sweep": 60, "plan.levels": 3, "plan.rounds": 0}
    return load_config(CONFIG, common(folder, "retrieval") | (few if quick else {}))


def common(folder: Path, task: str) -> dict[str, Any]:
    """Return what both configurations share, by dotted key."""
    return {
        "run.results": str(folder / "runs"),
        "run.id": task,
        "run.threads": 1,
        "sweep.race": True,
        "data.prepared": str(folder / "data"),
    }


def make_sentiment(
    base: Workbench, folder: Path, archive: Path | None, quick: bool
) -> tuple[Config, TorchModel]:
    """Fit the probe on its own texts, write model and table, and return their configuration."""
    rated = read_archive(archive)
    training = 600 if quick else TRAINING
    probe = fit_probe(base.model, base.tokenizer, rated[:training], base.settings)
    model, table = folder / "probe.onnx", folder / "rated.csv"
    write_classifier(base.model, probe, model)
    write_table(rated[training:], table)
    source = base.config.model.source
    told = {"tokenizer": source, "max_length": base.tokenizer.max_length, "output": OUTPUT}
    values = {
        "model": {"source": str(model), **told},
        "data": {
            "source": str(table),
            "columns": {"text": "text", "label": "label"},
            "splits": {"calibration": 64, "sweep": 60 if quick else SWEPT, "verification": "rest"},
            "limit": 600 if quick else None,
        },
        "task": {"kind": "classification", "metric": "accuracy"},
        "sweep": {**base.config.sweep.model_dump(mode="json"), "budget": BUDGET},
        "plan": {**base.config.plan.model_dump(mode="json"), "max_drop": "0.5 %", "levels": LEVELS},
    }
    return make_config(values, common(folder, "sentiment")), TorchModel(source, probe)


def tables(folder: Path, archive: Path | None, quick: bool) -> list[Table]:
    """Measure both tasks."""
    base = pipeline.start(retrieval_config(folder, quick))
    config, torch_model = make_sentiment(base, folder, archive, quick)
    first = measure(base, "retrieval", TorchModel(torch_model.source), quick)
    return [first, measure(pipeline.start(config), "sentiment", torch_model, quick)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few samples and levels: a trial")
    parser.add_argument("--json", action="store_true", help="print one object and nothing else")
    parser.add_argument("--vader", type=Path, help="source archive of vaderSentiment 3.3.2")
    parser.add_argument("--keep", type=Path, help="folder for the runs; a temporary one otherwise")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (chosen.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        found = tables(folder, chosen.vader, chosen.quick)
    if chosen.json:
        print(json.dumps({"rows": [row.to_json() for table in found for row in table.rows]}))
        for reason in (f"{k}: {v}" for table in found for k, v in table.missing.items()):
            print(f"no row: {reason}", file=sys.stderr)
    else:
        print("\n\n".join(map(shown, found)))


if __name__ == "__main__":
    keep_output_ours()  # the solver prints now and then
    main()
