"""Graphs whose data flow has no neat waist: the cuts of replay must be right on them too."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qbench.testing.graphs import Sketch

F = ir.DataType.FLOAT


def shared_blocks() -> tuple[ir.Model, str]:
    """Four uses of one block, as in ALBERT; the first tensor skips over all of them."""
    s = Sketch(0)
    x = s.input("x", F, ("batch", "sequence", 16))
    start = h = s.linear(x, "embed", 16, 16)
    weights = [s.weight("block.up.weight", 16, 32), s.weight("block.down.weight", 32, 16)]
    for _ in range(4):
        y = s.op("Gelu", s.op("MatMul", h, weights[0], at="block.up"), at="block.act")
        y = s.op("MatMul", y, weights[1], at="block.down")
        h = s.layer_norm(s.op("Add", y, h, at="block"), "block.norm", 16)
    h = s.op("Add", h, start, at="skip")
    return s.model(y=s.linear(h, "head", 16, 4)), "y"


def never_narrow() -> tuple[ir.Model, str]:
    """Every block reads the outputs of all blocks before it, as in a dense net."""
    s = Sketch(1)
    x = s.input("x", F, ("batch", "sequence", 16))
    kept = [x]
    for index in range(4):
        wide = s.op("Concat", *kept, at=f"dense.{index}", axis=-1)
        y = s.linear(wide, f"dense.{index}.lin", 16 * len(kept), 16)
        kept.append(s.op("Tanh", y, at=f"dense.{index}.act"))
    return s.model(y=s.op("Concat", *kept, axis=-1)), "y"


def diamond() -> tuple[ir.Model, str]:
    """Two inputs, two branches that meet, and an output given long before the end."""
    s = Sketch(2)
    x = s.input("x", F, ("batch", "sequence", 16))
    z = s.input("z", F, ("batch", "sequence", 16))
    left = s.linear(s.op("Relu", s.linear(x, "left.one", 16, 32), at="left"), "left.two", 32, 16)
    early = s.op("Tanh", left, at="early")
    right = s.linear(
        s.op("Gelu", s.linear(z, "right.one", 16, 32), at="right"), "right.two", 32, 16
    )
    h = s.layer_norm(s.op("Add", left, right, at="meet"), "meet.norm", 16)
    h = s.op("Mul", h, s.op("Sigmoid", s.linear(z, "gate", 16, 16), at="gate.act"), at="gate")
    y = s.linear(s.op("Add", h, x, at="last"), "head", 16, 4)
    return s.model(early=early, y=y, raw=s.op("Neg", h)), "y"


def early_output() -> tuple[ir.Model, str]:
    """The diamond, where the output that is scored is the early one."""
    return diamond()[0], "early"


def bypass() -> tuple[ir.Model, str]:
    """What a layer gives skips a stage that may swallow the change: a clipped branch."""
    s = Sketch(3)
    x = s.input("x", F, ("batch", "sequence", 16))
    h = s.linear(x, "first", 16, 16)
    dead = s.op("Relu", s.op("Sub", s.op("Tanh", h, at="a"), s.number(2.0)), at="dead")
    for index in range(3):
        dead = s.op("Relu", s.linear(dead, f"dead.{index}", 16, 16, bias=False), at=f"dead.{index}")
    y = s.linear(s.op("Add", dead, h, at="join"), "head", 16, 4)
    return s.model(y=y, first=h), "y"


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
