from __future__ import annotations

from qbench.lowering import LOWERINGS
from qbench.testing.kinds import KindContract

ERRORS = {"fp16": 0.01, "bf16": 0.08, "int8": 0.2, "fp8": 0.2, "w4a16": 0.4, "w4a8": 0.4}
for _name in LOWERINGS:
    _made = type(f"Test_{_name}", (KindContract,), {"format_name": _name, "__module__": __name__})
    _made.error = ERRORS.get(_name, 0.1)
    globals()[_made.__name__] = _made
