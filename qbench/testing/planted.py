"""Planted models: layers that are harmless alone and break together, or that all break."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from qbench.testing.models import WORDS, word_tokenizer
from qbench.testing.sketch import Sketch

_HIDDEN = 32
_SPECIAL = 5


def planted_folder(
    folder: Path, *, every: bool = False, layers: int = 4, gain: float = 3e6
) -> Path:
    """Write a small embedder as ``model.onnx`` with its tokenizer, and return the folder.

    The embedding is the mean of word vectors, refined by ``dense.0`` …, each of which adds a
    little. Beside them ``gate.a`` and ``gate.b`` are computed twice, in two ways that agree but for
    rounding; the product of the two differences, times a large number, is added. Each gate may
    be lowered alone, since the other's difference is zero; both together drown the answer. With
    ``every``, the square of the difference of each dense layer is added instead, so that there is
    no layer that may be lowered.

    Layers named ``copy.*`` are the second ways: leave them out of the sweep.

    Args:
        folder: Where it goes.
        every: Whether each layer breaks alone.
        layers: Number of dense layers.
        gain: How much the differences are blown up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    word_tokenizer(folder)
    s = Sketch(0)
    h = _pooled(s)
    wrong: list[ir.Value] = []
    for index in range(layers):
        y, difference = _twice(s, h, f"dense.{index}")
        if every:
            wrong.append(s.op("Mul", difference, difference))
        h = s.op("Add", h, s.op("Mul", y, s.number(0.1)))
    if not every:
        first, second = (_twice(s, h, f"gate.{name}") for name in "ab")
        h = s.op("Add", h, s.op("Mul", s.op("Add", first[0], second[0]), s.number(0.01)))
        wrong.append(s.op("Mul", first[1], second[1]))
    for difference in wrong:
        h = s.op("Add", h, s.op("Mul", difference, s.number(gain)))
    ir.save(s.model(embedding=h), folder / "model.onnx")
    return folder


def _pooled(s: Sketch) -> ir.Value:
    """Return the mean of the word vectors over unmasked tokens, shape [batch, 32]."""
    ids = s.input("input_ids", ir.DataType.INT64, ("batch", "sequence"))
    mask = s.input("attention_mask", ir.DataType.INT64, ("batch", "sequence"))
    table = s.weight("words.weight", _SPECIAL + len(WORDS), _HIDDEN, scale=1.0)
    x = s.op("Gather", table, ids, at="words", axis=0)
    keep = s.op("Cast", s.op("Unsqueeze", mask, s.ints(-1)), to=ir.DataType.FLOAT)
    total = s.op("ReduceSum", s.op("Mul", x, keep), s.ints(1), keepdims=0)
    return s.op("Div", total, s.op("ReduceSum", keep, s.ints(1), keepdims=0))


def _twice(s: Sketch, x: ir.Value, at: str) -> tuple[ir.Value, ir.Value]:
    """Return ``x·W`` and its difference from the sum of two half products, shape [batch, 32]."""
    whole = s.linear(x, at, _HIDDEN, _HIDDEN, bias=False)
    product = whole.producer()
    assert product is not None and product.inputs[1] is not None
    stored = product.inputs[1].const_value
    assert stored is not None
    weight, half, parts = stored.numpy(), _HIDDEN // 2, []
    for name, (start, stop) in {"low": (0, half), "high": (half, _HIDDEN)}.items():
        own = s.op("Slice", x, s.ints(start), s.ints(stop), s.ints(1))
        matrix = s.constant(f"copy.{at}.{name}.weight", weight[start:stop].copy())
        parts.append(s.op("MatMul", own, matrix, at=f"copy.{at}.{name}"))
    return whole, s.op("Sub", whole, s.op("Add", *parts))
