"""w4a16: 4-bit symmetric weight in blocks along K, floating-point activation.

Blocks are of 128 where that divides K and no smaller one is worth its scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from qbench.formats import FORMATS
from qbench.lowering.base import Change, Refusal
from qbench.lowering.linear import check_operators, require_linear
from qbench.lowering.weight_only import apply_blocks, require_block
from qbench.records import Layer


@dataclass(frozen=True)
class W4A16Lowering:
    """int4 initializer behind a blocked DequantizeLinear.

    Attributes:
        block: Elements of K that share a scale; ``None`` to choose it from the weight.
    """

    block: int | None = None
    format = FORMATS["w4a16"]

    def requires(self, model: ir.Model, layer: Layer) -> Refusal | None:
        """Return why the layer cannot take the format, or ``None``."""
        return require_linear(model, layer) or require_block(model, layer, self.block)

    def apply(self, model: ir.Model, layer: Layer, clips: Mapping[str, float]) -> Change:
        """Rewrite the graph in place; no clips are needed."""
        return apply_blocks(model, layer, 4, self.block)

    def ensures(self, model: ir.Model, layer: Layer) -> str | None:
        """Return what is missing from the rewritten graph, or ``None``."""
        return check_operators(model, layer, {"DequantizeLinear": "no DequantizeLinear"})
