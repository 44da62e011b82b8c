"""Read this first: the path from a model to a verified engine, on one page.

    model ─► layers ─► ranges ─► sweep records ─► plan ─► engine ─► verification ─► benchmark

Each verb takes the workbench of a run, does one stage, writes its records to the run's folder and
returns them. ``run`` does all of them in order; each can be run alone, and again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from qbench import base, judging
from qbench.baselines import BASELINES, propose_baselines
from qbench.budgets import check_request
from qbench.calibration.collect import calibrate as observe_ranges
from qbench.config import Config
from qbench.errors import InputError, MeasurementError, RunDirError
from qbench.executing import check_executor
from qbench.explaining import explain_cells
from qbench.graph.layers import find_layers
from qbench.judging import PLAN, REFERENCE
from qbench.planner import Decision, decide
from qbench.planning.planfile import plan_sha256, read_plan, write_plan
from qbench.progress import Listener, Silence
from qbench.records import (
    BenchRun,
    EngineReport,
    Judgement,
    Plan,
    SweepRecord,
    TensorRange,
    Verdict,
    to_dict,
)
from qbench.remedying import try_remedies
from qbench.runtime.loading import load_model
from qbench.runtime.ort import open_session
from qbench.serializing import build_both, tell_fallbacks, wanted_of
from qbench.serving.bench import BenchSettings
from qbench.serving.bench import bench as serve_and_measure
from qbench.sla import measure_sla, padding_of, workload_of
from qbench.sweeping import all_cells, raced_cells, ready_sweep, tell_effort
from qbench.tasks import Batch
from qbench.torch_scales import check_scales
from qbench.trust import measure_noise, measure_restored
from qbench.workbench import Workbench

#: Seconds that the noise floor, and the restored view, may take each; what was left out is said.
TRUST_BUDGET_S = 25.0

__all__ = [
    "bench",
    "build_engine",
    "calibrate",
    "find_layers",
    "load_model",
    "make_plan",
    "run",
    "start",
    "sweep",
    "verify",
]


def run(config: Config, listener: Listener | None = None) -> Workbench:
    """Do the whole path and return its workbench; the records lie in its run folder."""
    return complete(start(config, listener), listener)


def complete(work: Workbench, listener: Listener | None = None) -> Workbench:
    """Do all stages of a run in order; the sweep goes on where its journal stops."""
    listener = listener or Silence()
    calibrate(work, listener)
    for _ in sweep(work, listener):
        pass
    make_plan(work, listener)
    build_engine(work, listener)
    verify(work, listener)
    bench(work, listener)
    work.run.finish()
    return work


def start(config: Config, listener: Listener | None = None) -> Workbench:
    """Begin the run of a configuration, or continue it; open model, data and layers.

    Raises:
        InputError: If model, data or configuration cannot be used.
    """
    return prepare(Workbench.start(config), listener)


def prepare(work: Workbench, listener: Listener | None = None) -> Workbench:
    """Open model, data and layers of a run, so that what is wrong with them is said first."""
    listener = listener or Silence()
    check_executor(work)
    check_scales(work)
    listener.stage("data: reading and splitting")
    _ = work.data
    listener.stage("model: loading, exporting and checking")
    _ = work.model
    listener.stage("layers: finding")
    _ = work.chosen
    check_request(work)
    for split in ("calibration", "sweep", "verification"):
        work.batches(split)
    return work


def calibrate(work: Workbench, listener: Listener | None = None) -> tuple[TensorRange, ...]:
    """Return the range of every tensor that a format could touch, from one streaming pass."""
    batches = work.batches("calibration")
    (listener or Silence()).stage("ranges: calibrating", len(batches))

    def told() -> Iterator[Batch]:
        for batch in batches:
            yield batch
            (listener or Silence()).step()

    found = observe_ranges(
        work.model.ir, work.layers, told(), lambda graph: open_session(graph, work.settings)
    )
    work.run.write_ranges(found.ranges, found.histograms)
    return found.ranges


def sweep(work: Workbench, listener: Listener | None = None) -> Iterator[SweepRecord]:
    """Yield the record of every cell; cells that the journal holds come from it.

    With ``sweep.race`` cells stop where they cannot change the plan any more, and say so. With
    ``sweep.budget`` cells that were not reached have no record, and ``run.json`` counts them.
    The worst cells are then tried with remedies (``sweep.remedies``), which the journal holds too.

    Raises:
        InputError: As ``sweeping.ready_sweep``.
    """
    listener = listener or Silence()
    with ready_sweep(work, listener) as ready:
        listener.stage("sweep: cells", len(ready.cells))
        measured = raced_cells if work.config.sweep.race else all_cells
        yield from measured(work, ready, listener)
        ready.executor.close()
        records = work.run.read_sweep()
        tell_effort(work, records, ready.cells)
        explain_cells(work, records)
        pools = ready.racer.pools if ready.racer else None
        try_remedies(work, ready.runner.bench, records, listener, pools)
        measure_noise(work, ready.runner.bench, records, listener, budget_s=TRUST_BUDGET_S)
        measure_restored(work, ready.runner.bench, records, listener, budget_s=TRUST_BUDGET_S)


def make_plan(work: Workbench, listener: Listener | None = None) -> Plan:
    """Return the cheapest plan whose built engine was measured to be non-inferior.

    The front's engines are built and measured on the sweep split; what each gave is kept.
    """
    decision = decide(work, listener or Silence())
    work.run.write_front(decision.front)
    work.run.write_prices([to_dict(price) for price in decision.prices])
    work.run.write_judgements("sweep", decision.judgements)
    return take_plan(work, decision)


def take_plan(work: Workbench, decision: Decision) -> Plan:
    """Make a decision's plan the run's own; its engine is still to be built and verified.

    What was said of another plan's engine does not stand any more.
    """
    plan = base.with_reasons(work, decision.plan)
    write_plan(plan, work.run.plan_path)
    if work.run.read_run().get("built_plan_sha256") not in (None, plan_sha256(plan)):
        work.run.write_judgements("verification", ())
    said = None if decision.verdict is None else str(decision.verdict)
    work.run.write_run({"verdict": said, "verdict_words": decision.words})
    return plan


def current_plan(work: Workbench, path: Path | None = None) -> Plan:
    """Return a plan as its file says, hand edits included; the run's own by default.

    Raises:
        RunDirError: If the run has no plan yet.
        PlanError: If it names an unknown layer, an impossible format, or another model.
    """
    if path is None and not work.run.plan_path.is_file():
        raise RunDirError(f"{work.run.path} has no plan.yaml; qbench plan {work.run.path} makes it")
    plan = read_plan(
        path or work.run.plan_path,
        work.layers,
        model_sha256=work.model.sha256,
        backend=work.backend.name,
    )
    base.check_kept(work, plan, str(path or work.run.plan_path))
    return plan


def build_engine(
    work: Workbench,
    listener: Listener | None = None,
    plan_path: Path | None = None,
    folder: Path | None = None,
    dims: Sequence[str] = (),
) -> EngineReport:
    """Build the engine of a plan file and return what it is.

    A backend with a builder gets its serialized engine beside the ONNX file, or the command that
    makes it.

    Args:
        work: The workbench of a run.
        listener: Hears of progress.
        plan_path: The plan; the run's own by default.
        folder: Where the engine goes; in the run by default, and recorded there.
        dims: ``NAME=LEAST,BEST,MOST`` of dynamic axes of a serialized engine; from the data by
            default.

    Raises:
        InputError: If the folder exists and holds something, or the disk is full.
        MissingDependencyError: If the backend's builder is not installed, and could be.
        PlanError: If the plan cannot be built for this model.
        MeasurementError: If the builder refuses the engine.
    """
    listener = listener or Silence()
    _check_new(folder)
    plan = current_plan(work, plan_path)
    wanted = wanted_of(work, plan, dims) if work.backend.builder or dims else None
    listener.stage("engine: building and testing")
    if wanted is None:
        report = judging.build(work, PLAN, plan, folder)
    else:
        report = build_both(work, plan, wanted, folder, listener)
        if plan_path is None:
            tell_fallbacks(work, plan, report)
    if folder is None:
        _record_engine(work, report, plan_sha256(plan))
    return report


def _check_new(folder: Path | None) -> None:
    """Refuse a folder that something of the user's may lie in."""
    if folder is None or not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        what = "is a file" if folder.is_file() else "exists and is not empty"
        raise InputError(f"--out: {folder} {what}; give a folder that is new or empty")


def _record_engine(work: Workbench, report: EngineReport, sha256: str) -> None:
    """Write down the engine; what was said of another plan's engine does not stand any more."""
    facts = work.run.read_run()
    others = [r for r in work.run.known_engines() if r.name != PLAN]
    work.run.write_engines([*others, report])
    if facts.get("built_plan_sha256") not in (None, sha256):
        work.run.write_run({"verdict": None, "verdict_words": None})
        work.run.write_judgements("verification", ())
    work.run.write_run({"built_plan_sha256": sha256})


def _built_engine(work: Workbench) -> EngineReport:
    """Return the engine of the current plan.

    Raises:
        RunDirError: If it was not built, its file is gone, or the plan was changed since.
    """
    plan, path = current_plan(work), judging.engine_path(work, PLAN)
    built = [report for report in work.run.known_engines() if report.name == PLAN]
    todo = f"; qbench build {work.run.path} makes it"
    if not built:
        raise RunDirError(f"{work.run.path} has no engine of its plan{todo}")
    if not path.is_file():
        raise RunDirError(f"the plan's engine is gone: {path}{todo} again, with the same bytes")
    if work.run.read_run().get("built_plan_sha256") != plan_sha256(plan):
        raise RunDirError(
            f"{work.run.plan_path} was changed since its engine was built{todo} as it is now"
        )
    return built[0]


def verify(work: Workbench, listener: Listener | None = None) -> tuple[Judgement, ...]:
    """Judge the plan's engine, and the engines it is compared with, on samples nothing else saw.

    The reference is judged against itself, so that its row shows what no change looks like.
    """
    listener = listener or Silence()
    plan, built = current_plan(work), _built_engine(work)
    candidates = propose_baselines(work, plan)
    listener.stage("verification: engines", len(candidates) + 2)
    judge = judging.judge_for(work, "verification")
    reports = [judging.reference_report(work), built]
    judgements = []
    for name in (PLAN, REFERENCE):
        judgements.append(judging.judge(work, judge, name))
        listener.step(name)
    clips = judging.clips_of(work, work.run.read_ranges())
    not_built = {}
    for candidate in candidates:
        try:
            reports.append(
                judging.build(work, candidate.name, judging.plan_for(work, candidate, clips))
            )
            judgements.append(judging.judge(work, judge, candidate.name))
        except MeasurementError as error:
            judging.discard(work, [candidate.name])
            not_built[candidate.name] = str(error)
        listener.step(candidate.name)
    work.run.write_run({"not_built": not_built})
    work.run.write_engines(reports)
    work.run.write_judgements("verification", judgements)
    _record_verdict(work, plan, judgements[0])
    return tuple(judgements)


def _record_verdict(work: Workbench, plan: Plan, judged: Judgement) -> None:
    """Write what verification said into plan and run; an earlier ``no_gain`` stands."""
    write_plan(replace(plan, verified=to_dict(judged)), work.run.plan_path)
    if base.lowers(work, plan):
        words = "; ".join(text for text in (judged.remark, judging.worth_of(work)) if text)
        work.run.write_run({"verdict": str(judged.verdict), "verdict_words": words})


def _restate_verdict(work: Workbench) -> None:
    """Say again what verification said: what an earlier benchmark added is measured anew."""
    plan = current_plan(work)
    if plan.verified is not None and base.lowers(work, plan):
        words = plan.verified.get("remark", "")
        work.run.write_run({"verdict": plan.verified["verdict"], "verdict_words": words})


def bench(work: Workbench, listener: Listener | None = None) -> BenchRun:
    """Measure the plan's engine and those beside it in the batcher, in one interleaved run.

    A plan whose engine is neither faster under load nor smaller ends as ``no_gain``. With an SLA
    in the configuration the highest rate that keeps it is searched too.
    """
    listener = listener or Silence()
    _built_engine(work)
    names = [REFERENCE, PLAN, *(n for n in BASELINES if judging.engine_path(work, n).is_file())]
    how = work.config.bench
    settings = BenchSettings(
        clients=how.clients,
        rounds=how.rounds,
        seconds=how.seconds,
        token_budget=how.token_budget,
        max_wait_ms=how.max_wait_ms,
        queue=how.queue,
        fixed_size=how.fixed_size,
        max_padding=padding_of(work),
        enough=how.enough,
        seed=work.config.run.seed,
    )
    listener.stage("benchmark: slices", len(names) * how.rounds)
    result = serve_and_measure(
        [judging.serve_with(work, name) for name in names],
        workload_of(work),
        settings,
        conditions={"model": work.config.model.source, "model_sha256": work.model.sha256},
        on_slice=lambda done, total: listener.step(),
        on_stopped=work.run.write_bench,
    )
    work.run.write_bench(result)
    _restate_verdict(work)
    if how.sla_ms is None or measure_sla(work, result, listener).no_gain:
        judging.record_gain(work, result)
    else:
        judging.worth_of(work, result)
    return result


def verdict_of(work: Workbench) -> Verdict | None:
    """Return the verdict that a run has reached so far."""
    said = work.run.read_run().get("verdict")
    return Verdict(said) if said else None
