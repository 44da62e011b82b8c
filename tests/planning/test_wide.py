"""fp32 beside fp16 as a choice of the planner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qbench.backends import BACKENDS
from qbench.errors import InputError
from qbench.planning.costs import make_offer
from qbench.planning.front import front
from qbench.planning.pins import Pin, Pins, apply_pins
from qbench.planning.problem import problem_of
from qbench.planning.solve import propose, solve
from qbench.planning.wide import offer_pinned, offer_wide, stored_bytes
from qbench.records import Edge, Estimate, Kind, Layer, Layers, Occurrence, Status, SweepRecord

TRT = BACKENDS["tensorrt"]
HOT = "fp16 overflows: its tensor 'x' reaches 7e+04, beyond 65504"


def layer(name: str, tensor: str = "") -> Layer:
    edge = Edge(f"n_{name}", 0, tensor or f"x_{name}")
    use = Occurrence("MatMul", (f"n_{name}",), (edge.tensor,), f"y_{name}", (edge,))
    return Layer(name, Kind.LINEAR, (use,), weight_shape=(8, 8), weight_bytes=256)


LAYERS = Layers((layer("a", "x"), layer("b", "x"), layer("c"), layer("d")), ())


def cell(name: str, form: str, divergence: float, regained: float | None = None) -> SweepRecord:
    back = None if regained is None else Estimate(regained, regained / 2, 2 * regained, 50)
    if regained is not None and regained < 0:
        back = Estimate(regained, 2 * regained, -regained, 50)
    return SweepRecord(
        name,
        Kind.LINEAR,
        form,
        Status.OK,
        backend=TRT.name,
        executed_on="ort-cpu",
        emulated=True,
        n=50,
        divergence=Estimate(divergence, 0.0, 2 * divergence, 50),
        latency_delta_ms=Estimate(0.5, 0.1, 1.0, 6),
        weight_bytes={"fp32": 256, "int8": 96}[form],
        regained=back,
    )


RECORDS = [cell(x.name, "int8", 1e-3) for x in LAYERS.layers]
RECORDS += [cell("c", "fp32", 4e-4, 3e-4), cell("d", "fp32", 2e-4, -1e-4)]
OFFER = make_offer(RECORDS, LAYERS, TRT)


def wide(kept: dict[str, str] | None = None):
    return offer_wide(OFFER, RECORDS, LAYERS, kept or {}, timed=False)


def test_what_fp32_gives_back_is_added_to_the_layers_other_formats() -> None:
    offer = wide()
    divergences = {o.format: o.divergence for o in offer.options["c"]}
    assert divergences == pytest.approx({"fp16": 3e-4, "int8": 1.3e-3, "fp32": 0.0})
    assert {o.format: o.divergence for o in offer.options["a"]} == {"fp16": 0.0, "int8": 1e-3}


def test_fp32_that_gives_nothing_back_is_there_to_be_pinned_and_no_more() -> None:
    offer = wide()
    kept, pinned = (offer.option("d", form) for form in ("fp16", "fp32"))
    assert kept.divergence == 0 < pinned.divergence and kept.bytes < pinned.bytes
    for objective in ("balanced", "bytes", "divergence"):
        assert solve(problem_of(offer, objective))["d"] != "fp32"
    own = apply_pins(offer, Pins({"d": Pin("d", "fp32")}, {}))
    assert solve(problem_of(own, "bytes"))["d"] == "fp32"


def test_a_pin_to_fp32_needs_no_measurement() -> None:
    pins = Pins({"a": Pin("a", "fp32"), "b": Pin("b", "fp32")}, {})
    offer = apply_pins(offer_pinned(wide(), pins, LAYERS), pins)
    chosen = solve(problem_of(offer, "bytes"))
    assert chosen == {"a": "fp32", "b": "fp32", "c": "int8", "d": "int8"}
    with pytest.raises(InputError, match="no cell of it"):
        apply_pins(wide(), pins)


def test_fp32_costs_more_and_lowers_the_error() -> None:
    problem = problem_of(wide(), "bytes")
    careful = propose(solve(replace(problem, objective="divergence")), problem)
    cheapest = propose(solve(problem), problem)
    assert careful.formats["c"] == "fp32" and set(cheapest.formats.values()) == {"int8"}
    assert careful.bytes > cheapest.bytes and careful.divergence_sum < cheapest.divergence_sum
    assert any("fp32" in p.formats.values() for p in front(problem, 4))


def test_the_high_precision_is_counted_in_its_own_width() -> None:
    offer = wide()
    assert offer.option("a", "fp16").bytes == stored_bytes(LAYERS.layers[0], "fp16") == 128
    assert all(o.seconds == 0 for own in offer.options.values() for o in own)
    timed = offer_wide(OFFER, RECORDS, LAYERS, {}, timed=True)
    assert timed.option("c", "fp32").seconds > 0


def test_a_layer_that_fp16_cannot_hold_is_offered_fp32_alone() -> None:
    offer = wide({"a": HOT})
    assert [o.format for o in offer.options["a"]] == ["fp32"]
    assert OFFER.fused and not offer.fused, "it is joined with none"
    chosen = solve(problem_of(offer, "bytes"))
    assert chosen["a"] == "fp32" and chosen["b"] == "int8"
    with pytest.raises(InputError, match="not offered fp16.*overflows"):
        apply_pins(offer, Pins({"a": Pin("a", "fp16")}, {}))


def test_where_fp32_is_the_high_precision_nothing_changes() -> None:
    cpu = BACKENDS["ort-cpu"]
    records = [replace(r, backend=cpu.name) for r in RECORDS if r.format == "int8"]
    offer = make_offer(records, LAYERS, cpu)
    assert offer_wide(offer, records, LAYERS, {}) is offer
