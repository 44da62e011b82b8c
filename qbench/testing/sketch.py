"""A short way to write small ONNX graphs with seeded random weights, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import CheckerPass, RemoveUnusedNodesPass, ShapeInferencePass

Shape = Sequence[int | str | None]


class Sketch:
    """A graph in the making.

    Node names follow the form ``/module/path/Op`` and weights the form ``module.path.weight``.

    Attributes:
        opset: Version of the default operator set.
    """

    def __init__(self, seed: int, opset: int = 21) -> None:
        """Start an empty graph whose random weights follow from ``seed``."""
        self.opset = opset
        self._random = np.random.default_rng(seed)
        self._graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="tiny")
        self._taken: dict[str, int] = {}

    def input(self, name: str, dtype: ir.DataType, shape: Shape) -> ir.Value:
        """Add a graph input and return it."""
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self._graph.inputs.append(value)
        return value

    def weight(
        self, name: str, *shape: int, mean: float = 0.0, scale: float | None = None
    ) -> ir.Value:
        """Add a float32 initializer of normal numbers; by default of scale 1/√(first axis)."""
        spread = 1 / np.sqrt(shape[0]) if scale is None else scale
        array = self._random.normal(mean, spread, size=shape).astype(np.float32)
        return self.constant(name, array)

    def constant(self, name: str, array: Any) -> ir.Value:
        """Add an initializer, or return the one that already has this name."""
        if name in self._graph.initializers:
            return self._graph.initializers[name]
        tensor = ir.tensor(np.asarray(array), name=name)
        value = ir.val(
            name, dtype=tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
        )
        self._graph.register_initializer(value)
        return value

    def ints(self, *numbers: int) -> ir.Value:
        """Return an int64 vector constant."""
        return self.constant("ints_" + "_".join(map(str, numbers)), np.array(numbers, np.int64))

    def number(self, value: float) -> ir.Value:
        """Return a float32 scalar constant."""
        return self.constant(f"number_{value!r}", np.float32(value))

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        at: str = "",
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Add a node and return its first output.

        Args:
            op_type: Operator.
            *inputs: What it reads; ``None`` for an absent optional input.
            at: Dotted module path that the node belongs to.
            domain: Operator set of the operator.
            **attributes: Attributes of the operator.
        """
        path = "".join(f"/{part}" for part in _scopes(at))
        name = self._free(f"{path}/{op_type}")
        node = ir.Node(
            domain,
            op_type,
            inputs,
            ir.convenience.convert_attributes(attributes),
            outputs=[ir.Value(name=f"{name}_output_0")],
            name=name,
        )
        self._graph.append(node)
        if domain:
            self._graph.opset_imports.setdefault(domain, 1)
        return node.outputs[0]

    def linear(
        self, x: ir.Value, at: str, inputs: int, outputs: int, bias: bool = True
    ) -> ir.Value:
        """Add a MatMul by a weight [inputs, outputs] and, if asked, an Add of a bias."""
        y = self.op("MatMul", x, self.weight(f"{at}.weight", inputs, outputs), at=at)
        if not bias:
            return y
        return self.op("Add", y, self.weight(f"{at}.bias", outputs, scale=0.1), at=at)

    def layer_norm(self, x: ir.Value, at: str, size: int, epsilon: float = 1e-5) -> ir.Value:
        """Add a LayerNormalization over the last axis."""
        gamma = self.weight(f"{at}.weight", size, mean=1.0, scale=0.1)
        beta = self.weight(f"{at}.bias", size, scale=0.1)
        return self.op("LayerNormalization", x, gamma, beta, at=at, axis=-1, epsilon=epsilon)

    def model(self, **outputs: ir.Value) -> ir.Model:
        """Return the checked model whose graph outputs are ``outputs``, under those names."""
        for name, value in outputs.items():
            value.name = name
            self._graph.outputs.append(value)
        model = ir.Model(self._graph, ir_version=10)
        ShapeInferencePass()(model)
        RemoveUnusedNodesPass()(model)
        if set(self._graph.opset_imports) == {""}:
            CheckerPass()(model)
        return model

    def _free(self, name: str) -> str:
        count = self._taken.get(name, 0)
        self._taken[name] = count + 1
        return f"{name}_{count}" if count else name


def _scopes(path: str) -> list[str]:
    """Split a module path where a name follows, not where an index follows: ``layer.0`` is one."""
    scopes: list[str] = []
    for part in path.split(".") if path else []:
        if part.isdigit() and scopes:
            scopes[-1] += f".{part}"
        else:
            scopes.append(part)
    return scopes
