"""The plan: layer to format, with its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qbench.records.layers import Kind
from qbench.records.treatments import Treatment


@dataclass(frozen=True, slots=True)
class PlanLayer:
    """One layer of a plan.

    Attributes:
        name: Name of the layer.
        kind: Kind of the layer.
        format: The format it takes.
        reason: Why it takes it.
        divergence: Divergence of the cell (layer, format) in the sweep; 0 for high precision.
        clips: Clipping magnitude of each edge tensor, for formats that need a range.
        alternatives: Divergence of the other formats that the sweep measured.
        treatment: The remedy that changes its lowering, or ``None``.
        block: Elements of K that share a scale, where the format has blocks; ``None`` to choose
            from the weight.
    """

    name: str
    kind: Kind
    format: str
    reason: str = ""
    divergence: float | None = None
    clips: Mapping[str, float] = field(default_factory=dict)
    alternatives: Mapping[str, float] = field(default_factory=dict)
    treatment: Treatment | None = None
    block: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Layer → format for one backend: the contract between measurement and engine.

    Attributes:
        version: Version of the plan's schema.
        backend: Backend it is for.
        model_source: Where the model came from.
        model_sha256: Hash of the graph and weights that it is for.
        layers: Every layer of the model, in topological order.
        session_options: Session configuration entries of the backend.
        constraints: What was asked: metric, max_drop, objective.
        predicted: What the planner expects: divergence, bytes, seconds.
        measured: What the built engine gave on the sweep split.
        verified: What it gave on the verification split, or ``None`` before.
        history: What was tried, in order.
    """

    version: int
    backend: str
    model_source: str
    model_sha256: str
    layers: tuple[PlanLayer, ...]
    session_options: Mapping[str, str] = field(default_factory=dict)
    constraints: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] | None = None
    verified: Mapping[str, Any] | None = None
    history: tuple[Mapping[str, Any], ...] = ()

    def formats(self) -> dict[str, str]:
        """Return the format of each layer by name."""
        return {layer.name: layer.format for layer in self.layers}
