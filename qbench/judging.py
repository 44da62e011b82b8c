"""Engines of one run: built from formats, measured on a split, timed beside each other."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass

from qbench.backends import Variant, backend_named
from qbench.calibration.calibrators import clip_of
from qbench.engine.build import (
    ENGINE_FILE,
    asked_formats,
    file_bytes,
    file_facts,
    label_nodes,
    lower_graph,
    rewritten_constants,
    write_engine,
)
from qbench.engine.realised import node_providers, read_realised
from qbench.engine.selftest import self_test
from qbench.engine.verify import Judge
from qbench.planning.matches import Standing, match_words, matched_by
from qbench.planning.planfile import plan_sha256
from qbench.records import (
    BenchRun,
    EngineReport,
    Estimate,
    Judgement,
    Plan,
    PlanLayer,
    TensorRange,
    Treatment,
    Verdict,
)
from qbench.runtime.ort import Session, SessionSettings, SharedSessions, open_session
from qbench.runtime.passes import run_batches
from qbench.serving.bench import Engine
from qbench.serving.offline import time_batches
from qbench.serving.request import Encode, Encoded, Feeds, Pad, Run
from qbench.storage import clear_disk_errors
from qbench.tasks.base import Array, Text
from qbench.tasks.padding import pad_batch
from qbench.workbench import Workbench

REFERENCE = "reference"
PLAN = "plan"

#: How often engines of the front are timed beside each other on each batch.
_TIMED_ROUNDS = 5
#: Bytes of engines that are in memory together to be timed.
_TOGETHER_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine to build.

    Attributes:
        name: Its name in records and its folder.
        formats: Format of each layer; layers that are left out keep the high precision.
        treatments: Remedy of each layer that has one.
    """

    name: str
    formats: Mapping[str, str]
    treatments: Mapping[str, Treatment] = field(default_factory=dict)


def clips_of(work: Workbench, ranges: Iterable[TensorRange]) -> dict[str, float]:
    """Return the clipping magnitude of each calibrated tensor."""
    how = work.config.calibrate
    histograms = work.run.read_histograms()
    return {
        seen.tensor: clip_of(seen, how.calibrator, how.percentile, histograms.get(seen.tensor))
        for seen in ranges
        if not seen.implicit
    }


def plan_for(work: Workbench, candidate: Candidate, clips: Mapping[str, float]) -> Plan:
    """Return the plan that gives each layer the candidate's format."""
    high = work.backend.high_precision
    return Plan(
        version=1,
        backend=work.backend.name,
        model_source=work.config.model.source,
        model_sha256=work.model.sha256,
        layers=tuple(
            PlanLayer(
                layer.name,
                layer.kind,
                candidate.formats.get(layer.name, high),
                clips={e.tensor: clips[e.tensor] for e in layer.edges if e.tensor in clips},
                treatment=candidate.treatments.get(layer.name),
            )
            for layer in work.layers.layers
        ),
        session_options=dict(work.backend.session_options),
    )


def settings_of(work: Workbench, plan: Plan) -> SessionSettings:
    """Return the session settings that a plan records, on this run's threads."""
    return SessionSettings(plan.backend, work.settings.threads, dict(plan.session_options))


def build(
    work: Workbench,
    name: str,
    plan: Plan,
    folder: Path | None = None,
    *,
    sha256: str | None = None,
) -> EngineReport:
    """Build a plan's engine, look at what the runtime made of it, and test it on real samples.

    Args:
        work: The workbench of the run.
        name: Name of the engine.
        plan: The plan.
        folder: Where it goes; in the run by default.
        sha256: Hash that the engine tells as its plan's; by default that of ``plan``.

    Raises:
        PlanError: If a layer cannot take its format.
        MeasurementError: If the engine does not load, run, or agree with itself.
    """
    target = folder or work.run.engine_dir(name)
    for file in (ENGINE_FILE, f"{ENGINE_FILE}.data"):
        # NOTE: not the whole folder, which may be the user's and hold more than an engine.
        (target / file).unlink(missing_ok=True)
    with _no_half_engine(target):
        told = sha256 or plan_sha256(plan)
        path, graph = write_engine(work.model, work.layers, plan, told, target)
    settings = settings_of(work, plan)
    realised = read_realised(path, graph, work.layers, plan, settings)
    batches = work.batches("calibration")
    lowered = functools.partial(_lowered, work, plan) if name == PLAN else None
    tested = self_test(path, work.model.path, batches, settings, work.model.output, lowered)
    providers = node_providers(path, settings, batches[0].feeds) if name == PLAN else {}
    size, sha256 = file_facts(path)
    inside = path.is_relative_to(work.run.path)
    return EngineReport(
        name=name,
        path=str(path.relative_to(work.run.path) if inside else path),
        backend=plan.backend,
        bytes=size,
        sha256=sha256,
        asked=asked_formats(plan),
        realised=realised.formats,
        kernels=realised.kernels,
        fallbacks=realised.fallbacks,
        max_abs_diff=tested.max_abs_diff,
        self_test=tested.text,
        rewritten=rewritten_constants(work.layers, plan),
        executed_on=work.backend.executed_on,
        emulated=bool(work.backend.stand_in),
        casts=realised.casts,
        providers=providers,
    )


def _lowered(work: Workbench, plan: Plan) -> ir.Model:
    """Return what the lowerings make of a plan, labelled: what its engine's file must hold."""
    graph = lower_graph(work.model.ir, work.layers, plan)
    label_nodes(graph, work.layers)
    return graph


@contextmanager
def _no_half_engine(folder: Path) -> Iterator[None]:
    """Leave no part of an engine where it could not be written.

    Raises:
        InputError: If the disk is full.
    """
    try:
        with clear_disk_errors(folder):
            yield
    except BaseException:
        for file in (ENGINE_FILE, f"{ENGINE_FILE}.data"):
            (folder / file).unlink(missing_ok=True)
        raise


def engine_path(work: Workbench, name: str) -> Path:
    """Return the file of an engine; the reference is the model itself."""
    return work.model.path if name == REFERENCE else work.run.engine_dir(name) / ENGINE_FILE


def outputs_of(work: Workbench, path: Path, split: str) -> Array:
    """Return an engine file's outputs of all items of a split."""
    with open_session(path, work.settings) as session:
        return run_batches(session, work.batches(split), work.model.output)


def judge_for(work: Workbench, split: str) -> Judge:
    """Return the judge of a split: the reference has run, the margin is known."""
    task = work.task(split)
    reference = outputs_of(work, work.model.path, split)
    value = task.score(reference, reference).value(task.metrics[0])
    margin = work.config.plan.allowed_drop.margin(value)
    return Judge(task, split, reference, margin, work.config.run.seed)


def judge(work: Workbench, judge_: Judge, name: str) -> Judgement:
    """Measure one built engine on the judge's split."""
    judged = judge_.judge(name, outputs_of(work, engine_path(work, name), judge_.split))
    backend = work.backend
    if not backend.stand_in or name == REFERENCE:
        return judged
    remark = (
        f"{backend.executed_on} ran the same graph in the place of {backend.name}: the engine of "
        f"{backend.name} itself was not run"
    )
    return replace(
        judged,
        executed_on=backend.executed_on,
        emulated=True,
        remark="; ".join(text for text in (judged.remark, remark) if text),
    )


def serve_with(work: Workbench, name: str) -> Engine:
    """Return an engine as the server and the timer want it."""
    path, entries = engine_path(work, name), work.settings.entries

    def open_one(threads: int) -> Session:
        return open_session(path, SessionSettings(work.backend.name, threads, entries))

    session_of = SharedSessions(open_one)

    def open_lane(threads: int) -> Run:
        return session_of(threads).run

    return Engine(name, open_lane, session_of, work.model.inputs)


def time_engines(
    work: Workbench, names: Sequence[str], rounds: int = _TIMED_ROUNDS
) -> dict[str, Estimate]:
    """Return each engine's time over the reference's, paired and interleaved (< 1 is faster).

    Engines that together are large take their turns with the reference one by one. Where another
    backend runs the graphs in this one's place, nothing is timed and all count as equally fast.
    """
    if work.backend.stand_in:
        return {name: Estimate(1.0, 1.0, 1.0, 0, method="not measured") for name in names}
    feeds = [batch.feeds for batch in work.compared_batches()]
    size = sum(file_bytes(engine_path(work, name)) for name in (REFERENCE, *names))
    groups = [names] if size < _TOGETHER_BYTES else [[name] for name in names]
    found: dict[str, Estimate] = {}
    for group in groups:
        engines = [serve_with(work, name) for name in (REFERENCE, *group)]
        times = time_batches(
            engines, feeds, rounds, threads=work.settings.threads, seed=work.config.run.seed
        )
        found |= {t.engine: t.ratio_to(times[0]) for t in times[1:]}
    return found


def reference_ms(work: Workbench) -> float:
    """Return the median time of a batch in high precision, on one thread as cells are timed."""
    feeds = [batch.feeds for batch in work.timed_batches()]
    times = time_batches([serve_with(work, REFERENCE)], feeds, _TIMED_ROUNDS, threads=1)
    return float(np.median(times[0].best_ms))


def discard(work: Workbench, names: Iterable[str]) -> None:
    """Remove engines that were built to be measured; the same plan builds the same bytes."""
    for name in names:
        shutil.rmtree(work.run.engine_dir(name), ignore_errors=True)


def reference_report(work: Workbench) -> EngineReport:
    """Return the model itself as an engine: nothing lowered.

    What exporters write beside the graph (scopes, versions) is no part of an engine's size.
    """
    size, sha256 = file_facts(work.model.path)
    bare = work.model.ir.clone()
    ClearMetadataAndDocStringPass()(bare)
    size -= max(work.model.path.stat().st_size - ir.to_proto(bare).ByteSize(), 0)
    half = work.backend.variant is Variant.ISLANDS  # the model itself is in fp32 there too
    asked = {"fp32" if half else work.backend.high_precision: len(work.layers.layers)}
    path = str(work.model.path.relative_to(work.run.path))
    return EngineReport(
        REFERENCE, path, work.backend.name, size, sha256, asked, asked, {}, self_test="the model"
    )


def is_gain(plan: Plan) -> bool:
    """Whether a plan lowers anything."""
    high = backend_named(plan.backend).high_precision
    return any(entry.format != high for entry in plan.layers)


def encoder(work: Workbench) -> Encode:
    """Return what turns texts (with their pairs) into token ids."""
    tokenizer = work.tokenizer

    def encode(texts: Sequence[Text]) -> Sequence[Encoded]:
        pairs = [pair for _, pair in texts if pair is not None]
        if pairs and len(pairs) < len(texts):
            return [encode([text])[0] for text in texts]
        return tokenizer([text for text, _ in texts], pairs or None)

    return encode


def padder(work: Workbench) -> Pad:
    """Return what pads encoded requests to one batch of feeds."""
    specs, pad_id = work.model.inputs, work.tokenizer.pad_id

    def pad(encoded: Sequence[Encoded]) -> Feeds:
        return pad_batch(encoded, specs, pad_id=pad_id)

    return pad


def record_gain(work: Workbench, measured: BenchRun) -> None:
    """Write down what the load says of a verified plan: ``no_gain``, or engines that match it.

    Where bytes are what was asked for (as objective, or as the limit within which divergence is
    least) the gain is a smaller file; else it is speed in the batcher, shown by its interval.
    """
    told = worth_of(work, measured)
    plan = next((s for s in measured.summaries if s.engine == PLAN), None)
    if plan is None or work.run.read_run().get("verdict") != Verdict.VERIFIED:
        return
    sizes = {report.name: report.bytes for report in work.run.read_engines()}
    base = sizes.get(work.backend.high_precision, sizes.get(REFERENCE, 0))
    smaller = sizes.get(PLAN, 0) < base
    by_bytes = gains_by_bytes(work)
    if smaller if by_bytes else plan.speedup.low > 1.0:
        if told:
            work.run.write_run({"verdict_words": told})
        return
    speed = f"{plan.speedup.value:.2f}x [{plan.speedup.low:.2f}, {plan.speedup.high:.2f}]"
    share = f"{sizes.get(PLAN, 0) / max(base, 1):.0%} of its size"
    shown = "" if by_bytes or plan.speedup.high < 1.0 else ", which does not show it to be faster"
    words = (
        f"do not quantize: in the batcher the engine serves {speed} as fast as the reference"
        f"{shown}, at {share}"
    )
    if smaller and not by_bytes:
        words += "; where size alone counts, plan with --objective bytes"
    work.run.write_run({"verdict": str(Verdict.NO_GAIN), "verdict_words": words})


def gains_by_bytes(work: Workbench) -> bool:
    """Return whether a smaller file is what was asked for, and not speed."""
    how = work.config.plan
    if work.backend.stand_in:  # what runs here in its place says nothing of its speed
        return True
    return how.objective == "bytes" or (how.objective == "divergence" and how.max_latency is None)


def worth_of(work: Workbench, measured: BenchRun | None = None) -> str:
    """Return in words which engines, that nobody had to choose, match the plan's; write them down.

    Args:
        work: The workbench of a run that was verified.
        measured: What the benchmark gave, or ``None`` before it.
    """
    sizes = {report.name: report.bytes for report in work.run.known_engines()}
    rates = {s.engine: s.throughput_rps for s in measured.summaries} if measured else {}
    standings = {
        j.engine: Standing(j.engine, sizes[j.engine], j.drop, j.verdict, rates.get(j.engine))
        for j in work.run.known_judgements("verification")
        if j.engine in sizes
    }
    plan = standings.pop(PLAN, None)
    standings.pop(REFERENCE, None)
    names = [] if plan is None else matched_by(plan, list(standings.values()))
    work.run.write_run({"matched_by": names})
    return match_words(names, timed=measured is not None)
