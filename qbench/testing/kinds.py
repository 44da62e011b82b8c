"""What every lowering must do on every kind of layer that it says it takes.

class TestInt8(KindContract):
    format_name = "int8"
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS, Kernel
from qbench.graph.layers import find_layers
from qbench.graph.shapes import infer_shapes
from qbench.graph.taps import with_taps
from qbench.lowering import lowering_for
from qbench.records import Kind, Layer
from qbench.testing.graphs import tiny_convnet, tiny_encoder
from qbench.testing.lowerings import graph_text, run_graph

#: Opsets that engines may have.
OPSETS = (21, 22, 23)
_RANDOM = np.random.default_rng(0)
_IDS = _RANDOM.integers(1, 99, (2, 7))
_TOKENS: Mapping[str, np.ndarray] = {
    "input_ids": _IDS,
    "attention_mask": np.array([[1] * 7, [1] * 5 + [0] * 2]),
}
_IMAGE: Mapping[str, np.ndarray] = {"image": _RANDOM.normal(size=(2, 3, 16, 16)).astype(np.float32)}


@dataclass(frozen=True)
class KindCase:
    """A small graph that has layers of a kind.

    Attributes:
        model: The graph.
        layers: Its layers of the kind.
        feeds: Inputs to run it on.
        outputs: What it gives.
        clips: Largest magnitude of each tensor that a layer reads, fills of masks left out.
    """

    model: ir.Model
    layers: tuple[Layer, ...]
    feeds: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    clips: Mapping[str, float]


@functools.cache
def kind_case(kind: Kind, opset: int, fixed: bool) -> KindCase:
    """Return a graph with layers of a kind, of fixed or of open shape."""
    image = kind is Kind.CONV
    model, feeds = (tiny_convnet(), _IMAGE) if image else (tiny_encoder(layers=1), _TOKENS)
    model.graph.opset_imports[""] = opset
    if fixed:
        for value in model.graph.inputs:
            value.shape = ir.Shape(feeds[str(value.name)].shape)
        for node in model.graph:
            for value in node.outputs:
                value.shape = None
    infer_shapes(model)
    layers = tuple(x for x in find_layers(model).layers if x.kind is kind)
    tensors = {edge.tensor for layer in layers for edge in layer.edges}
    tapped = with_taps(model, sorted(tensors))
    given = run_graph(tapped.model, feeds)
    clips = {
        tensor: float(np.abs(values[np.abs(values) < 1e4]).max(initial=1e-6))
        for tensor, values in ((t, given[o]) for t, o in tapped.outputs.items())
    }
    outputs = {str(v.name): given[str(v.name)] for v in model.graph.outputs}
    return KindCase(model, layers, feeds, outputs, clips)


def _cases() -> Iterator[tuple[Kind, int, bool]]:
    for kind in Kind:
        yield kind, OPSETS[0], False
        yield kind, OPSETS[-1], True
    yield Kind.LINEAR, OPSETS[1], False


class KindContract:
    """Tests of a lowering on every kind of layer; a subclass names the format.

    Attributes:
        format_name: The format.
        error: Largest change of an output, of the largest output.
    """

    format_name: str
    error: float = 0.2

    @pytest.fixture(params=_cases(), ids=lambda p: f"{p[0]}-{p[1]}-{'fixed' if p[2] else 'open'}")
    def case(self, request: pytest.FixtureRequest) -> KindCase:
        """Return the graph of a kind that the lowering takes."""
        kind, opset, fixed = request.param
        case = kind_case(kind, opset, fixed)
        assert case.layers, f"the graph has no {kind}"
        if BACKENDS["ort-cpu"].kernel(kind, self.format_name) is Kernel.NONE:
            lowering = lowering_for(self.format_name)
            assert all(lowering.requires(case.model, layer) for layer in case.layers)
            pytest.skip(f"{self.format_name} is not for {kind}")
        return case

    def test_a_layer_of_each_kind_is_lowered_and_runs(self, case: KindCase) -> None:
        """``requires`` passes, ``apply`` changes, ``ensures`` holds, and the outputs stay near."""
        lowering = lowering_for(self.format_name)
        for layer in case.layers:
            model = case.model.clone()
            assert lowering.requires(model, layer) is None
            assert lowering.ensures(model, layer), "an untouched graph is no lowered one"
            assert lowering.apply(model, layer, case.clips).changed
            assert lowering.ensures(model, layer) is None
            got = run_graph(model, case.feeds)
            assert list(got) == list(case.outputs)
            for name, wanted in case.outputs.items():
                assert got[name].shape == wanted.shape and got[name].dtype == wanted.dtype
                error = np.abs(got[name] - wanted).max() / np.abs(wanted).max()
                assert error <= self.error, f"{layer.name}: {error:.3g}"

    def test_bytes_told_are_bytes_stored(self, case: KindCase) -> None:
        """The bytes told are those of new constants, and of a weight that stays beside them."""
        layer, model = case.layers[0], case.model.clone()
        change = lowering_for(self.format_name).apply(model, layer, case.clips)
        old = set(case.model.graph.initializers)
        new = [v for name, v in model.graph.initializers.items() if name not in old]
        held = [v for v in new if not str(v.name).endswith("/least")]  # a bound is no weight
        stored = sum(v.const_value.nbytes for v in held if v.const_value is not None)
        kept = layer.weight_bytes if layer.weight in model.graph.initializers else 0
        assert change.weight_bytes == stored + kept
        assert all(v.uses() for v in new), "a new constant is read by nothing"

    def test_the_same_graph_is_the_same_bytes(self, case: KindCase) -> None:
        """Two copies lowered apart are equal; the graph that they came from is unchanged."""
        before, made = graph_text(case.model), []
        for _ in range(2):
            model = case.model.clone()
            lowering_for(self.format_name).apply(model, case.layers[0], case.clips)
            made.append(graph_text(model))
        assert made[0] == made[1] != before and graph_text(case.model) == before

    def test_a_graph_without_the_layer_stays_as_it_is(self, case: KindCase) -> None:
        """Nothing is changed where no node of the layer is, and that is said."""
        other = ir.from_onnx_text(
            '<ir_version: 10, opset_import: ["" : 21]> g (float[n] a) => (float[n] b) '
            "{ b = Relu(a) }"
        )
        next(iter(other.graph)).name = "elsewhere"
        before = graph_text(other)
        change = lowering_for(self.format_name).apply(other, case.layers[0], case.clips)
        assert not change.changed and change.weight_bytes == 0 and graph_text(other) == before
