"""Frozen records: what each stage of the pipeline gives to the next one and to the run folder."""

from __future__ import annotations

from qbench.records.latencies import BenchRun, BenchSummary, RequestLatency
from qbench.records.layers import Edge, Kind, Layer, Layers, Mask, Occurrence, Unlayered
from qbench.records.measurements import (
    EngineReport,
    Estimate,
    Fallback,
    Judgement,
    Rewritten,
    Serialized,
    Status,
    SweepRecord,
    TensorRange,
    Verdict,
)
from qbench.records.plain import from_dict, to_dict
from qbench.records.plans import Plan, PlanLayer
from qbench.records.treatments import Cause, CauseName, Treatment, WeightFacts
from qbench.records.trust import (
    CalibrationSpread,
    LayerCall,
    Noise,
    NoiseFloor,
    ProxyAudit,
    ProxyCell,
    ProxyScore,
    RestoredRecord,
    RestoredView,
)

__all__ = [
    "BenchRun",
    "BenchSummary",
    "CalibrationSpread",
    "Cause",
    "CauseName",
    "Edge",
    "EngineReport",
    "Estimate",
    "Fallback",
    "Judgement",
    "Kind",
    "Layer",
    "LayerCall",
    "Layers",
    "Mask",
    "Noise",
    "NoiseFloor",
    "Occurrence",
    "Plan",
    "PlanLayer",
    "ProxyAudit",
    "ProxyCell",
    "ProxyScore",
    "RequestLatency",
    "RestoredRecord",
    "RestoredView",
    "Rewritten",
    "Serialized",
    "Status",
    "SweepRecord",
    "TensorRange",
    "Treatment",
    "Unlayered",
    "Verdict",
    "WeightFacts",
    "from_dict",
    "to_dict",
]
