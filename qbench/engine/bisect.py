"""The first layer at which two runs of one graph part: found by halving, one tap at a time.

One tensor is tapped at a time, because an extra output keeps a runtime from fusing the nodes around
it: a kernel that miscomputes is still there for every tensor but the one that is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from qbench.graph.taps import with_taps
from qbench.lowering.edit import LAYER_KEY
from qbench.runtime.ort import SessionSettings, open_session
from qbench.tasks.base import Array


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs.

    Attributes:
        graph: A labelled engine.
        settings: How it is run.
    """

    graph: ir.Model
    settings: SessionSettings

    def tensor(self, name: str, feeds: Mapping[str, np.ndarray]) -> Array:
        """Return one tensor of the graph for a batch."""
        tapped = with_taps(self.graph, [name])
        output = tapped.outputs[name]
        with open_session(tapped.model, self.settings) as session:
            return np.asarray(session.run(feeds, [output])[output], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two runs part.

    Attributes:
        layer: The layer.
        tensor: Its tensor that differs first.
        error: Length of the difference over the length of the tensor.
    """

    layer: str
    tensor: str
    error: float

    def __str__(self) -> str:
        """Return it in words."""
        return f"first at layer {self.layer!r} (tensor {self.tensor!r}, off by {self.error:.2g})"


def find_parting(
    side: Side, expected: Side, feeds: Mapping[str, np.ndarray], tolerance: float
) -> Parting | None:
    """Return the first layer whose output is not what is expected; ``None`` if none is found.

    Args:
        side: The run that is looked at.
        expected: The run that is right; its graph has the same names.
        feeds: A batch on which outputs differ.
        tolerance: Largest error, relative to the tensor's length, that is no difference.
    """
    taps = layer_outputs(expected.graph)
    owner = {tensor: layer for layer, tensor in taps}
    errors: dict[str, float] = {}

    def differs(tensor: str) -> bool:
        if tensor not in errors:
            given, wanted = side.tensor(tensor, feeds), expected.tensor(tensor, feeds)
            errors[tensor] = relative_error(given, wanted)
        return not errors[tensor] <= tolerance

    low, high = 0, len(taps)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if differs(taps[middle][1]) else (middle + 1, high)
    if low == len(taps):
        return None
    first: str | None = taps[low][1]
    while first is not None:  # halving may have passed a branch beside the one that it looked at
        found = first
        first = next(filter(differs, _read_by(expected.graph, found, owner)), None)
    return Parting(owner[found], found, errors[found])


def _read_by(graph: ir.Model, tensor: str, owner: Mapping[str, str]) -> list[str]:
    """Return the layers' outputs that a tensor is computed from, without another between."""
    made = {str(v.name): node for node in graph.graph for v in node.outputs}
    found: list[str] = []
    seen, queue = {tensor}, [tensor]
    while queue:
        node = made.get(queue.pop())
        for value in node.inputs if node else ():
            name = "" if value is None else str(value.name)
            if not name or name in seen:
                continue
            seen.add(name)
            (found if name in owner else queue).append(name)
    return found


def layer_outputs(graph: ir.Model) -> list[tuple[str, str]]:
    """Return layer and tensor of what each layer gives to others, in the graph's order."""
    found = []
    for node in graph.graph:
        layer = node.metadata_props.get(LAYER_KEY)
        for value in node.outputs if layer else ():
            readers = [user for user, _ in value.uses()]
            outside = any(user.metadata_props.get(LAYER_KEY) != layer for user in readers)
            floats = value.dtype is None or value.dtype.is_floating_point()
            if value.name and floats and (outside or value.is_graph_output()):
                found.append((str(layer), value.name))
    return found


def relative_error(values: Array, expected: Array) -> float:
    """Return the length of the difference over the expected length; infinite where not finite."""
    if values.shape != expected.shape or not np.isfinite(values).all():
        return float("inf")
    length = float(np.linalg.norm(expected))
    difference = float(np.linalg.norm(values - expected))
    return difference / length if length > 0 else difference
