"""w8a16: 8-bit symmetric weight, floating-point activation.

A linear weight is cut in blocks of 128 along K; an embedding table has one scale a row, and the
looked-up rows alone are scaled. A table that is the weight of an output projection too is cut in
the projection's blocks: both then read one stored table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from qbench.formats import FORMATS
from qbench.lowering.base import Change, Refusal
from qbench.lowering.linear import check_operators, require_linear, require_table
from qbench.lowering.tables import apply_table
from qbench.lowering.weight_only import apply_blocks, require_block
from qbench.records import Kind, Layer


@dataclass(frozen=True)
class W8A16Lowering:
    """int8 weight behind a DequantizeLinear; int8 table behind Gather and a scale.

    Attributes:
        block: Elements of K that share a scale; ``None`` for 128 or what divides K.
    """

    block: int | None = None
    format = FORMATS["w8a16"]

    def requires(self, model: ir.Model, layer: Layer) -> Refusal | None:
        """Return why the layer cannot take the format, or ``None``."""
        if layer.kind is Kind.EMBEDDING:
            return require_table(model, layer)
        return require_linear(model, layer) or require_block(model, layer, self.block)

    def apply(self, model: ir.Model, layer: Layer, clips: Mapping[str, float]) -> Change:
        """Rewrite the graph in place; no clips are needed."""
        if layer.kind is Kind.EMBEDDING:
            return apply_table(model, layer, self.block)
        return apply_blocks(model, layer, 8, self.block, choosing=False)

    def ensures(self, model: ir.Model, layer: Layer) -> str | None:
        """Return what is missing from the rewritten graph, or ``None``."""
        op = "Gather" if layer.kind is Kind.EMBEDDING else "DequantizeLinear"
        return check_operators(model, layer, {op: f"no {op}"})
