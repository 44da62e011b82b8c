"""bf16: rounded at the borders of a layer's nodes; see ``rounding``.

It has the range of fp32 and 8 bits of mantissa: it overflows nowhere that fp32 does not, but for
the last numbers below fp32's largest.
"""

from __future__ import annotations

from qbench.formats import FORMATS
from qbench.lowering.rounding import NARROW, RoundedLowering


class Bf16Lowering(RoundedLowering):
    """bf16 weights and bf16 rounding at the borders of a layer's nodes."""

    format = FORMATS["bf16"]
    narrow = NARROW["bf16"]
