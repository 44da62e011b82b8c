from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from qbench.backends import backend_named
from qbench.errors import InputError
from qbench.planning.costs import (
    best_variants,
    cell_costs,
    fused_layers,
    make_offer,
    pool_latency,
    sum_divergence,
    ties_of,
)
from qbench.records import (
    Edge,
    Estimate,
    Kind,
    Layer,
    Layers,
    Occurrence,
    Status,
    SweepRecord,
    Treatment,
)

CPU = backend_named("ort-cpu")


def layer(name: str, shape: tuple[int, ...] = (8, 8), tie: str = "") -> Layer:
    return Layer(
        name, Kind.LINEAR, (), weight_shape=shape, weight_bytes=4 * int(np.prod(shape)), tie=tie
    )


def cell(name: str, form: str, ms: float | None, divergence: float = 1e-3) -> SweepRecord:
    samples = tuple(np.full(50, divergence).tolist())
    return SweepRecord(
        name,
        Kind.LINEAR,
        form,
        Status.OK,
        n=50,
        divergence=Estimate(divergence, 0.0, 2 * divergence, 50),
        latency_delta_ms=None if ms is None else Estimate(ms, ms - 1, ms + 1, 6),
        weight_bytes=64,
        samples={"divergence": samples},
    )


LAYERS = Layers(
    (layer("a"), layer("b"), layer("c"), layer("d", (8, 32)), layer("e", (8, 32), "t")), ()
)


def test_latency_is_pooled_over_like_layers() -> None:
    cells = [cell(n, "int8", ms) for n, ms in (("a", -0.1), ("b", -0.3), ("c", -0.2), ("d", -9.0))]
    pooled = pool_latency(cells, LAYERS)
    like = pooled[Kind.LINEAR, (8, 8), "int8"]
    assert (like.value, like.low, like.high, like.n) == (-0.2, -0.3, -0.1, 3)
    assert pooled[Kind.LINEAR, (8, 32), "int8"].value == -9.0
    costs = {(c.layer, c.format): c for c in cell_costs(cells, LAYERS)}
    assert costs["a", "int8"].seconds == pytest.approx(-2e-4)
    assert costs["a", "int8"].bytes == 64


def test_failed_and_untimed_cells_do_not_count() -> None:
    bad = replace(cell("b", "int8", -50.0), status=Status.FAILED)
    cells = [cell("a", "int8", -0.1), bad, cell("c", "int8", None)]
    pooled = pool_latency(cells, LAYERS)[Kind.LINEAR, (8, 8), "int8"]
    assert pooled == cells[0].latency_delta_ms  # alone, it keeps the interval of its own pairs
    assert {c.layer for c in cell_costs(cells, LAYERS)} == {"a", "c"}  # c is like a, so it has one


def reasons(cells: list[SweepRecord]) -> Mapping[tuple[str, str], str]:
    offer = make_offer(cells, LAYERS, CPU)
    return {(r.layer, r.format): r.reason for r in offer.not_offered}


def test_every_layer_may_keep_the_high_precision_and_only_measured_cells_are_options() -> None:
    cells = [
        cell("a", "int8", -0.1),
        replace(cell("a", "fp16", None), status=Status.INVALID, reason="overflows"),
        cell("d", "int8", None),
        replace(cell("b", "int8", -0.1), divergence=None),
        replace(cell("c", "int8", -0.1), backend="tensorrt"),
    ]
    offer = make_offer(cells, LAYERS, CPU)
    assert {name: [o.format for o in options] for name, options in offer.options.items()} == {
        "a": ["fp32", "int8"],
        **{name: ["fp32"] for name in "bcde"},
    }
    first = offer.options["a"][0]
    assert (first.divergence, first.bytes, first.seconds) == (0.0, 256, 0.0)
    why = reasons(cells)
    assert why["a", "fp16"] == "its cell is invalid: overflows"
    assert "no latency was measured" in why["d", "int8"]
    assert "divergence was not measured" in why["b", "int8"]
    assert "for tensorrt" in why["c", "int8"]
    option = offer.option("a", "int8")
    assert option is not None and option.seconds == pytest.approx(-1e-4)
    assert offer.option("a", "w4a16") is None


def test_layers_of_another_model_are_refused() -> None:
    with pytest.raises(InputError, match="'z'"):
        make_offer([cell("z", "int8", -0.1)], LAYERS, CPU)


def test_records_of_another_backend_make_no_plan() -> None:
    foreign = [replace(cell("a", "int8", -0.1), backend="tensorrt")]
    with pytest.raises(InputError, match="measured for tensorrt, and the plan is for ort-cpu"):
        make_offer(foreign, LAYERS, CPU)


def test_fused_layers_are_linear_layers_that_read_one_tensor() -> None:
    def reads(name: str, tensor: str) -> Layer:
        use = Occurrence("MatMul", (name,), (tensor,), f"{name}/out", (Edge(name, 0, tensor),))
        return replace(layer(name), occurrences=(use,))

    found = Layers((reads("q", "x"), reads("k", "x"), reads("out", "y")), ())
    assert fused_layers(found, CPU) == {}
    fusing = replace(CPU, fuses_siblings=True)
    assert fused_layers(found, fusing) == {"siblings of x": ("q", "k")}
    assert make_offer([], found, fusing).fused == {"siblings of x": ("q", "k")}


def test_of_several_remedies_the_least_divergent_cell_is_offered() -> None:
    plain = cell("a", "int8", -0.1, divergence=2e-3)
    better = replace(cell("a", "int8", -0.1), treatment=Treatment("percentile:99.9"))
    worse = replace(cell("b", "int8", -0.1, divergence=9e-3), treatment=Treatment("entropy"))
    records = [better, plain, worse, cell("b", "int8", -0.1)]
    offer = make_offer(records, LAYERS, CPU)
    assert offer.treatments == {("a", "int8"): Treatment("percentile:99.9")}
    assert offer.treatments_of({"a": "int8", "b": "int8"}) == {"a": Treatment("percentile:99.9")}
    chosen = offer.option("a", "int8")
    assert chosen is not None and chosen.divergence == 1e-3 and chosen.elements == 64
    assert best_variants(records) == (better, records[3])


def test_ties_are_layers_that_share_storage() -> None:
    shared = Layers((layer("a", tie="t"), layer("b"), layer("c", tie="t"), layer("d", tie="u")), ())
    assert ties_of(shared) == {"t": ("a", "c")}


def test_the_summed_divergence_has_an_interval() -> None:
    rng = np.random.default_rng(0)
    cells = [
        replace(c, samples={"divergence": tuple(rng.exponential(1e-3, 50).tolist())})
        for c in (cell("a", "int8", -0.1), cell("b", "int8", -0.1), cell("a", "w8a16", -0.1))
    ]
    total = sum_divergence({"a": "int8", "b": "int8", "c": "fp32"}, cells)
    assert total is not None and total.low < total.value < total.high
    both = np.array([c.samples["divergence"] for c in cells[:2]])
    assert total.value == pytest.approx(both.sum(axis=0).mean())
    assert sum_divergence({"c": "fp32"}, cells) is None
    odd = [*cells, replace(cell("c", "int8", -0.1), samples={"divergence": (1.0,)})]
    assert sum_divergence({"a": "int8", "c": "int8"}, odd) is None


def test_a_change_within_noise_counts_as_none() -> None:
    noisy = replace(cell("a", "int8", -0.1), latency_delta_ms=Estimate(-0.1, -0.4, 0.2, 6))
    assert cell_costs([noisy], LAYERS)[0].seconds == 0.0


def test_an_emulated_format_is_never_faster() -> None:
    seeming = replace(
        cell("a", "fp16", -0.1), latency_delta_ms=Estimate(-0.1, -0.4, -0.05, 6), emulated=True
    )
    costly = replace(seeming, latency_delta_ms=Estimate(-0.1, -0.4, 0.2, 6))
    assert cell_costs([seeming], LAYERS)[0].seconds == 0.0
    assert cell_costs([costly], LAYERS)[0].seconds == 0.2e-3
