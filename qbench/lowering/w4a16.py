"""w4a16: 4-bit symmetric weight in blocks of 128 along K, floating-point activation."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from qbench.formats import FORMATS
from qbench.lowering.base import Change, Refusal
from qbench.lowering.linear import check_operators, require_linear
from qbench.lowering.weight_only import apply_blocks
from qbench.records import Layer


class W4A16Lowering:
    """int4 initializer behind a blocked DequantizeLinear."""

    format = FORMATS["w4a16"]

    def requires(self, model: ir.Model, layer: Layer) -> Refusal | None:
        """Return why the layer cannot take the format, or ``None``."""
        return require_linear(model, layer)

    def apply(self, model: ir.Model, layer: Layer, clips: Mapping[str, float]) -> Change:
        """Rewrite the graph in place; no clips are needed."""
        return apply_blocks(model, layer, 4, self.format.block_size or 128)

    def ensures(self, model: ir.Model, layer: Layer) -> str | None:
        """Return what is missing from the rewritten graph, or ``None``."""
        return check_operators(model, layer, {"DequantizeLinear": "no DequantizeLinear"})
