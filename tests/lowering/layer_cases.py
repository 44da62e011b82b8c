"""Linear and embedding layers in every form that a graph can write them, with NumPy beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from qbench.graph.layers import find_layers
from qbench.records import Kind
from qbench.testing.graphs import Sketch
from qbench.testing.lowerings import LoweringCase

F = ir.DataType.FLOAT


def relu(x):
    return np.maximum(x, 0)


def finish(model, kind, feeds, weight, bias, outputs, apart=True, clip=2.5) -> LoweringCase:
    layers = [layer for layer in find_layers(model).layers if layer.kind is kind]
    assert len(layers) == 1, [layer.name for layer in layers]
    return LoweringCase(model, layers[0], feeds, weight, bias, clip, outputs, apart)


def feed(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def matrix(k, n, seed=2):
    return np.random.default_rng(seed).normal(scale=k**-0.5, size=(k, n)).astype(np.float32)


def right(
    k=32, n=24, rank=3, bias=True, weight=None, direct=False, shown=False, fixed=False
) -> LoweringCase:
    """``x @ W (+ b)`` of an activation of any rank."""
    s, w = Sketch(0), matrix(k, n) if weight is None else weight
    b = feed(w.shape[1], seed=3) if bias else None
    shape = {1: (k,), 2: ("a", k), 3: ("a", "b", k), 4: ("a", 2, "b", k)}[rank]
    shape = {2: (5, k), 3: (2, 3, k), 4: (2, 2, 3, k)}[rank] if fixed else shape
    x = s.input("x", F, shape)
    y = s.op("MatMul", s.op("Relu", x), s.constant("w", w), at="m.lin")
    if b is not None:
        y = s.op("Add", s.constant("b", b), y, at="m.lin")
    value = feed(*{1: (k,), 2: (5, k), 3: (2, 3, k), 4: (2, 2, 3, k)}[rank])
    if direct:
        return finish(
            s.model(y=y), Kind.LINEAR, {"x": value}, w, b, lambda f: {"y": f(relu(value))}
        )
    after = s.op("Tanh", y)
    outs = {"z": after} | ({"y": y} if shown else {})

    def outputs(f):
        made = f(relu(value))
        return {"z": np.tanh(made)} | ({"y": made} if shown else {})

    return finish(s.model(**outs), Kind.LINEAR, {"x": value}, w, b, outputs)


def held() -> LoweringCase:
    """``x @ W`` where W is the attribute of a Constant node."""
    case = right()
    graph = case.model.graph
    for name in ("w", "b"):
        value = graph.initializers.pop(name)
        node = ir.Node(
            "",
            "Constant",
            [],
            [ir.AttrTensor("value", value.const_value)],
            outputs=[ir.Value(name=name, shape=value.shape, type=value.type)],
            name=f"holds_{name}",
        )
        graph.insert_before(graph[0], node)
        ir.convenience.replace_all_uses_with(value, node.outputs[0])
    layer = next(x for x in find_layers(case.model).layers if x.kind is Kind.LINEAR)
    return replace(case, layer=layer)


def written_in(opset: int) -> LoweringCase:
    """``x @ W + b`` in another opset."""
    case = right()
    case.model.graph.opset_imports[""] = opset
    return case


def left(rank=3, bias=False) -> LoweringCase:
    """``W x``: the constant on the left, the channel on the last but one axis."""
    s, w = Sketch(0), matrix(32, 24)
    x = s.input("x", F, (32, "l") if rank == 2 else ("a", 32, "l"))
    y = s.op("MatMul", s.constant("w", np.ascontiguousarray(w.T)), s.op("Relu", x), at="m.lin")
    b = feed(24, seed=3) if bias else None
    if b is not None:
        y = s.op("Add", y, s.constant("b", b[:, None]), at="m.lin")
    value = feed(32, 5) if rank == 2 else feed(2, 32, 5)

    def outputs(f):
        return {"z": np.tanh(f(relu(value).swapaxes(-1, -2)).swapaxes(-1, -2))}

    return finish(s.model(z=s.op("Tanh", y)), Kind.LINEAR, {"x": value}, w, b, outputs)


def vector() -> LoweringCase:
    """``W x`` of a vector."""
    s, w = Sketch(0), matrix(32, 24)
    x = s.input("x", F, (32,))
    y = s.op("MatMul", s.constant("w", np.ascontiguousarray(w.T)), s.op("Relu", x), at="m.lin")
    value = feed(32)
    return finish(
        s.model(z=s.op("Tanh", y)),
        Kind.LINEAR,
        {"x": value},
        w,
        None,
        lambda f: {"z": np.tanh(f(relu(value)))},
    )


def through(*steps: str) -> LoweringCase:
    """``x @ W`` where W comes through a Transpose, a Cast from half, a Reshape."""
    s, w = Sketch(0), matrix(32, 24).astype(np.float16).astype(np.float32)
    stored = w
    if "Transpose" in steps:
        stored = np.ascontiguousarray(stored.T)
    if "Cast" in steps:
        stored = stored.astype(np.float16)
    if "Reshape" in steps:
        stored = stored.reshape(2, -1)
    value = s.constant("w", stored)
    shape = (24, 32) if "Transpose" in steps else (32, 24)
    if "Reshape" in steps:
        value = s.op("Reshape", value, s.ints(*shape))
    if "Cast" in steps:
        value = s.op("Cast", value, to=F)
    if "Transpose" in steps:
        value = s.op("Transpose", value, perm=[1, 0])
    x = s.input("x", F, ("a", "b", 32))
    given = feed(2, 3, 32)
    y = s.op("MatMul", s.op("Relu", x), value, at="m.lin")
    return finish(
        s.model(z=s.op("Tanh", y)),
        Kind.LINEAR,
        {"x": given},
        w,
        None,
        lambda f: {"z": np.tanh(f(relu(given)))},
    )


def gemm(bias=True, scalar=False, **attributes) -> LoweringCase:
    """Gemm with any of its attributes."""
    s, w = Sketch(0), matrix(32, 24)
    turned_a, turned_b = attributes.get("transA"), attributes.get("transB")
    x = s.input("x", F, (32, "a") if turned_a else ("a", 32))
    b = (np.float32([0.3]) if scalar else feed(24, seed=3)) if bias else None
    operands = [s.op("Relu", x), s.constant("w", np.ascontiguousarray(w.T) if turned_b else w)]
    if b is not None:
        operands.append(s.constant("b", b))
    y = s.op("Gemm", *operands, at="m.lin", **attributes)
    value = feed(32, 5) if turned_a else feed(5, 32)
    alpha, beta = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    whole = None if b is None else np.broadcast_to(b * np.float32(beta), (24,))

    def outputs(f):
        return {"z": np.tanh(f(relu(value.T if turned_a else value)))}

    return finish(
        s.model(z=s.op("Tanh", y)),
        Kind.LINEAR,
        {"x": value},
        w * np.float32(alpha),
        whole,
        outputs,
        apart=False,
    )


def shared() -> LoweringCase:
    """One weight used twice, as in ALBERT."""
    s, w = Sketch(0), matrix(32, 32)
    x = s.input("x", F, ("a", "b", 32))
    first = s.op("Tanh", s.op("MatMul", s.op("Relu", x), s.constant("w", w), at="m.lin"))
    y = s.op("MatMul", first, s.constant("w", w), at="m.lin")
    value = feed(2, 3, 32)
    return finish(
        s.model(z=s.op("Tanh", y)),
        Kind.LINEAR,
        {"x": value},
        w,
        None,
        lambda f: {"z": np.tanh(f(np.tanh(f(relu(value)))))},
    )


def with_zero_columns() -> LoweringCase:
    w = matrix(32, 24)
    w[:, 3] = 0
    w[:, 7] = 1e-44
    w[:16, 9] = 0
    return right(weight=w)


LINEAR: dict[str, Callable[[], LoweringCase]] = {
    "rank 1": lambda: right(rank=1),
    "rank 2": lambda: right(rank=2),
    "rank 3": lambda: right(),
    "rank 4": lambda: right(rank=4),
    "fixed shape, rank 2": lambda: right(rank=2, fixed=True),
    "fixed shape, rank 3": lambda: right(fixed=True),
    "fixed shape, rank 4": lambda: right(rank=4, fixed=True),
    "in Constant nodes": held,
    "opset 22": lambda: written_in(22),
    "opset 23": lambda: written_in(23),
    "no bias": lambda: right(bias=False),
    "left, rank 2": lambda: left(2),
    "left, rank 3": lambda: left(3),
    "left with bias": lambda: left(3, bias=True),
    "left, vector": vector,
    "through Transpose": lambda: through("Transpose"),
    "half weight": lambda: through("Cast"),
    "half weight, transposed": lambda: through("Cast", "Transpose"),
    "through Reshape": lambda: through("Reshape", "Transpose"),
    "Gemm": lambda: gemm(),
    "Gemm without bias": lambda: gemm(bias=False),
    "Gemm transB": lambda: gemm(transB=1),
    "Gemm transA": lambda: gemm(transA=1, transB=1),
    "Gemm alpha beta": lambda: gemm(alpha=0.5, beta=2.0, transB=1),
    "Gemm alpha": lambda: gemm(bias=False, alpha=0.25, transA=1),
    "Gemm scalar bias": lambda: gemm(scalar=True, beta=0.5),
    "shared weight": shared,
    "zero columns": with_zero_columns,
    "K 576": lambda: right(576, 8),
    "K 100": lambda: right(100, 8),
    "K 17": lambda: right(17, 5),
    "K 131": lambda: right(131, 3),
    "K 256": lambda: right(256, 16),
    "K 3, N 1": lambda: right(3, 1),
    "K 1, N 2": lambda: right(1, 2, bias=False),
    "gives the output": lambda: right(direct=True),
    "gives the output, rank 2": lambda: right(rank=2, direct=True),
    "output and more": lambda: right(shown=True),
}


def lookup(negative=True, half=False, twice=False) -> LoweringCase:
    """Rows of a table."""
    s, table = Sketch(0), matrix(50, 16)
    table[4] = 0
    if half:
        table = table.astype(np.float16).astype(np.float32)
    value = s.constant("t", table.astype(np.float16) if half else table)
    if half:
        value = s.op("Cast", value, to=F)
    ids = s.input("ids", ir.DataType.INT64, ("a", "b"))
    rows = s.op("Gather", value, ids, at="m.emb", axis=0)
    given = np.array([[0, 4, 49], [7, 4, -1 if negative else 2]])
    if twice:
        rows = s.op("Sub", rows, s.op("Gather", value, s.op("Neg", ids), at="m.emb", axis=0))

    def outputs(f):
        made = f(given) - f(-given) if twice else f(given)
        return {"z": np.tanh(made)}

    return finish(
        s.model(z=s.op("Tanh", rows)), Kind.EMBEDDING, {"ids": given}, table, None, outputs
    )


EMBEDDING: dict[str, Callable[[], LoweringCase]] = {
    "rows": lookup,
    "half table": lambda: lookup(half=True),
    "two lookups": lambda: lookup(twice=True),
}
