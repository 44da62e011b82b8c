"""From a plan to a serialized engine: build, probe what does not build, fall back, say why."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from qbench import judging
from qbench.backends import backend_named
from qbench.engine.build import ENGINE_FILE, asked_formats, label_nodes, lower_graph
from qbench.engine.patterns import Pattern, layer_graph, patterns_of
from qbench.engine.shapes import Sizes, asked_sizes, axis_name, sizes_of
from qbench.engine.tensorrt import NotBuiltError, Wanted, check_builder, refusal_words, serialize
from qbench.errors import ConfigError
from qbench.graph.model import TensorSpec, save_graph
from qbench.planning.planfile import plan_sha256, write_plan
from qbench.progress import Listener, Silence
from qbench.records import EngineReport, Fallback, Plan
from qbench.runtime.tensorrt import build_serialized
from qbench.workbench import Workbench

#: Sizes of an axis of a small graph that the model's inputs do not name.
_UNNAMED = Sizes(1, 16, 64)


@dataclass(frozen=True, slots=True)
class Refused:
    """A pattern that does not build.

    Attributes:
        pattern: What it is.
        layers: Every layer of the plan that is of it.
        reason: What the builder said of the small graph.
    """

    pattern: Pattern
    layers: tuple[str, ...]
    reason: str


def wanted_of(work: Workbench, plan: Plan, dims: Sequence[str] = ()) -> Wanted:
    """Return what the serialized engine of a plan shall be.

    Args:
        work: The workbench of the run.
        plan: The plan; it may name its hardware.
        dims: Sizes of dynamic axes as a user gave them; by default they come from the data.

    Raises:
        ConfigError: If sizes cannot be used, or the backend has no serialized engine.
        MissingDependencyError: If the builder is not installed, and could be.
        PlanError: If the builder makes nothing for the hardware.
    """
    backend = work.backend
    if not backend.builder:
        if dims:
            raise ConfigError(f"--dim: {backend.name} runs the ONNX file itself; leave it away")
        raise ConfigError(f"{backend.name} has no serialized engine")
    hardware = plan.constraints.get("hardware")
    check_builder(backend, hardware)
    batches = [b.feeds for split in ("calibration", "sweep") for b in work.batches(split)]
    sizes = asked_sizes(dims, work.model.inputs, sizes_of(work.model.inputs, batches))
    return Wanted(backend, work.model.inputs, sizes, hardware)


def check_backend(work: Workbench, asked: str | None) -> None:
    """Refuse a backend that is not the run's: its cells were measured for another one.

    Raises:
        ConfigError: If it is unknown, or another than the run's.
    """
    if asked is None or backend_named(asked).name == work.backend.name:
        return
    raise ConfigError(
        f"--backend: got {asked!r}; {work.run.path} was measured for {work.backend.name!r}, and "
        f"records of one backend make no plan for another: sweep with --backend {asked}"
    )


def build_both(
    work: Workbench,
    plan: Plan,
    wanted: Wanted,
    folder: Path | None = None,
    listener: Listener | None = None,
) -> EngineReport:
    """Build a plan's ONNX engine and its serialized one.

    Where the whole does not build, each distinct pattern of it is built alone; the layers of those
    that fail take the high precision, in both engines, and the report says why.

    Raises:
        NotBuiltError: If it does not build and no pattern is to blame.
    """
    listener = listener or Silence()
    report = judging.build(work, judging.PLAN, plan, folder)
    onnx = (folder or work.run.engine_dir(judging.PLAN)) / ENGINE_FILE
    refused: list[Refused] = []
    listener.stage(f"engine: {wanted.backend.name} builds it")
    try:
        made = serialize(onnx, ir.load(onnx), wanted)
    except NotBuiltError:
        refused = find_refused(work, plan, ir.load(onnx), wanted, listener)
        if not refused:
            raise
        kept = without(plan, refused, wanted.backend.high_precision)
        report = judging.build(work, judging.PLAN, kept, folder, sha256=plan_sha256(plan))
        made = serialize(onnx, ir.load(onnx), wanted)
    path = Path(made.path) if made.path else None
    if path is not None and path.is_relative_to(work.run.path):
        made = replace(made, path=str(path.relative_to(work.run.path)))
    high = wanted.backend.high_precision
    gone = tuple(Fallback(n, r.pattern.format, high, r.reason) for r in refused for n in r.layers)
    return replace(
        report, asked=asked_formats(plan), serialized=made, fallbacks=(*gone, *report.fallbacks)
    )


def tell_fallbacks(work: Workbench, plan: Plan, report: EngineReport) -> None:
    """Write into the run's plan which of its layers do not build, and why; its formats stay."""
    told = [{"layer": f.layer, "not_built": f.asked, "reason": f.reason} for f in report.fallbacks]
    new = tuple(entry for entry in told if entry not in plan.history)
    if new:
        write_plan(replace(plan, history=(*plan.history, *new)), work.run.plan_path)


def without(plan: Plan, refused: Sequence[Refused], high_precision: str) -> Plan:
    """Return a plan whose refused layers take the high precision."""
    reasons = {name: r for r in refused for name in r.layers}
    rows = tuple(
        replace(row, format=high_precision, reason=reasons[row.name].reason, treatment=None)
        if row.name in reasons
        else row
        for row in plan.layers
    )
    return replace(plan, layers=rows)


def find_refused(
    work: Workbench, plan: Plan, graph: ir.Model, wanted: Wanted, listener: Listener | None = None
) -> list[Refused]:
    """Build each distinct pattern of a plan alone and return those that do not build.

    One is to blame only where the same layer in high precision does build.

    Args:
        work: The workbench of the run.
        plan: The plan.
        graph: Its labelled engine.
        wanted: What the serialized engine shall be.
        listener: Hears of each pattern.
    """
    listener = listener or Silence()
    high = wanted.backend.high_precision
    patterns = patterns_of(plan, work.layers, high)
    listener.stage("engine: patterns alone", len(patterns))
    found: list[Refused] = []
    plain: ir.Model | None = None
    for pattern, names in patterns.items():
        why = _refusal(graph, names, wanted)
        if why:
            if plain is None:
                plain = _in_high_precision(work, plan, high)
            if not _refusal(plain, names, wanted):
                found.append(Refused(pattern, names, f"{pattern} does not build alone: {why}"))
        listener.step(str(pattern))
    return found


def _in_high_precision(work: Workbench, plan: Plan, high: str) -> ir.Model:
    rows = tuple(replace(row, format=high, treatment=None, block=None) for row in plan.layers)
    graph = lower_graph(work.model.ir, work.layers, replace(plan, layers=rows))
    label_nodes(graph, work.layers)
    return graph


def _refusal(graph: ir.Model, names: Sequence[str], wanted: Wanted) -> str:
    """Return why the builder refuses the first of some layers alone, or ""."""
    part = layer_graph(graph, names)
    if part is None:
        return ""
    inputs = tuple(_spec(value) for value in part.graph.inputs)
    axes = {name for s in inputs for i in range(len(s.shape)) if (name := axis_name(s, i))}
    sizes = {name: wanted.sizes.get(name, _UNNAMED) for name in axes}
    own = replace(wanted, inputs=inputs, sizes=sizes)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "part.onnx"
        save_graph(part, file)
        outcome = build_serialized(
            file, Path(folder) / "part.plan", own.backend, own.profile, own.targets
        )
    return refusal_words(outcome.problems, part, own.backend) if outcome.problems else ""


def _spec(value: ir.Value) -> TensorSpec:
    shape = () if value.shape is None else value.shape
    sizes = tuple(d if isinstance(d, int) else d.value for d in shape)
    dtype = "float32" if value.dtype is None else str(value.dtype)
    return TensorSpec(str(value.name), dtype, sizes)
