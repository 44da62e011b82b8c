"""Frozen records: what each stage of the pipeline gives to the next one and to the run folder."""

from __future__ import annotations

from qbench.records.latencies import BenchRun, BenchSummary, RequestLatency
from qbench.records.layers import Edge, Kind, Layer, Layers, Occurrence, Unlayered
from qbench.records.measurements import (
    EngineReport,
    Estimate,
    Fallback,
    Judgement,
    Status,
    SweepRecord,
    TensorRange,
    Verdict,
)
from qbench.records.plain import from_dict, to_dict
from qbench.records.plans import Plan, PlanLayer

__all__ = [
    "BenchRun",
    "BenchSummary",
    "Edge",
    "EngineReport",
    "Estimate",
    "Fallback",
    "Judgement",
    "Kind",
    "Layer",
    "Layers",
    "Occurrence",
    "Plan",
    "PlanLayer",
    "RequestLatency",
    "Status",
    "SweepRecord",
    "TensorRange",
    "Unlayered",
    "Verdict",
    "from_dict",
    "to_dict",
]
