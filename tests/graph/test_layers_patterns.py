"""find_layers on single patterns, written as ONNX text."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir
import pytest

from qbench.graph.layers import find_layers
from qbench.records import Kind, Layer, Layers
from qbench.testing.graphs import Sketch

HEADER = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'


def parse(
    body: str, inputs: str = "float[B, S, 8] x", outputs: str = "y", weights: str = ""
) -> ir.Model:
    """Return a model; nodes are named n0, n1, … in order."""
    given = ", ".join(f"float[] {name}" if " " not in name else name for name in outputs.split(","))
    model = ir.from_onnx_text(f"{HEADER} g ({inputs}) => ({given}) <{weights}> {{ {body} }}")
    for index, node in enumerate(model.graph):
        node.name = f"n{index}"
    return model


def weight(name: str, *shape: int, dtype: type = np.float32) -> str:
    sizes = ",".join(map(str, shape))
    kind = {np.float32: "float", np.int8: "int8"}[dtype]
    numbers = ", ".join("1" for _ in range(int(np.prod(shape))))
    return f"{kind}[{sizes}] {name} = {{{numbers}}}"


def only(layers: Layers, kind: Kind) -> Layer:
    (layer,) = [layer for layer in layers.layers if layer.kind is kind]
    return layer


def reasons(layers: Layers) -> dict[str, str]:
    return {node.node: node.reason for node in layers.unlayered}


CONSTANTS = (
    "float two = {2}, float half = {0.5}, float one = {1}, float eps = {1e-5}, "
    "float minus_half = {-0.5}, float root2 = {1.41421356}, float inv_root2 = {0.70710678}, "
    "float quick = {1.702}, float c = {0.044715}, float three = {3}, float s = {0.79788456}, "
    "int64[1] last = {-1}, float[8] g = {1,2,3,4,5,6,7,8}, float[8] b = {1,2,3,4,5,6,7,8}"
)

NORMS = {
    "plain": """
        m = ReduceMean (x, last) d = Sub (x, m) q = Pow (d, two) v = ReduceMean (q, last)
        e = Add (v, eps) r = Sqrt (e) n = Div (d, r) h = Mul (n, g) y = Add (h, b)""",
    "self product, epsilon first, reciprocal": """
        m = ReduceMean (x, last) d = Sub (x, m) q = Mul (d, d) v = ReduceMean (q, last)
        e = Add (eps, v) r = Sqrt (e) i = Reciprocal (r) n = Mul (i, d) h = Mul (g, n)
        y = Add (b, h)""",
    "difference computed twice": """
        m = ReduceMean (x, last) d = Sub (x, m) q = Pow (d, two) v = ReduceMean (q, last)
        e = Add (v, eps) r = Sqrt (e) d2 = Sub (x, m) n = Div (d2, r) h = Mul (n, g)
        y = Add (h, b)""",
    "power of minus a half": """
        m = ReduceMean (x, last) d = Sub (x, m) q = Mul (d, d) v = ReduceMean (q, last)
        e = Add (v, eps) r = Pow (e, minus_half) n = Mul (d, r) h = Mul (n, g) y = Add (h, b)""",
    "folded into scale and shift": """
        m = ReduceMean (x, last) d = Sub (x, m) q = Mul (d, d) v = ReduceMean (q, last)
        e = Add (v, eps) r = Sqrt (e) i = Reciprocal (r) f = Mul (i, g) a = Mul (x, f)
        k = Mul (m, f) t = Sub (b, k) y = Add (a, t)""",
    "mean of squares less square of mean": """
        m = ReduceMean (x, last) q = Mul (x, x) p = ReduceMean (q, last) w = Mul (m, m)
        v = Sub (p, w) e = Add (v, eps) r = Sqrt (e) d = Sub (x, m) n = Div (d, r)
        h = Mul (n, g) y = Add (h, b)""",
}


@pytest.mark.parametrize("name", NORMS)
def test_layer_norm_written_out(name):
    layers = find_layers(parse(NORMS[name], weights=CONSTANTS))
    layer = only(layers, Kind.LAYERNORM)
    use = layer.occurrences[0]
    assert not layers.unlayered
    assert use.op == "LayerNormalization"
    assert use.inputs == ("x", "g", "b")
    assert use.output == "y"
    assert use.attributes["axis"] == -1
    assert use.attributes["epsilon"] == pytest.approx(1e-5)
    assert {edge.tensor for edge in use.edges} == {"x"}


RMS = {
    "reciprocal": "i = Reciprocal (r) n = Mul (x, i) y = Mul (g, n)",
    "division": "n = Div (x, r) y = Mul (n, g)",
    "one over": "i = Div (one, r) n = Mul (i, x) y = Mul (n, g)",
    "cast": "i = Reciprocal (r) n = Mul (x, i) k = Cast <to: int = 1> (n) y = Mul (g, k)",
}


@pytest.mark.parametrize("name", RMS)
def test_rms_norm_written_out(name):
    body = "q = Pow (x, two) v = ReduceMean (q, last) e = Add (v, eps) r = Sqrt (e) " + RMS[name]
    layers = find_layers(parse(body, weights=CONSTANTS))
    use = only(layers, Kind.LAYERNORM).occurrences[0]
    assert not layers.unlayered
    assert (use.op, use.inputs) == ("RMSNormalization", ("x", "g", ""))
    assert len(use.edges) == 2


def test_a_norm_whose_inside_is_read_elsewhere_is_none():
    body = NORMS["plain"] + " z = Relu (v)"
    layers = find_layers(parse(body, outputs="y,z", weights=CONSTANTS))
    assert not [layer for layer in layers.layers if layer.kind is Kind.LAYERNORM]


GELUS = {
    "pytorch": "a = Div (x, root2) e = Erf (a) p = Add (e, one) m = Mul (x, p) y = Mul (m, half)",
    "half first": "h = Mul (half, x) a = Mul (x, inv_root2) e = Erf (a) p = Add (one, e) "
    "y = Mul (h, p)",
    "half on the sum": "a = Mul (inv_root2, x) e = Erf (a) p = Add (e, one) h = Mul (p, half) "
    "y = Mul (h, x)",
    "divided by two": "a = Div (x, root2) e = Erf (a) p = Add (e, one) m = Mul (x, p) "
    "y = Div (m, two)",
    "spread out": "a = Div (x, root2) e = Erf (a) u = Mul (x, e) p = Add (u, x) y = Mul (p, half)",
}


@pytest.mark.parametrize("name", GELUS)
def test_gelu_written_out(name):
    layers = find_layers(parse(GELUS[name], weights=CONSTANTS))
    use = only(layers, Kind.ACTIVATION).occurrences[0]
    assert not layers.unlayered
    assert (use.op, use.inputs, use.output) == ("Gelu", ("x",), "y")
    assert use.attributes == {"approximate": "none"}


@pytest.mark.parametrize("swaps", list(itertools.product((False, True), repeat=4)))
def test_tanh_gelu_in_any_order_of_operands(swaps):
    first, second, third, fourth = (
        f"({b}, {a})" if swap else f"({a}, {b})"
        for swap, (a, b) in zip(
            swaps, (("q", "c"), ("x", "k"), ("t", "one"), ("h", "p")), strict=True
        )
    )
    body = (
        f"q = Pow (x, three) k = Mul {first} w = Add {second} a = Mul (w, s) t = Tanh (a) "
        f"p = Add {third} h = Mul (x, half) y = Mul {fourth}"
    )
    layers = find_layers(parse(body, weights=CONSTANTS))
    use = only(layers, Kind.ACTIVATION).occurrences[0]
    assert not layers.unlayered
    assert use.attributes == {"approximate": "tanh"}


def test_gelu_with_a_wrong_constant_is_no_gelu():
    layers = find_layers(parse(GELUS["pytorch"].replace("root2", "two"), weights=CONSTANTS))
    assert not layers.layers


@pytest.mark.parametrize(
    ("body", "op"),
    [
        ("e = Sigmoid (x) y = Mul (x, e)", "Swish"),
        ("a = Mul (x, quick) e = Sigmoid (a) y = Mul (e, x)", "Swish"),
        ("a = Softplus (x) e = Tanh (a) y = Mul (x, e)", "Mish"),
        ("y = Relu (x)", "Relu"),
        ("y = Tanh (x)", "Tanh"),
        ("y = Elu (x)", "Elu"),
        ("y = com.microsoft.FastGelu (x)", "FastGelu"),
        ("y = com.microsoft.BiasGelu (x, g)", "BiasGelu"),
    ],
)
def test_other_activations(body, op):
    layers = find_layers(parse(body, weights=CONSTANTS))
    assert only(layers, Kind.ACTIVATION).occurrences[0].op == op
    assert not layers.unlayered


def test_a_gate_of_another_branch_is_a_plain_sigmoid():
    layers = find_layers(
        parse("e = Sigmoid (z) y = Mul (x, e)", "float[B, 8] x, float[B, 8] z", weights=CONSTANTS)
    )
    assert only(layers, Kind.ACTIVATION).occurrences[0].op == "Sigmoid"
    assert reasons(layers) == {"n1": "product of two branches"}


@pytest.mark.parametrize(
    "body",
    [
        "m = ReduceMax (x, last) d = Sub (x, m) e = Exp (d) t = ReduceSum (e, last) y = Div (e, t)",
        "e = Exp (x) t = ReduceSum (e, last) i = Reciprocal (t) y = Mul (i, e)",
    ],
)
def test_softmax_written_out(body):
    layers = find_layers(parse(body, weights=CONSTANTS))
    use = only(layers, Kind.SOFTMAX).occurrences[0]
    assert not layers.unlayered
    assert (use.op, use.inputs, use.output) == ("Softmax", ("x",), "y")
    assert use.attributes == {"axis": -1}


W, BIAS = weight("w", 8, 4), weight("k", 4)


@pytest.mark.parametrize(
    ("body", "weights", "inputs", "attributes"),
    [
        ("t = MatMul (x, w) y = Add (t, k)", [W, BIAS], ("x", "w", "k"), {"weight_side": "right"}),
        ("t = MatMul (x, w) y = Add (k, t)", [W, BIAS], ("x", "w", "k"), {"weight_side": "right"}),
        ("y = MatMul (x, w)", [W], ("x", "w", ""), {"weight_side": "right"}),
        ("y = MatMul (w, x)", [weight("w", 4, 8)], ("x", "w", ""), {"weight_side": "left"}),
        (
            "v = Transpose <perm = [1, 0]> (w) y = MatMul (x, v)",
            [weight("w", 4, 8)],
            ("x", "w", ""),
            {"weight_side": "right", "weight_transposed": 1},
        ),
        (
            "y = com.microsoft.FusedMatMul <transB: int = 1> (x, w)",
            [weight("w", 4, 8)],
            ("x", "w", ""),
            {"weight_side": "right", "transB": 1},
        ),
    ],
)
def test_linear_as_a_product(body, weights, inputs, attributes):
    use = only(find_layers(parse(body, weights=", ".join(weights))), Kind.LINEAR).occurrences[0]
    assert use.inputs == inputs
    assert use.output == "y"
    assert use.attributes == attributes
    assert [edge.tensor for edge in use.edges] == ["x"]


def test_linear_as_gemm():
    model = parse(
        "y = Gemm <transB: int = 1> (x, w, k)",
        "float[B, 8] x",
        weights=f"{weight('w', 4, 8)}, {BIAS}",
    )
    layer = only(find_layers(model), Kind.LINEAR)
    use = layer.occurrences[0]
    assert use.inputs == ("x", "w", "k")
    assert (use.attributes["transB"], use.attributes["alpha"]) == (1, 1.0)
    assert layer.parameters == 36


def test_a_constant_that_is_no_bias_stays_out():
    model = parse("t = MatMul (x, w) y = Add (t, k)", weights=f"{W}, {weight('k', 3, 4)}")
    layers = find_layers(model)
    assert only(layers, Kind.LINEAR).nodes == ("n0",)
    assert reasons(layers) == {"n1": "addition of a constant"}


def test_weights_in_constant_nodes():
    numbers = ", ".join("1" for _ in range(32))
    body = f"w = Constant <value: tensor = float[8,4] {{{numbers}}}> () y = MatMul (x, w)"
    layers = find_layers(parse(body))
    assert only(layers, Kind.LINEAR).weight == "w"
    assert reasons(layers) == {"n0": "constant"}


def test_a_quantized_weight_is_said_to_be_one():
    body = "f = DequantizeLinear (w, s) y = MatMul (x, f)"
    model = parse(body, weights=f"{weight('w', 8, 4, dtype=np.int8)}, float s = {{0.1}}")
    layers = find_layers(model)
    assert not layers.layers
    assert set(reasons(layers).values()) == {"already quantized"}


def test_convolutions_and_their_bias():
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 3, 8, 8))
    y = s.op("Conv", x, s.weight("a.weight", 4, 3, 1, 1), at="a")
    y = s.op("Add", y, s.weight("a.bias", 4, 1, 1), at="a")
    y = s.op("ConvTranspose", y, s.weight("b.weight", 4, 2, 1, 1), at="b", strides=[2, 2])
    first, second = find_layers(s.model(y=y)).layers
    assert (first.name, second.name) == ("a", "b")
    assert first.occurrences[0].inputs[2] == "a.bias"
    assert second.occurrences[0].attributes["strides"] == "2,2"


def test_a_rotary_table_is_no_embedding():
    s = Sketch(0)
    ids = s.input("ids", ir.DataType.INT64, ("batch", "sequence"))
    x = s.input("x", ir.DataType.FLOAT, ("batch", "sequence", 4))
    rows = s.op("Gather", s.weight("cos", 16, 4), ids, axis=0)
    layers = find_layers(s.model(y=s.op("Mul", x, rows)))
    assert not layers.layers
    assert set(reasons(layers).values()) == {"rotary position arithmetic"}


def stream(*branches: str) -> Layers:
    """Layers of x + f(x) + …, where x is a linear's output and each branch is a linear of it."""
    s = Sketch(0)
    x = s.linear(s.input("x", ir.DataType.FLOAT, ("batch", 8)), "inward", 8, 8)
    made = [s.linear(x, name, 8, 8) for name in branches]
    y = x
    for branch in made:
        y = s.op("Add", y, branch)
    return find_layers(s.model(y=y))


def test_parallel_branches_added_one_by_one_are_residual():
    layers = stream("attention", "mlp").layers
    assert [layer.kind for layer in layers].count(Kind.RESIDUAL_ADD) == 2


def test_a_sum_of_branches_is_no_residual_and_what_adds_it_is():
    s = Sketch(0)
    x = s.linear(s.input("x", ir.DataType.FLOAT, ("batch", 8)), "inward", 8, 8)
    both = s.op("Add", s.linear(x, "attention", 8, 8), s.linear(x, "mlp", 8, 8))
    layers = find_layers(s.model(y=s.op("Add", both, x)))
    assert [layer.kind for layer in layers.layers].count(Kind.RESIDUAL_ADD) == 1
    assert reasons(layers) == {"/Add": "sum of parallel branches"}


def test_a_residual_through_a_scale_and_a_reshape():
    s = Sketch(0)
    x = s.linear(s.input("x", ir.DataType.FLOAT, ("batch", 8)), "inward", 8, 8)
    y = s.linear(x, "out", 8, 8)
    scaled = s.op("Mul", s.op("Reshape", x, s.ints(-1, 8)), s.number(2.0))
    layers = find_layers(s.model(y=s.op("Add", scaled, y)))
    assert [layer.kind for layer in layers.layers].count(Kind.RESIDUAL_ADD) == 1


def attention(scale: str) -> ir.Model:
    """One head; the scale is on the scores, or its root on Q and on K before or after turning."""
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", "sequence", 8))
    q, k, v = (s.linear(x, part, 8, 8) for part in "qkv")
    turned = s.op("Transpose", k, perm=[0, 2, 1])
    if scale == "after":
        turned = s.op("Mul", turned, s.number(0.5))
    if scale == "before":
        turned = s.op("Transpose", s.op("Mul", k, s.number(0.5)), perm=[0, 2, 1])
    raw = s.op("MatMul", q if scale == "scores" else s.op("Mul", q, s.number(0.5)), turned)
    if scale == "scores":
        raw = s.op("Mul", raw, s.number(0.25))
    weights = s.op("Softmax", raw, axis=-1)
    clean = s.op("Where", s.op("IsNaN", weights), s.number(0.0), weights)
    return s.model(y=s.op("MatMul", clean, v))


@pytest.mark.parametrize("scale", ["scores", "after", "before"])
def test_k_is_found_behind_scale_and_transposition(scale):
    layers = find_layers(attention(scale)).layers
    k, v = (layer for layer in layers if layer.kind is Kind.KV)
    linears = {layer.name: layer.occurrences[0].output for layer in layers}
    assert k.occurrences[0].output == linears["k"]
    assert v.occurrences[0].output == linears["v"]
    context = next(layer for layer in layers if layer.kind is Kind.ATTENTION_CONTEXT)
    assert context.edges[0].index == 0


def test_a_product_outside_attention_is_none():
    inputs = "float[B, 8] a, float[8, C] b"
    assert reasons(find_layers(parse("y = MatMul (a, b)", inputs))) == {
        "n0": "product of two activations outside attention"
    }


def test_a_softmax_over_classes_is_no_attention():
    layers = find_layers(parse("t = MatMul (x, w) y = Softmax (t)", weights=W)).layers
    assert [layer.kind for layer in layers] == [Kind.LINEAR, Kind.SOFTMAX]


def test_fused_operators():
    body = (
        "h = com.microsoft.SkipLayerNormalization (x, z, g, b) "
        "y = com.microsoft.MultiHeadAttention <num_heads: int = 2> (h, x, z)"
    )
    model = parse(body, "float[B, S, 8] x, float[B, S, 8] z", weights=CONSTANTS)
    layers = find_layers(model)
    norm = only(layers, Kind.LAYERNORM)
    assert norm.occurrences[0].op == "SkipLayerNormalization"
    assert (norm.weight, len(norm.edges)) == ("g", 2)
    assert [layer.edges[0].tensor for layer in layers.layers if layer.kind is Kind.KV] == ["x", "z"]
    assert "fused attention" in reasons(layers)["n1"]


def test_control_flow_is_said_and_listed():
    body = """
        c = ReduceSum <keepdims: int = 0> (x)
        p = Cast <to: int = 9> (c)
        y = If (p) <then_branch = a () => (float[B, S, 8] u) { u = Relu (x) },
                    else_branch = o () => (float[B, S, 8] v) { v = Identity (x) }>
    """
    layers = find_layers(parse(body))
    said = [node.reason for node in layers.unlayered]
    assert "control flow: its body is not analysed" in said
    assert said.count("inside a control-flow body: not analysed") == 2
