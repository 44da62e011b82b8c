"""What every lowering must do: a suite that a lowering's tests inherit.

class TestInt8(LoweringContract):
    format_name = "int8"

    @pytest.fixture(params=CASES)
    def case(self, request): ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from qbench.backends import BACKENDS
from qbench.lowering import lowering_for
from qbench.lowering.edit import LAYER_KEY
from qbench.records import Layer
from qbench.runtime.ort import open_session, settings_for

Array = npt.NDArray[np.floating]
Product = Callable[[Array], Array]


@dataclass(frozen=True)
class LoweringCase:
    """A small graph, one of its layers, and the same graph in NumPy with the layer left open.

    Attributes:
        model: The graph.
        layer: The layer to lower.
        feeds: Inputs to run it on.
        weight: What the layer multiplies by, shape [K, N], or a table [rows, width].
        bias: Its bias, shape [N], or ``None``.
        clip: Clipping magnitude of its input.
        outputs: The graph in NumPy: given what the layer computes, its outputs by name.
        bias_apart: Whether the bias is added by a node of its own.
    """

    model: ir.Model
    layer: Layer
    feeds: Mapping[str, np.ndarray]
    weight: Array
    bias: Array | None
    clip: float
    outputs: Callable[[Product], Mapping[str, Array]]
    bias_apart: bool = True

    @property
    def clips(self) -> dict[str, float]:
        """Clipping magnitude of each edge tensor."""
        return {edge.tensor: self.clip for edge in self.layer.edges}


def run_graph(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a graph under the session options of ``ort-cpu`` and return its outputs."""
    with open_session(model, settings_for(BACKENDS["ort-cpu"], threads=1)) as session:
        return session.run(feeds)


def graph_text(model: ir.Model) -> bytes:
    """Return a graph serialised, the same bytes for the same graph."""
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def fake_product(format_name: str, case: LoweringCase, block: int = 0) -> Product:
    """Return in NumPy what a linear layer computes in a format, from the format's definition.

    Args:
        format_name: The format.
        case: Weight, bias and clip.
        block: Elements of K that share a scale, for formats in blocks.
    """
    w = case.weight.astype(np.float32)  # scales are stored as float32, and found in it
    bias = np.zeros(w.shape[1]) if case.bias is None else case.bias.astype(np.float64)
    if format_name in _NARROW:
        apart = case.bias is not None and case.bias_apart
        return lambda x: _narrow_product(x, w, bias, apart, _NARROW[format_name])
    if format_name == "fp8":
        small = _eighth(w, np.abs(w).max(axis=0, keepdims=True) / np.float32(448))
        return lambda x: _eighth(x, np.float32(case.clip / 448)) @ small + bias
    if format_name == "w4a8":
        return lambda x: _rows_in_blocks(x, block) @ _in_blocks(w, 4, block) + bias
    if format_name in ("w8a16", "w4a16"):
        rounded = _in_blocks(w, 8 if format_name == "w8a16" else 4, block)
        return lambda x: x @ rounded + bias
    step = np.abs(w).max(axis=0, keepdims=True) / 127
    rounded = _rounded(w, step, 127, 127)
    if format_name == "int8":
        scale = np.float32(case.clip / 127)
        return lambda x: _rounded(x, scale, 128, 127) @ rounded + bias
    if format_name == "int8_dynamic":
        return lambda x: _dynamic(x) @ rounded + bias
    raise ValueError(f"no reference of {format_name!r}")


def _rounded(values: Array, step: Array | np.floating, below: int, above: int) -> Array:
    step = np.where(np.asarray(step) > 0, step, np.float32(1))
    whole = np.clip(np.rint(np.asarray(values, np.float32) / step), -below, above)
    return np.asarray(whole.astype(np.float64) * step)


def _in_blocks(w: Array, bits: int, block: int) -> Array:
    top = 2 ** (bits - 1) - 1
    parts = [w[at : at + block] for at in range(0, len(w), block)]
    steps = [np.abs(part).max(axis=0, keepdims=True) / top for part in parts]
    return np.concatenate([_rounded(p, s, top, top) for p, s in zip(parts, steps, strict=True)])


def _dynamic(x: Array) -> Array:
    high, low = max(float(x.max()), 0.0), min(float(x.min()), 0.0)
    scale = np.float32(high - low) / np.float32(255)
    if scale == 0:
        return x
    zero = np.clip(np.rint(-low / scale), 0, 255)
    return np.asarray((np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale)


_NARROW = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def _narrow(values: Array, dtype: np.dtype) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32).astype(dtype).astype(np.float64)


def _narrow_product(x: Array, w: Array, bias: Array, apart: bool, dtype: np.dtype) -> Array:
    product = _narrow(x, dtype) @ _narrow(w, dtype)
    return _narrow((_narrow(product, dtype) if apart else product) + _narrow(bias, dtype), dtype)


def _eighth(values: Array, step: Array | np.floating) -> Array:
    """Return values rounded to E4M3 in units of ``step``."""
    step = np.where(np.asarray(step) > 0, step, np.float32(1)).astype(np.float32)
    scaled = np.clip(np.asarray(values, np.float32) / step, -448, 448)
    return scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * step


def _rows_in_blocks(x: Array, block: int) -> Array:
    """Return each row rounded to 8 bits, a block along its last axis at a time."""
    parts = [x[..., at : at + block] for at in range(0, x.shape[-1], block)]
    steps = [np.abs(part).max(axis=-1, keepdims=True) / np.float32(127) for part in parts]
    rounded = [_rounded(part, step, 127, 127) for part, step in zip(parts, steps, strict=True)]
    return np.concatenate(rounded, axis=-1)


class LoweringContract:
    """Tests of the ``Lowering`` protocol; a subclass names the format and gives cases."""

    format_name: str

    @pytest.fixture
    def case(self) -> LoweringCase:
        """Return a case that the lowering accepts."""
        raise NotImplementedError

    def reference(self, case: LoweringCase) -> Product:
        """Return in NumPy what the lowered layer computes."""
        raise NotImplementedError

    def step(self, case: LoweringCase) -> float:
        """Return how far one rounding that falls the other way may move an output."""
        raise NotImplementedError

    def lowered(self, case: LoweringCase) -> ir.Model:
        """Return a lowered copy of the case's graph."""
        model = case.model.clone()
        lowering_for(self.format_name).apply(model, case.layer, case.clips)
        return model

    def test_accepts_and_says_what_it_did(self, case: LoweringCase) -> None:
        """``requires`` lets it pass, ``apply`` says it changed, ``ensures`` finds no fault."""
        lowering, model = lowering_for(self.format_name), case.model.clone()
        assert lowering.requires(model, case.layer) is None
        assert lowering.ensures(model, case.layer), "an untouched graph is no lowered one"
        assert lowering.apply(model, case.layer, case.clips).changed
        assert lowering.ensures(model, case.layer) is None

    def test_numbers_are_those_of_the_format(self, case: LoweringCase) -> None:
        """The runtime gives what the format's definition gives, but for single roundings."""
        got = run_graph(self.lowered(case), case.feeds)
        expected = case.outputs(self.reference(case))
        assert list(got) == [str(v.name) for v in case.model.graph.outputs]
        for name, wanted in expected.items():
            assert got[name].shape == wanted.shape and got[name].dtype == np.float32
            error = np.abs(got[name] - wanted)
            close = error <= 1e-5 * np.abs(wanted).max() + 1e-6
            assert close.mean() >= self.share(), f"{1 - close.mean():.2%} of {name} differ"
            assert error.max() <= self.step(case) + 1e-5 * np.abs(wanted).max()

    def share(self) -> float:
        """Return the share of outputs that no rounding may move."""
        return 0.98

    def test_a_graph_without_the_layer_stays_as_it_is(self, case: LoweringCase) -> None:
        """Nothing is changed where no node of the layer is, and that is said."""
        names = {str(node.name) for node in case.model.graph}
        other = ir.from_onnx_text(
            '<ir_version: 10, opset_import: ["" : 21]> g (float[n] a) => (float[n] b) '
            "{ b = Relu(a) }"
        )
        next(iter(other.graph)).name = "elsewhere"
        assert "elsewhere" not in names
        before = graph_text(other)
        change = lowering_for(self.format_name).apply(other, case.layer, case.clips)
        assert not change.changed and change.weight_bytes == 0
        assert graph_text(other) == before

    def test_bytes_told_are_bytes_stored(self, case: LoweringCase) -> None:
        """The bytes of the new initializers are those that the change tells."""
        model = case.model.clone()
        change = lowering_for(self.format_name).apply(model, case.layer, case.clips)
        old = set(case.model.graph.initializers)
        new = [v for name, v in model.graph.initializers.items() if name not in old]
        stored = sum(v.const_value.nbytes for v in new if v.const_value is not None)
        assert change.weight_bytes == stored
        assert all(v.uses() for v in new), "a new constant is read by nothing"

    def test_other_nodes_are_untouched(self, case: LoweringCase) -> None:
        """Nodes of no concern keep name, operator, attributes, order and what they read."""
        model, own = self.lowered(case), set(case.layer.nodes)
        before = [n for n in case.model.graph if n.name not in own]
        names = {n.name for n in before}
        after = [n for n in model.graph if n.name in names]
        passages = {str(n.name) for n in before} - {str(n.name) for n in after}
        assert all(_feeds_weight(case, name) for name in passages)
        kept = [n for n in before if n.name not in passages]
        moved = {use.output for use in case.layer.occurrences}
        for old, new in zip(kept, after, strict=True):
            assert (old.name, old.op_type, old.domain) == (new.name, new.op_type, new.domain)
            assert list(old.attributes) == list(new.attributes)
            for left, right in zip(old.inputs, new.inputs, strict=True):
                same = (left and left.name) == (right and right.name)
                assert same or (left is not None and left.name in moved)

    def test_is_deterministic_and_leaves_the_original_alone(self, case: LoweringCase) -> None:
        """Two copies lowered apart are the same bytes; the graph they came from is unchanged."""
        before = graph_text(case.model)
        assert graph_text(self.lowered(case)) == graph_text(self.lowered(case))
        assert graph_text(case.model) == before

    def test_new_nodes_name_their_layer(self, case: LoweringCase) -> None:
        """New nodes, tensors and constants start with the layer's name; nodes carry it too."""
        old = {str(n.name) for n in case.model.graph}
        kept = {str(v.name) for v in case.model.graph.outputs}
        model = self.lowered(case)
        made = [n for n in model.graph if n.name not in old]
        assert made
        for node in made:
            assert node.metadata_props[LAYER_KEY] == case.layer.name
            tensors = [str(v.name) for v in node.outputs if v.name not in kept]
            assert all(n.startswith(f"{case.layer.name}/") for n in (str(node.name), *tensors))
        new = set(model.graph.initializers) - set(case.model.graph.initializers)
        assert all(name.startswith(f"{case.layer.name}/") for name in new)


def _feeds_weight(case: LoweringCase, name: str) -> bool:
    """Whether a node lies between the weight's initializer and the layer."""
    node = next(n for n in case.model.graph if n.name == name)
    return all(v is None or v.const_value is not None or v.producer() for v in node.inputs)
