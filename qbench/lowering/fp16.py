"""fp16: rounded at the borders of a layer's nodes; see ``rounding``."""

from __future__ import annotations

from qbench.formats import FORMATS
from qbench.lowering.rounding import NARROW, RoundedLowering


class Fp16Lowering(RoundedLowering):
    """fp16 weights and fp16 rounding at the borders of a layer's nodes."""

    format = FORMATS["fp16"]
    narrow = NARROW["fp16"]
