"""Made-up noise, restored view and audit that fit a made-up sweep; their numbers mean nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qbench.records import (
    CalibrationSpread,
    Estimate,
    Noise,
    NoiseFloor,
    ProxyAudit,
    RestoredRecord,
    RestoredView,
    Status,
    SweepRecord,
)
from qbench.sensitivity.noise import sensitive_layers
from qbench.sensitivity.proxies import GRADIENT, audit_proxies, proxy_cells
from qbench.statistics import difference_interval, mean_interval


def made_noise(sweep: Sequence[SweepRecord], seed: int = 0) -> Noise:
    """Return noise floors far below the cells of a sweep, and what its halves call."""
    rng = np.random.default_rng(seed)
    n = max(record.n for record in sweep)
    floors = [
        _floor("reference", name, rng.lognormal(0, 1, n) * 1e-11)
        for name in ("uncut graph", "other mates", "padded")
    ]
    dynamic = [
        _floor("int8_dynamic", name, rng.lognormal(0, 1, n) * 2e-3)
        for name in ("as in the sweep", "other mates", "padded")
    ]
    cells = [r for r in sweep if r.format == "int8" and r.divergence is not None][:3]
    spread = tuple(
        CalibrationSpread(
            r.layer, r.format, 1e-3, tuple((1e-3 * rng.lognormal(0, 0.3, 4)).tolist())
        )
        for r in cells
    )
    calls = sensitive_layers(sweep, floors)
    return Noise((*floors, *dynamic), spread, calls, ("the spread covers 3 of 5 <cells>",))


def _floor(what: str, composition: str, samples: np.ndarray) -> NoiseFloor:
    apart = None if what == "reference" else Estimate(0.02, 0.015, 0.026, len(samples))
    values = tuple(float(v) for v in samples)
    return NoiseFloor(what, composition, mean_interval(samples), 0.004, apart, values)


def made_restored(sweep: Sequence[SweepRecord], seed: int = 0) -> RestoredView:
    """Return a view in which every int8 layer was restored."""
    rng = np.random.default_rng(seed)
    cells = [r for r in sweep if r.format == "int8" and r.status is Status.OK]
    records = []
    for cell in cells:
        single = np.array(cell.samples["divergence"])
        gain = single * rng.lognormal(-0.5, 0.4) + rng.normal(0, single.mean() / 4, len(single))
        records.append(
            RestoredRecord(
                layer=cell.layer,
                kind=str(cell.kind),
                format="int8",
                divergence=Estimate(0.006, 0.005, 0.007, cell.n),
                gain=difference_interval(gain),
                single=cell.divergence,
                interaction=difference_interval(single - gain),
                flip_rate=0.03,
            )
        )
    all_low = Estimate(0.0065, 0.0055, 0.0075, cells[0].n)
    return RestoredView("int8", len(cells), all_low, tuple(records))


def made_audit(sweep: Sequence[SweepRecord]) -> ProxyAudit:
    """Return an audit of the proxies that made-up cells have; there is no gradient."""
    from qbench.testing.runs import made_layers

    layers = made_layers().by_name()
    cells = proxy_cells(sweep, layers, {}, lambda layer, name: len(layer.name) * 1e-6, {})
    return audit_proxies(sweep, cells, {GRADIENT: "the source is an <ONNX> file"})
