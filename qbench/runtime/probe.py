"""Shapes and element types of every tensor, taken from one real run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from qbench.graph.segments import TensorFact
from qbench.runtime.ort import SessionSettings, open_session

#: Element types that NumPy lacks: a runtime cannot hand such tensors out.
FOREIGN = frozenset(
    dtype
    for dtype in ir.DataType
    if dtype.name == "BFLOAT16" or dtype.name.startswith(("FLOAT8", "FLOAT4", "INT4", "UINT4"))
)


def probe_tensors(
    model: ir.Model, feeds: Mapping[str, np.ndarray], settings: SessionSettings
) -> dict[str, TensorFact]:
    """Run a graph once with every tensor as an output and return what each one is.

    Graph optimisation is off, so that each node of the graph as written really runs. Of what is no
    plain tensor (a sequence, an element type that NumPy lacks) nothing is returned.

    Args:
        model: The graph; it is not changed.
        feeds: One small real batch.
        settings: How to run it.
    """
    tapped = model.clone()
    present = {v.name for v in tapped.graph.outputs}
    for node in tapped.graph:
        for value in node.outputs:
            if value.name and value.name not in present and value.dtype not in FOREIGN:
                tapped.graph.outputs.append(value)
    entries = {**settings.entries, "session.disable_prepacking": "1"}  # weights stay in their file
    plain = SessionSettings(settings.backend, settings.threads, entries, None, False)
    with open_session(tapped, plain) as session:
        values = session.run(feeds)
    facts = {
        name: TensorFact(str(array.dtype), array.ndim, int(array.nbytes))
        for name, array in values.items()
        if isinstance(array, np.ndarray)
    }
    for spec in model.graph.inputs:
        array = feeds.get(spec.name or "")
        if array is not None:
            facts[str(spec.name)] = TensorFact(str(array.dtype), array.ndim, int(array.nbytes))
    return facts


def annotate(model: ir.Model, facts: Mapping[str, TensorFact]) -> None:
    """Write element types and ranks into the graph where it does not tell them."""
    for node in model.graph:
        for value in node.outputs:
            fact = facts.get(value.name or "")
            if fact is None:
                continue
            if value.type is None:
                value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(fact.dtype)))
            if value.shape is None or value.shape.rank() != fact.rank:
                value.shape = ir.Shape([None] * fact.rank)
