"""What a plan was asked to keep: pins and limits, checked before the sweep where they can be."""

from __future__ import annotations

import onnx_ir as ir

from qbench import judging
from qbench.backends import Backend, applicability
from qbench.base import base_graph, candidate
from qbench.config import parse_bytes
from qbench.engine.build import lower_graph
from qbench.errors import BudgetError, ConfigError
from qbench.formats import format_named
from qbench.graph.shapes import infer_shapes
from qbench.limits import MaxLatency, parse_max_latency
from qbench.lowering import lowering_for
from qbench.planning.costs import Offer, Option, fused_layers, ties_of, weight_elements
from qbench.planning.pins import Pins, apply_pins, parse_pins, resolve_pins
from qbench.planning.problem import Limits, Objective, Problem, problem_of
from qbench.planning.solve import check_limits, reach
from qbench.planning.targets import check_target
from qbench.planning.wide import stored_bytes
from qbench.records import Layer, Status
from qbench.workbench import Workbench


def pins_of(work: Workbench) -> Pins:
    """Return what each layer keeps and must not take.

    Raises:
        InputError: If a glob matches nothing, pins contradict each other, or the backend does not
            run on the target.
    """
    how = work.config.plan
    if how.hardware is not None:
        check_target(how.hardware, work.backend)
    return resolve_pins(parse_pins(how.keep, how.ban, work.backend), work.layers, work.backend)


def max_latency_of(work: Workbench) -> MaxLatency | None:
    """Return the longest time of a batch that was asked for."""
    said = work.config.plan.max_latency
    return None if said is None else parse_max_latency(said)


def max_bytes_of(work: Workbench) -> int | None:
    """Return the largest engine that was asked for."""
    said = work.config.plan.max_bytes
    return None if said is None else parse_bytes(said)


def graph_bytes(work: Workbench) -> int:
    """Return the bytes of the reference engine that no layer's weight accounts for."""
    storages = {layer.weight: layer.weight_bytes for layer in work.layers.layers if layer.weight}
    return judging.reference_report(work).bytes - sum(storages.values())


def check_request(work: Workbench) -> None:
    """Check pins, and limits that need no sweep: bytes and mean bits follow from the formats.

    Raises:
        InputError: If a pin matches nothing, contradicts another, or cannot be.
        BudgetError: If no plan can keep a limit; the message has the range that can be reached.
    """
    pins = pins_of(work)
    how = work.config.plan
    _check_timed(work)
    if how.max_bytes is None and how.max_bits is None:
        return
    offer = apply_pins(_sizes(work, pins), pins)
    problem = problem_of(offer, "bytes", Limits(bits=how.max_bits))
    check_limits(problem)
    _check_bytes(work, problem)


def _check_timed(work: Workbench) -> None:
    """Refuse to minimise or to limit a time that nothing here can measure.

    Raises:
        ConfigError: If latency is what was asked for.
    """
    how, backend = work.config.plan, work.backend
    if backend.stand_in and (how.objective == "latency" or how.max_latency is not None):
        asked = "max_latency" if how.max_latency is not None else "objective latency"
        raise ConfigError(
            f"plan: got {asked} for {backend.name}; {backend.stand_in} runs its graphs in its "
            "place here, and its times say nothing of a GPU's; allowed: objective bytes or "
            "balanced, max_bytes, max_bits"
        )


def _check_bytes(work: Workbench, problem: Problem) -> None:
    """Check the largest engine that was asked for against the sizes that can be reached.

    Raises:
        BudgetError: If no engine is so small.
    """
    asked, graph = max_bytes_of(work), graph_bytes(work)
    least, most = (int(end) + graph for end in reach(problem, "bytes"))
    if asked is not None and asked < least:
        raise BudgetError(
            f"no engine has at most {asked:,} bytes; reachable: {least:,} to {most:,}, of which "
            f"{graph:,} are no layer's weight"
        )


def _sizes(work: Workbench, pins: Pins) -> Offer:
    """Return what each layer could become by size alone: the lowerings themselves are asked."""
    high = work.backend.high_precision
    bits = format_named(high).weight_bits
    options: dict[str, list[Option]] = {
        layer.name: [
            Option(high, 0.0, stored_bytes(layer, high), 0.0, weight_elements(layer), bits)
        ]
        for layer in work.layers.layers
    }
    kept = {pin.format for pin in pins.kept.values()}
    swept = {layer.name for layer in work.chosen}
    for name in dict.fromkeys((*work.config.sweep.formats, *sorted(kept))):
        if name == high:
            continue
        graph = work.model.ir.clone()
        infer_shapes(graph)
        for layer in work.layers.layers:
            pinned = pins.kept.get(layer.name)
            wanted = layer.name in swept or (pinned is not None and pinned.format == name)
            if not wanted or applicability(layer.kind, name, work.backend)[0] is not Status.OK:
                continue
            size = _size(graph, layer, name, work.backend)
            if size is not None:
                elements, width = weight_elements(layer), format_named(name).weight_bits
                options[layer.name].append(Option(name, 0.0, size, 0.0, elements, width))
    ties, fused = ties_of(work.layers), fused_layers(work.layers, work.backend)
    offered = {name: tuple(own) for name, own in options.items()}
    return Offer(offered, (), ties, high, fused)


def _size(graph: ir.Model, layer: Layer, name: str, backend: Backend) -> int | None:
    """Return the bytes that a lowering stores, ``None`` where it refuses the layer."""
    lowering = lowering_for(name, backend=backend)
    if lowering.requires(graph, layer) is not None:
        return None
    clips = {edge.tensor: 1.0 for edge in layer.edges}  # a range changes no size
    return lowering.apply(graph, layer, clips).weight_bytes


def tied_bytes(work: Workbench, offer: Offer) -> dict[tuple[str, str], int]:
    """Return what the storage of each tie takes in each format that its layers share.

    The layers are lowered together, as the engine has them: two lowerings of one weight may or may
    not store the same numbers.
    """
    clips = judging.clips_of(work, work.run.read_ranges())
    whole = _stored(base_graph(work))
    counted = {}
    for tie, names in offer.ties.items():
        layer = work.layers.by_name()[names[0]]
        kept = stored_bytes(layer, "fp32" if names[0] in work.kept else offer.high_precision)
        for option in offer.options[names[0]]:
            formats = dict.fromkeys(names, option.format)
            offered = all(offer.option(name, option.format) for name in names)
            if option.format == offer.high_precision or not offered:
                continue
            treatments = offer.treatments_of(formats)
            own = candidate(work, "tied", formats, treatments)
            plan = judging.plan_for(work, own, clips)
            stored = _stored(lower_graph(work.model.ir, work.layers, plan))
            counted[tie, option.format] = stored - whole + kept
    return counted


def _stored(graph: ir.Model) -> int:
    values = graph.graph.initializers.values()
    return sum(v.const_value.nbytes for v in values if v.const_value is not None)


def limits_of(work: Workbench, reference_ms: float | None) -> Limits:
    """Return the limits on what a proposal is expected to cost.

    Args:
        work: The workbench of a run.
        reference_ms: A batch's time in high precision; needed where latency is limited.
    """
    how = work.config.plan
    latency, size = max_latency_of(work), max_bytes_of(work)
    seconds = None
    if latency is not None and reference_ms is not None:
        seconds = (latency.share(reference_ms) - 1.0) * reference_ms / 1e3
    return Limits(
        seconds=seconds,
        bytes=None if size is None else size - graph_bytes(work),
        bits=how.max_bits,
    )


def objective_of(work: Workbench) -> Objective:
    """Return what a plan minimises: bytes where it would be time that nothing here can measure."""
    asked = work.config.plan.objective
    return "bytes" if work.backend.stand_in and asked in ("balanced", "latency") else asked


def problem_for(work: Workbench, offer: Offer, limits: Limits | None = None) -> Problem:
    """Return the choice that a run's request leaves.

    Raises:
        BudgetError: If no engine is as small as was asked for.
    """
    problem = problem_of(offer, objective_of(work), limits)
    if limits is not None and limits.bytes is not None:
        _check_bytes(work, problem)
    return problem
