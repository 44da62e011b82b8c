from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qbench.calibration.rows import Activation
from qbench.lowering.awq import dequantized
from qbench.records import Estimate, Kind, Status, SweepRecord, Treatment
from qbench.records.packed import unpack
from qbench.sensitivity.remedies import (
    awq_scale,
    best_variant,
    better_by,
    cells_to_treat,
    find_awq,
    find_smoothquant,
    smoothing_scale,
    treatments_of,
    with_best_variants,
)

K, N = 64, 24


def activation(values: np.ndarray) -> Activation:
    wide = np.abs(values)
    return Activation(
        values, wide.max(axis=0), wide.mean(axis=0), np.square(values).mean(axis=0), len(values)
    )


def problem(outlier: float = 1.0, seed: int = 0) -> tuple[Activation, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(200, K)).astype(np.float32)
    values[:, 5] *= outlier
    return activation(values), rng.normal(size=(K, N)).astype(np.float32) / 8


def cell(layer: str, form: str, value: float, **changes: object) -> SweepRecord:
    samples = tuple((value * np.linspace(0.5, 1.5, 20)).tolist())
    record = SweepRecord(
        layer,
        Kind.LINEAR,
        form,
        Status.OK,
        n=20,
        divergence=Estimate(value, 0.8 * value, 1.2 * value, 20),
        samples={"divergence": samples},
    )
    return replace(record, **changes)


def test_scales_are_the_published_ones_up_to_a_factor() -> None:
    rng = np.random.default_rng(0)
    act, weight = (rng.uniform(0.1, 9, K).astype(np.float32) for _ in range(2))
    for alpha in (0.0, 0.3, 0.5, 1.0):
        ratio = smoothing_scale(act, weight, alpha) / (act**alpha / weight ** (1 - alpha))
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)
        ratio = awq_scale(act, alpha) / act**alpha
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)
    scale = smoothing_scale(act, weight, 0.5)
    assert scale.max() * scale.min() == pytest.approx(1, rel=1e-5)


def test_a_channel_that_was_never_used_gets_a_finite_scale() -> None:
    act, weight = np.ones(K, np.float32), np.ones(K, np.float32)
    act[3] = weight[4] = 0
    assert np.isfinite(smoothing_scale(act, weight, 0.5)).all()
    assert np.isfinite(awq_scale(np.zeros(K, np.float32), 0.5)).all()


def test_smoothquant_finds_the_channel_that_stands_out() -> None:
    seen, weight = problem(outlier=50)
    found = find_smoothquant(seen, weight, "x")
    scale = unpack(found.vectors["scale"])
    assert found.variant.startswith("smoothquant:") and scale.argmax() == 5
    assert found.clips["x"] == pytest.approx(float((seen.absmax / scale).max()))
    smoothed = seen.absmax / scale
    assert smoothed.max() / np.median(smoothed) < 0.5 * seen.absmax.max() / np.median(seen.absmax)
    assert found == find_smoothquant(seen, weight, "x")


def test_layers_that_share_an_input_can_share_a_scale() -> None:
    seen, weight = problem(outlier=50)
    rows = np.abs(weight).max(axis=1) * np.linspace(1, 3, K, dtype=np.float32)
    one = find_smoothquant(seen, weight, "x", rows)
    other = find_smoothquant(seen, weight[:, ::-1].copy(), "x", rows)
    assert one.vectors == other.vectors


def test_awq_lowers_the_error_of_the_layer() -> None:
    seen, weight = problem(outlier=30)
    found = find_awq(seen, weight, 4, 32)
    exact = seen.rows @ weight

    def error(scale: np.ndarray) -> float:
        stored = dequantized(weight * scale[:, None], 4, 32).reshape(K, N)
        return float(np.square((seen.rows / scale) @ stored - exact).sum())

    assert found.block == 32 and found.variant.startswith("awq:")
    assert error(unpack(found.vectors["scale"])) < 0.5 * error(np.ones(K, np.float32))


def test_the_worst_cells_of_each_format_are_treated_turn_by_turn() -> None:
    records = [cell(f"l{i}", "int8", i + 1.0) for i in range(5)]
    records += [cell(f"l{i}", "w4a16", 9.0 - i) for i in range(5)]
    records += [cell("l9", "fp16", 99.0), cell("norm", "int8", 99.0, kind=Kind.LAYERNORM)]
    records += [cell("l8", "int8", 99.0, status=Status.FAILED)]
    names = [(r.layer, r.format) for r in cells_to_treat(records, 2)]
    assert names == [("l4", "int8"), ("l0", "w4a16"), ("l3", "int8"), ("l1", "w4a16")]
    kept = [r.layer for r in cells_to_treat(records, 1, kept={"l2"})]
    assert kept == ["l2", "l2"]
    assert cells_to_treat(records, 0) == []


def test_the_best_variant_is_better_beyond_its_interval() -> None:
    plain = cell("a", "int8", 1.0)
    good = cell("a", "int8", 0.2, treatment=Treatment("mse"))
    better = cell("a", "int8", 0.1, treatment=Treatment("smoothquant:0.5"))
    same = replace(plain, treatment=Treatment("entropy"))
    worse = cell("a", "int8", 2.0, treatment=Treatment("percentile:99"))
    assert best_variant(plain, [good, better, same, worse]) is better
    assert best_variant(plain, [same, worse]) is plain
    gain = better_by(plain, good)
    assert gain is not None and gain.value == pytest.approx(0.8) and gain.low > 0
    broken = replace(better, status=Status.INVALID, divergence=None)
    assert best_variant(plain, [broken]) is plain and better_by(plain, broken) is None
    assert best_variant(replace(plain, status=Status.FAILED, divergence=None), [good]) is good


def test_a_cell_that_a_race_stopped_is_compared_by_intervals() -> None:
    plain = cell("a", "int8", 1.0, samples={"sub_pool_1": (1.0,)}, effort="stopped after 20")
    near = cell("a", "int8", 0.9, treatment=Treatment("mse"))
    far = cell("a", "int8", 0.1, treatment=Treatment("entropy"))
    assert better_by(plain, near).low < 0 < better_by(plain, far).low
    assert best_variant(plain, [near, far]) is far


def test_a_plan_takes_the_treatments_of_its_formats() -> None:
    plain = [cell("a", "int8", 1.0), cell("a", "w4a16", 1.0), cell("b", "int8", 1.0)]
    own = Treatment("smoothquant:0.5")
    tried = [cell("a", "int8", 0.1, treatment=own)]
    chosen = with_best_variants(plain, tried)
    assert [r.variant for r in chosen] == ["smoothquant:0.5", "", ""]
    assert treatments_of({"a": "int8", "b": "int8"}, chosen) == {"a": own}
    assert treatments_of({"a": "w4a16", "b": "int8"}, chosen) == {}
