"""Everything that a run folder holds, read once; what it lacks is named with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from qbench.errors import PlanError, RunDirError
from qbench.records import (
    BenchRun,
    Cause,
    EngineReport,
    Judgement,
    Layers,
    Noise,
    Plan,
    ProxyAudit,
    RestoredView,
    SweepRecord,
    TensorRange,
)
from qbench.rundir import RunDir

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The records of one run, as a report needs them.

    Attributes:
        name: Name of the run folder.
        facts: What ``run.json`` says: model, data, machine, versions.
        layers: The layers, and the nodes in none.
        ranges: What calibration saw.
        sweep: The cells of the sweep.
        plan: The plan, or ``None``.
        front: Proposals of the planner.
        prices: What formats cost, by source.
        deciding: Judgements on the sweep split: they decided the plan.
        engines: What was built.
        judgements: Judgements on the verification split.
        bench: The benchmark, or ``None``.
        noise: The noise floors, or ``None``.
        restored: The view with all layers low and one restored, or ``None``.
        audit: The audit of proxies, or ``None``.
        causes: Why cells are in trouble.
        remedies: Cells with a remedy.
        missing: Why a part is absent, by the part's name.
    """

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    layers: Layers = field(default_factory=lambda: Layers((), ()))
    ranges: tuple[TensorRange, ...] = ()
    sweep: tuple[SweepRecord, ...] = ()
    plan: Plan | None = None
    front: tuple[Mapping[str, Any], ...] = ()
    prices: tuple[Mapping[str, Any], ...] = ()
    deciding: tuple[Judgement, ...] = ()
    engines: tuple[EngineReport, ...] = ()
    judgements: tuple[Judgement, ...] = ()
    bench: BenchRun | None = None
    noise: Noise | None = None
    restored: RestoredView | None = None
    audit: ProxyAudit | None = None
    causes: tuple[Cause, ...] = ()
    remedies: tuple[SweepRecord, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def kinds(self) -> dict[str, str]:
        """Kind of each layer by its name."""
        return {layer.name: str(layer.kind) for layer in self.layers.layers}


def load_records(rundir: RunDir) -> RunRecords:
    """Read a run folder; a part that is missing or damaged is left out and named in ``missing``.

    NOTE: a page about the parts that are there is worth more than an error about one that is
    not; the page names each absent part with the reason and the command that makes it.
    """
    missing: dict[str, str] = {}

    def read(part: str, reader: Callable[[], T], absent: T) -> T:
        try:
            return reader()
        except (RunDirError, PlanError) as error:
            missing[part] = str(error)
            return absent

    layers = read("layers", rundir.read_layers, Layers((), ()))
    no_plan: Plan | None = None
    no_bench: BenchRun | None = None
    no_noise: Noise | None = None
    no_view: RestoredView | None = None
    no_audit: ProxyAudit | None = None
    return RunRecords(
        name=rundir.path.resolve().name,
        facts=read("run", rundir.read_run, {}),
        layers=layers,
        ranges=read("ranges", rundir.read_ranges, ()),
        sweep=in_layer_order(read("sweep", rundir.read_sweep, ()), layers),
        plan=read("plan", lambda: plan_of(rundir, layers), no_plan),
        front=tuple(read("front", rundir.read_front, [])),
        prices=tuple(read("front", rundir.known_prices, [])),
        deciding=read("front", lambda: rundir.read_judgements("sweep"), ()),
        engines=read("engines", rundir.read_engines, ()),
        judgements=read("verification", lambda: rundir.read_judgements("verification"), ()),
        bench=read("bench", rundir.read_bench, no_bench),
        noise=read("noise", rundir.read_noise, no_noise),
        restored=read("restored", rundir.known_restored, no_view),
        audit=read("audit", rundir.known_audit, no_audit),
        causes=read("causes", rundir.known_causes, ()),
        remedies=in_layer_order(read("sweep", rundir.read_remedies, ()), layers),
        missing=missing,
    )


def plan_of(rundir: RunDir, layers: Layers) -> Plan:
    """Return the plan of a run.

    Raises:
        RunDirError: If there is none yet.
        PlanError: If it was edited into something that cannot be built.
    """
    from qbench.planning.planfile import read_plan

    if not rundir.plan_path.is_file():
        raise RunDirError(
            f"{rundir.path} has no {rundir.plan_path.name} yet; `qbench plan` makes it"
        )
    return read_plan(rundir.plan_path, layers if layers.layers else None)


def in_layer_order(records: tuple[SweepRecord, ...], layers: Layers) -> tuple[SweepRecord, ...]:
    """Return cells in topological order of their layers; unknown layers come last."""
    order = {layer.name: place for place, layer in enumerate(layers.layers)}
    return tuple(sorted(records, key=lambda record: order.get(record.layer, len(order))))
