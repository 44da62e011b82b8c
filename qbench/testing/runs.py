"""A made-up run that follows every schema: for tests of what reads a run folder.

Its numbers come from a seeded generator and mean nothing. It has what real runs have: cells of
every status, names that need escaping, a range that overflows in fp16, an unresolvable verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qbench.formats import format_named
from qbench.records import (
    BenchRun,
    BenchSummary,
    Edge,
    EngineReport,
    Estimate,
    Fallback,
    Judgement,
    Kind,
    Layer,
    Layers,
    Occurrence,
    Plan,
    PlanLayer,
    RequestLatency,
    Status,
    SweepRecord,
    TensorRange,
    Unlayered,
    Verdict,
)
from qbench.rundir import RunDir
from qbench.testing.trust import made_audit, made_noise, made_restored

if TYPE_CHECKING:
    from qbench.report.run_records import RunRecords

#: A layer name that breaks a page which does not escape it.
ODD_NAME = 'odd.<b>&"quoted"</script>'
_FORMATS = ("fp16", "int8", "int8_dynamic", "w8a16", "w4a16")
_ENGINES = ("reference", "plan", "int8", "int8_dynamic", "w8a16", "w4a16", "random")
_FRONT = tuple(f"front-{level}" for level in range(1, 7))
_SCALE = {"fp16": 2e-8, "int8": 6e-4, "int8_dynamic": 4e-4, "w8a16": 3e-5, "w4a16": 3e-3}
_PARTS = (
    ("attention.self.query", Kind.LINEAR), ("attention.self.key", Kind.LINEAR),
    ("attention.self.value", Kind.LINEAR), ("attention.self.k", Kind.KV),
    ("attention.self.v", Kind.KV), ("attention.self.scores", Kind.ATTENTION_SCORES),
    ("attention.self.softmax", Kind.SOFTMAX), ("attention.self.context", Kind.ATTENTION_CONTEXT),
    ("attention.output.dense", Kind.LINEAR), ("attention.output.residual", Kind.RESIDUAL_ADD),
    ("attention.output.LayerNorm", Kind.LAYERNORM), ("intermediate.dense", Kind.LINEAR),
    ("intermediate.act", Kind.ACTIVATION), ("output.dense", Kind.LINEAR),
    ("output.residual", Kind.RESIDUAL_ADD), ("output.LayerNorm", Kind.LAYERNORM),
)  # fmt: skip


def made_layers(blocks: int = 2) -> Layers:
    """Return layers like a small BERT's, one of them with an odd name."""
    named = [
        ("embeddings.word_embeddings", Kind.EMBEDDING),
        ("embeddings.LayerNorm", Kind.LAYERNORM),
    ]
    for block in range(blocks):
        named += [(f"encoder.layer.{block}.{part}", kind) for part, kind in _PARTS]
    named.append((ODD_NAME, Kind.LINEAR))
    reasons = [Unlayered(f"n{i}", "Reshape", "moves data only") for i in range(9)]
    reasons.append(Unlayered("pool", "ReduceSum", "pooling <outside> any module"))
    return Layers(tuple(_layer(name, kind) for name, kind in named), tuple(reasons))


def _layer(name: str, kind: Kind) -> Layer:
    weighted = kind in (Kind.LINEAR, Kind.EMBEDDING)
    node, tensor = f"node_{name}", f"in_{name}"
    use = Occurrence("MatMul", (node,), (tensor,), f"out_{name}", (Edge(node, 0, tensor),))
    size = 384 * 384 if weighted else 0
    return Layer(
        name, kind, (use,), module=name, weight=f"{name}.weight" if weighted else "",
        weight_shape=(384, 384) if weighted else (), weight_bytes=4 * size, parameters=size,
    )  # fmt: skip


def made_ranges(layers: Layers, seed: int = 0) -> tuple[TensorRange, ...]:
    """Return a range for each layer's edge, and an implicit one that overflows in fp16."""
    rng = np.random.default_rng(seed)
    found = [_range(layer, rng) for layer in layers.layers]
    hidden = replace(
        found[1], tensor=f"{found[1].tensor}:sum_of_squares", layer=found[1].layer,
        implicit=True, absmax=90_000.0, max=90_000.0, min=0.0, fp16_headroom=65504 / 90_000,
        channel_absmax=(),
    )  # fmt: skip
    return (*found, hidden)


def _range(layer: Layer, rng: np.random.Generator) -> TensorRange:
    channels = np.abs(rng.lognormal(0.3, 0.35, 384))
    channels[rng.integers(0, 384, 3)] *= rng.uniform(1, 12)
    top = float(channels.max())
    inner = {f"{p}": top * s for p, s in (("99", 0.2), ("99.9", 0.4), ("99.99", 0.6))}
    return TensorRange(
        tensor=layer.edges[0].tensor, layer=layer.name, count=1_000_000,
        min=-top * float(rng.uniform(0.3, 1)), max=top, absmax=top, mean=0.01, std=top / 9,
        kurtosis=float(rng.uniform(0, 40)), percentiles={**inner, "99.999": top * 0.8},
        channel_absmax=tuple(channels.tolist()), fp16_headroom=65504 / top,
    )  # fmt: skip


def made_sweep(layers: Layers, n: int = 60, seed: int = 0) -> tuple[SweepRecord, ...]:
    """Return every cell of the layers, of every status."""
    rng = np.random.default_rng(seed)
    return tuple(_cell(layer, name, n, rng) for layer in layers.layers for name in _FORMATS)


def _cell(layer: Layer, name: str, n: int, rng: np.random.Generator) -> SweepRecord:
    cell = SweepRecord(layer.name, layer.kind, name, Status.OK, n=n, emulated=name == "fp16")
    if name != "fp16" and layer.kind is Kind.EMBEDDING and name != "w8a16":
        return replace(cell, status=Status.NOT_YET, reason="comes with a later version", n=0)
    if name != "fp16" and layer.kind not in (Kind.LINEAR, Kind.EMBEDDING):
        return replace(cell, status=Status.NOT_APPLICABLE, reason="has no weight", n=0)
    if name == "fp16" and layer.name == "embeddings.LayerNorm":
        reason = "a sum of squares reaches 90,000, beyond 65,504"
        return replace(cell, status=Status.INVALID, reason=reason, remedy="keep it in fp32", n=0)
    if name == "w4a16" and layer.name == ODD_NAME:
        return replace(cell, status=Status.FAILED, reason="K = 7 has no block <that> fits", n=0)
    samples = rng.lognormal(0, 1, n) * _SCALE[name] * rng.lognormal(0, 0.9)
    drops = rng.normal(_SCALE[name] * 3, 0.02, n)
    return replace(
        cell,
        sqnr_db=float(rng.uniform(18, 60)),
        cosine=0.9991,
        divergence=_mean(samples),
        drops={"mrr": _mean(drops)},
        flip_rate=float(rng.uniform(0, 0.1)),
        latency_delta_ms=_mean(rng.normal(-0.2, 0.1, 12)),
        weight_bytes=layer.weight_bytes * format_named(name).weight_bits // 32,
        wall_s=0.4,
        samples={"divergence": tuple(samples.tolist()), "mrr": tuple(drops.tolist())},
        p_values={"mrr": float(rng.uniform(0.001, 1))},
    )


def _mean(values: np.ndarray[Any, Any]) -> Estimate:
    half = 1.96 * float(values.std()) / len(values) ** 0.5
    mean = float(values.mean())
    return Estimate(mean, mean - half, mean + half, len(values), method="normal")


def made_plan(layers: Layers, sweep: Sequence[SweepRecord]) -> Plan:
    """Return a plan that lowers two thirds of the linear layers."""
    measured: dict[str, dict[str, float]] = {}
    for cell in sweep:
        if cell.divergence is not None:
            measured.setdefault(cell.layer, {})[cell.format] = cell.divergence.value
    rows = [_plan_layer(i, layer, measured) for i, layer in enumerate(layers.layers)]
    return Plan(
        version=1, backend="ort-cpu", model_source="package:made/model", model_sha256="0" * 64,
        layers=tuple(rows), session_options={"session.intra_op.allow_spinning": "0"},
        constraints={"metric": "mrr", "max_drop": "5 %", "objective": "latency"},
        predicted={"divergence": {"value": 0.0031, "low": 0.0027, "high": 0.0036}},
    )  # fmt: skip


def _plan_layer(index: int, layer: Layer, measured: Mapping[str, Mapping[str, float]]) -> PlanLayer:
    known = measured.get(layer.name, {})
    name = "fp32"
    if layer.kind is Kind.LINEAR and index % 3 and "int8" in known:
        name = "int8" if index % 2 else "int8_dynamic"
    reason = "saves most per divergence" if name != "fp32" else "nothing is gained <here>"
    others = {other: value for other, value in known.items() if other != name}
    clips = {layer.edges[0].tensor: 4.5} if name == "int8" else {}
    return PlanLayer(
        layer.name, layer.kind, name, reason, known.get(name, 0.0), clips, alternatives=others
    )


def made_judgements(split: str, n: int) -> tuple[Judgement, ...]:
    """Return what each engine gave on a split; the front is judged on the sweep split only."""
    names = _FRONT if split == "sweep" else _ENGINES
    return tuple(_judgement(name, index, split, n) for index, name in enumerate(names))


def _judgement(name: str, index: int, split: str, n: int) -> Judgement:
    drop = 0.0 if name == "reference" else 0.002 + 0.004 * index
    half = 0.0 if name == "reference" else 0.006
    verdict = Verdict.VERIFIED if drop + half < 0.021 else Verdict.NOT_RESOLVABLE
    verdict = Verdict.FAILED if drop - half > 0.021 else verdict
    spread = 0.0 if name == "reference" else 0.0009 * (index + 1)
    return Judgement(
        engine=name, split=split, metric="mrr", reference=0.421, value=0.421 - drop,
        drop=Estimate(drop, drop - half, drop + half, n), margin=0.021, verdict=verdict, n=n,
        n_needed=4 * n if verdict is Verdict.NOT_RESOLVABLE else None,
        divergence=Estimate(spread, 0.8 * spread, 1.2 * spread, n), flip_rate=0.01 * index,
        cosine=1 - 0.002 * index,
    )  # fmt: skip


def made_engines() -> tuple[EngineReport, ...]:
    """Return what was built; one engine has a fallback."""
    sizes = (90.9, 31.2, 23.1, 23.2, 24.0, 16.8, 30.9)
    return tuple(_engine(name, size) for name, size in zip(_ENGINES, sizes, strict=True))


def _engine(name: str, megabytes: float) -> EngineReport:
    idle = name == "reference"
    asked = {"fp32": 35} if idle else {"int8": 9, "fp32": 26}
    lost = Fallback(ODD_NAME, "int8", "fp32", "the runtime fused nothing <there>")
    return EngineReport(
        name=name, path=f"engine/{name}/model.onnx", backend="ort-cpu",
        bytes=int(megabytes * 1e6), sha256="1" * 64, asked=asked,
        realised={"fp32": 35} if idle else {"int8": 8, "fp32": 27},
        kernels={"MatMulIntegerToFloat": 8, "Add": 12},
        fallbacks=(lost,) if name == "plan" else (), max_abs_diff=0.01, self_test="passed",
    )  # fmt: skip


def made_front(plan: Plan) -> list[dict[str, Any]]:
    """Return proposals of the planner at rising levels of divergence; the fifth is the plan."""
    counts = dict(Counter(plan.formats().values()))
    return [
        {
            "engine": name,
            "level": level,
            "divergence_sum": {"value": 8e-4 * level, "low": 6e-4 * level, "high": 1e-3 * level},
            "bytes": int((95 - 11 * level) * 1e6),
            "seconds": -0.0015 * level,
            "time_ratio": 1 - 0.1 * level,
            "formats": counts if level == 5 else {"fp32": 20 - level, "int8": level},
            "chosen": level == 5,
        }
        for level, name in enumerate(_FRONT, 1)
    ]


def made_bench(requests: int = 60, seed: int = 0) -> BenchRun:
    """Return a benchmark of every engine with raw latencies, warm-up included."""
    rng = np.random.default_rng(seed)
    rates = dict(zip(_ENGINES, (60.0, 148.0, 155.0, 160.0, 62.0, 41.0, 120.0), strict=True))
    latencies = [
        _request(name, i, 900 / rate, rng) for i in range(requests) for name, rate in rates.items()
    ]
    conditions = {
        "model": "package:made/model", "machine": "made-up CPU", "threads_per_lane": 1,
        "lanes": 2, "clients": 16,
        "rounds": 6, "max_wait_ms": 5.0, "token_budget": 256, "lengths": {"p50": 9, "max": 40},
    }  # fmt: skip
    summaries = tuple(_summary(name, rate, latencies) for name, rate in rates.items())
    return BenchRun(conditions, tuple(latencies), summaries)


def _request(name: str, index: int, wait: float, rng: np.random.Generator) -> RequestLatency:
    parts = wait * rng.lognormal(0, 0.4, 5) * np.array([6.0, 0.3, 8.0, 0.2, 0.1])
    return RequestLatency(
        engine=name, round=index % 6, start_s=index * 0.01, queue_ms=parts[0],
        preprocess_ms=parts[1], inference_ms=parts[2], postprocess_ms=parts[3],
        total_ms=float(parts.sum()), batch_size=4 + index % 9, tokens=9, padded_tokens=120,
        warmup=index < 4, formation_ms=parts[4],
    )  # fmt: skip


def _summary(name: str, rate: float, latencies: Sequence[RequestLatency]) -> BenchSummary:
    own = [item for item in latencies if item.engine == name and not item.warmup]
    total = np.array([item.total_ms for item in own])
    p50, p95, p99 = (float(x) for x in np.percentile(total, [50, 95, 99]))
    stages = ("queue", "preprocess", "formation", "inference", "postprocess")
    means = {s: float(np.mean([getattr(item, f"{s}_ms") for item in own])) for s in stages}
    sizes, counts = np.unique([item.batch_size for item in own], return_counts=True)
    return BenchSummary(
        engine=name, requests=len(own),
        throughput_rps=Estimate(rate, rate * 0.97, rate * 1.03, 6),
        speedup=Estimate(rate / 60, rate / 62, rate / 58, 6), p50_ms=p50, p95_ms=p95, p99_ms=p99,
        stages_ms=means, batch_sizes=dict(zip(sizes.tolist(), counts.tolist(), strict=True)),
        cpu_ms_per_request=1000 / rate,
    )  # fmt: skip


def made_facts() -> dict[str, Any]:
    """Return what ``run.json`` says of the run."""
    return {
        "model": {"source": "package:made/model", "sha256": "0" * 64, "revision": None},
        "data": {"source": "made <data>.csv", "licence": "CC0", "splits": {"calibration": 64,
                 "sweep": 60, "verification": 80}},
        "machine": {"cpu": "made-up CPU", "cores": 2, "memory_gb": 8.0},
        "versions": {"qbench": "0.1.0", "onnxruntime": "1.31.1"},
        "seed": 0,
    }  # fmt: skip


def made_records(blocks: int = 1, n: int = 24) -> RunRecords:
    """Return the records of a whole run, without a folder."""
    from qbench.report.run_records import RunRecords

    layers = made_layers(blocks)
    sweep = made_sweep(layers, n)
    plan = made_plan(layers, sweep)
    return RunRecords(
        name="made-run", facts=made_facts(), layers=layers, ranges=made_ranges(layers),
        sweep=sweep, plan=plan, front=tuple(made_front(plan)),
        deciding=made_judgements("sweep", n), engines=made_engines(),
        judgements=made_judgements("verification", n + 20), bench=made_bench(),
        noise=made_noise(sweep), restored=made_restored(sweep), audit=made_audit(sweep),
    )  # fmt: skip


def made_run(root: Path, blocks: int = 2, n: int = 60) -> RunDir:
    """Write a whole run below ``root`` and return its folder."""
    from qbench.planning.planfile import write_plan

    rundir = RunDir.create(root, "made-run")
    layers = made_layers(blocks)
    sweep = made_sweep(layers, n)
    rundir.write_run(made_facts())
    rundir.write_layers(layers)
    rundir.write_ranges(made_ranges(layers), {})
    rundir.start_journal({"model": "0" * 64})
    for record in sweep:
        rundir.append_sweep(record)
    rundir.write_noise(made_noise(sweep))
    rundir.write_restored(made_restored(sweep))
    rundir.write_audit(made_audit(sweep))
    plan = made_plan(layers, sweep)
    rundir.write_front(made_front(plan))
    rundir.write_judgements("sweep", made_judgements("sweep", n))
    rundir.write_engines(made_engines())
    rundir.write_judgements("verification", made_judgements("verification", n + 20))
    rundir.write_bench(made_bench())
    write_plan(plan, rundir.plan_path)
    rundir.finish()
    rundir.unlock()
    return rundir
