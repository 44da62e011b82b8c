from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qbench.graph.layers import find_layers
from qbench.lowering.linear import per_channel_int8
from qbench.lowering.weight_only import quantize_blocks
from qbench.records import (
    Estimate,
    Kind,
    ProxyAudit,
    ProxyCell,
    Status,
    SweepRecord,
    from_dict,
    to_dict,
)
from qbench.report.trust_tables import audit_words
from qbench.sensitivity.proxies import (
    ALL,
    GRADIENT,
    LOCAL_NOISE,
    OUTPUT_HALF,
    WEIGHT_MSE,
    audit_proxies,
    gradient_score,
    proxy_cells,
    weight_mse,
)
from qbench.testing.benches import made_sweep
from qbench.testing.graphs import Sketch, decompose, tiny_convnet, tiny_decoder, tiny_encoder

ENCODER = tiny_encoder()
LAYERS = find_layers(ENCODER).layers


def linear():
    return next(layer for layer in LAYERS if layer.kind is Kind.LINEAR)


def weight_of(layer) -> np.ndarray:
    return ENCODER.graph.initializers[layer.weight].const_value.numpy().astype(np.float64)


def test_weight_mse_is_the_lowerings_own_rounding() -> None:
    layer = linear()
    w = weight_of(layer)
    q, scale = per_channel_int8(w.astype(np.float32))
    expected = np.square(q.astype(np.float64) * scale - w).mean()
    for name in ("int8", "int8_dynamic"):
        assert weight_mse(ENCODER, layer, name) == pytest.approx(expected, rel=1e-6)
    q, scale = quantize_blocks(w.astype(np.float32), 4, 32)
    blocks = q.reshape(-1, 32, w.shape[1]) * scale[:, None].astype(np.float64)
    expected = np.square(blocks.reshape(w.shape) - w).mean()
    assert weight_mse(ENCODER, layer, "w4a16") == pytest.approx(expected, rel=1e-6)
    half = np.square(w.astype(np.float16).astype(np.float64) - w).mean()
    assert weight_mse(ENCODER, layer, "fp16") == pytest.approx(half, rel=1e-6)


def test_a_table_has_an_error_where_a_format_can_store_it() -> None:
    table = next(layer for layer in LAYERS if layer.kind is Kind.EMBEDDING)
    w = weight_of(table)
    step = np.abs(w).max(axis=1, keepdims=True) / 127
    error = weight_mse(ENCODER, table, "w8a16")
    assert 0 < error < np.square(step / 2).mean()
    assert weight_mse(ENCODER, table, "int8_dynamic") is None


@pytest.mark.parametrize("model", [decompose(tiny_encoder()), tiny_decoder(), tiny_convnet()])
def test_every_layer_of_any_graph_has_an_error_or_none(model) -> None:
    for layer in find_layers(model).layers:
        errors = [weight_mse(model, layer, name) for name in ("fp16", "w8a16", "w4a16")]
        if layer.kind is Kind.LINEAR:
            assert 0 <= errors[0] < errors[1] < errors[2]
        elif not layer.weight:
            assert errors == [None] * 3


def test_a_transposed_gemm_is_read_as_it_is_multiplied() -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 16))
    y = s.op("Gemm", x, s.weight("w", 8, 16), s.weight("b", 8), at="m.lin", transB=1)
    model = s.model(y=s.op("Tanh", y))
    layer = find_layers(model).layers[0]
    assert weight_mse(model, layer, "int8") > 0


def test_the_gradient_score_is_error_power_times_squared_gradient() -> None:
    assert gradient_score(20.0, 3.0, 5.0) == pytest.approx(0.15)
    assert gradient_score(None, 3.0, 5.0) is None and gradient_score(20.0, 3.0, None) is None


def made_records(n_cells: int, seed: int = 0, formats=("int8", "w4a16")) -> list[SweepRecord]:
    """Cells whose SQNR follows their divergence, with every third drop resolvable."""
    rng = np.random.default_rng(seed)
    records = []
    for name in formats:
        for i in range(n_cells):
            level = float(rng.lognormal(0, 1.5)) * 1e-4
            samples = level * rng.lognormal(0, 0.5, 60)
            mean = float(samples.mean())
            low = mean / 2 if i % 3 == 0 else -mean
            records.append(
                SweepRecord(
                    LAYERS[i].name if i < len(LAYERS) else f"x.{i}", Kind.LINEAR, name, Status.OK,
                    n=60, sqnr_db=-10 * np.log10(level), divergence=Estimate(mean, 0, 1, 60),
                    drops={"mrr": Estimate(mean, low, 2 * mean, 60)},
                    samples={"divergence": tuple(samples.tolist())},
                )
            )  # fmt: skip
    return records


def cells_for(records, errors=lambda layer, name: 1.0):
    return proxy_cells(records, {x.name: x for x in LAYERS}, {}, errors, {})


def test_the_audit_tells_a_good_proxy_from_a_useless_one() -> None:
    records = made_records(24)
    rng = np.random.default_rng(1)
    cells = cells_for(records, lambda layer, name: float(rng.random()))
    audit = audit_proxies(records, cells, {GRADIENT: "the source is an ONNX file"})
    scores = {(s.proxy, s.format): s for s in audit.scores}
    assert {s.format for s in audit.scores} == {ALL, "int8", "w4a16"}
    good, useless = scores[LOCAL_NOISE, ALL], scores[WEIGHT_MSE, ALL]
    assert good.alone and good.with_divergence.low > 0.8 and good.with_drop.n == 16
    assert not useless.alone and abs(useless.with_divergence.value) < 0.5
    assert scores[OUTPUT_HALF, ALL].alone
    assert audit.skipped == {GRADIENT: "the source is an ONNX file"}
    assert (audit.metric, audit.threshold) == ("mrr", 0.8)
    assert from_dict(ProxyAudit, to_dict(audit)) == audit


def test_few_cells_and_constant_proxies_never_stand_alone() -> None:
    records = made_records(5, formats=("int8",))
    audit = audit_proxies(records, cells_for(records), {})
    by_name = {(s.proxy, s.format): s for s in audit.scores}
    assert "5 cells are too few" in by_name[LOCAL_NOISE, "int8"].reason
    assert not any(s.alone for s in audit.scores)
    many = made_records(20, formats=("int8",))
    audit = audit_proxies(many, cells_for(many), {})
    constant = next(s for s in audit.scores if s.proxy == WEIGHT_MSE)
    assert "orders nothing" in constant.reason and not constant.alone


def test_real_cells_have_their_proxies() -> None:
    sweep, layers = made_sweep()
    own = [layer for layer in layers.layers if layer.kind is Kind.LINEAR]
    records = [sweep.measure(layer, name) for layer in own for name in ("int8", "w4a16")]
    model = sweep.bench.replay.model
    cells = proxy_cells(
        records, layers.by_name(), sweep.bench.ranges,
        lambda layer, name: weight_mse(model, layer, name), {x.name: 1.0 for x in own},
    )  # fmt: skip
    assert len(cells) == len(records)
    for cell in cells:
        assert set(cell.proxies) == {LOCAL_NOISE, WEIGHT_MSE, GRADIENT}
        assert cell.proxies[GRADIENT] > 0
    sweep.close()


def test_cells_that_the_race_stopped_are_counted() -> None:
    cells = [
        ProxyCell(f"l{i}", "int8", float(i), None, {"local_noise": float(i)}) for i in range(4)
    ]
    records = [
        SweepRecord(
            c.layer, Kind.LINEAR, c.format, Status.OK, effort="stopped after 4" if i else "full"
        )
        for i, c in enumerate(cells)
    ]
    found = audit_proxies(records, cells, {})
    assert found.partial == 3
    assert any("divergence of 3 of 4 cells is an estimate" in words for words in audit_words(found))
