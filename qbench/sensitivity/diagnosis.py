"""Where numbers stop being numbers: the first tensor of a changed graph that is not finite."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from qbench.runtime.ort import open_session
from qbench.runtime.probe import FOREIGN
from qbench.sensitivity.replay import ChangedSegments, Replay
from qbench.tasks.base import Array


def find_non_finite(replay: Replay, changed: ChangedSegments, outputs: Array) -> str:
    """Return where outputs stopped being finite, in words; "" if all are finite.

    Args:
        replay: The cut graph.
        changed: The changed segments that gave the outputs.
        outputs: Outputs of all items, shape [items, …].
    """
    finite = np.isfinite(outputs.reshape(len(outputs), -1)).all(axis=1)
    if finite.all():
        return ""
    item = int(np.argmin(finite))
    count = len(outputs) - int(finite.sum())
    words = f"outputs are not finite for {count} of {len(outputs)} items, item {item} first"
    batch = next(i for i, b in enumerate(replay.batches) if item in b.rows)
    where = _first_bad_tensor(replay, changed, batch)
    return f"{words}; {where}" if where else words


def _first_bad_tensor(replay: Replay, changed: ChangedSegments, batch: int) -> str:
    """Run segment after segment with every tensor as an output, until one is bad.

    Minus infinity is no fault by itself: a mask rounded to fp16 is that, and a softmax of it is
    zero.
    """
    values = replay.start_values(batch)
    settings = replace(replay.settings, optimise=False)
    for index in range(changed.first, len(replay.segments)):
        part = changed.models.get(index) or replay.chain.settle(replay.part(index))
        given = {v.name for v in part.graph.outputs}
        made = [v for node in part.graph for v in node.outputs if v.name]
        shown = [v for v in made if v.dtype not in FOREIGN]
        part.graph.outputs.extend(v for v in shown if v.name not in given)
        with open_session(part, settings) as session:
            values.update(session.run(values))
        for node in part.graph:
            if any(_is_bad(values[v.name]) for v in node.outputs if v.name in values):
                return _told(node, values)
    return ""


def _is_bad(array: Array) -> bool:
    return array.dtype.kind == "f" and bool(np.isnan(array).any() or np.isposinf(array).any())


def _told(node: ir.Node, values: dict[str, Array]) -> str:
    ranges = [
        f"{v.name!r} in [{values[v.name].min():.6g}, {values[v.name].max():.6g}]"
        for v in node.inputs
        if v is not None and v.name in values and values[v.name].size
    ]
    reads = f", which reads {', '.join(ranges)}" if ranges else ""
    return f"first at {node.outputs[0].name!r}, given by {node.op_type} {node.name!r}{reads}"
