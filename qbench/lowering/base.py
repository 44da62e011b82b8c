"""What a lowering is: requires → apply → ensures, and what it says it changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from qbench.formats import Format
from qbench.records import Layer, Rewritten, Status


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a layer cannot take a format.

    Attributes:
        status: ``not_applicable``, ``not_yet`` or ``invalid``.
        reason: In words.
        remedy: What the user can do.
    """

    status: Status
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """What a lowering did to a graph.

    Attributes:
        changed: Whether it changed anything (a segment may hold no node of the layer).
        weight_bytes: Bytes of the weights and scales that it stored.
        remark: How it differs from the format's plain form (another block size), or "".
        rewritten: Constants of masks that it takes as the least number of the format.
        block: Elements of K that share a scale, where the format has blocks.
    """

    changed: bool
    weight_bytes: int = 0
    remark: str = ""
    rewritten: tuple[Rewritten, ...] = ()
    block: int | None = None

    def with_part(self, other: Change) -> Change:
        """Return what was done to two parts of one graph that hold the same layer."""
        return Change(
            self.changed or other.changed,
            max(self.weight_bytes, other.weight_bytes),
            other.remark or self.remark,
            other.rewritten or self.rewritten,
            other.block or self.block,
        )


def unusable_clips(layer: Layer, clips: Mapping[str, float]) -> dict[str, str]:
    """Return why edges of a layer cannot be quantized with the clips that are given, by tensor."""
    found: dict[str, str] = {}
    for edge in layer.edges:
        clip = clips.get(edge.tensor)
        if clip is None:
            found[edge.tensor] = "has no clip: calibration never saw it"
        elif not (math.isfinite(clip) and clip > 0):
            found[edge.tensor] = f"clips at {clip:g}, which is no positive number"
    return found


class Lowering(Protocol):
    """A graph rewrite that gives a layer a format."""

    @property
    def format(self) -> Format:
        """The format."""

    def requires(self, model: ir.Model, layer: Layer) -> Refusal | None:
        """Return why the layer cannot take the format, or ``None``."""

    def apply(self, model: ir.Model, layer: Layer, clips: Mapping[str, float]) -> Change:
        """Rewrite the graph in place for the occurrences whose nodes it holds.

        Args:
            model: The graph, whole or one segment.
            layer: The layer.
            clips: Clipping magnitude of each edge tensor, for formats that need a range.
        """

    def ensures(self, model: ir.Model, layer: Layer) -> str | None:
        """Return what is wrong with the rewritten graph, or ``None``."""
