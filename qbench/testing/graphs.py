"""Tiny models as ONNX graphs, built without torch: an encoder, a decoder, a convolutional net."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qbench.testing.rewrites import anonymise, decompose
from qbench.testing.sketch import Sketch

__all__ = [
    "Sketch",
    "anonymise",
    "decompose",
    "encoder_on",
    "tiny_convnet",
    "tiny_decoder",
    "tiny_encoder",
]

_LOWEST = float(np.finfo(np.float32).min)


def tiny_encoder(
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    vocabulary: int = 100,
    pooled: bool = True,
) -> ir.Model:
    """Return an encoder in the manner of BERT.

    Inputs are ``input_ids`` and ``attention_mask``, int64 [batch, sequence]; at most 64 tokens.
    The output is ``embedding`` [batch, hidden], the normalised mean over unmasked tokens, or
    with ``pooled=False`` ``hidden_states`` [batch, sequence, hidden].

    Args:
        seed: Seed of the weights.
        layers: Encoder blocks.
        hidden: Width; a multiple of ``heads``. The feed-forward is four times as wide.
        heads: Attention heads.
        vocabulary: Rows of the word table.
        pooled: Whether to pool and normalise.
    """
    return encoder_on(Sketch(seed), layers, (hidden, heads), vocabulary, pooled)


def encoder_on(
    s: Sketch, layers: int, widths: tuple[int, int], vocabulary: int, pooled: bool = True
) -> ir.Model:
    """Return ``tiny_encoder`` on a sketch of one's own, of any size.

    Args:
        s: An empty sketch, which makes the weights.
        layers: Encoder blocks.
        widths: Width of the hidden states, and attention heads.
        vocabulary: Rows of the word table.
        pooled: Whether to pool and normalise.
    """
    ids = s.input("input_ids", ir.DataType.INT64, ("batch", "sequence"))
    mask = s.input("attention_mask", ir.DataType.INT64, ("batch", "sequence"))
    x = _embed(s, ids, vocabulary, widths[0])
    bias = _mask_bias(s, mask)
    for index in range(layers):
        x = _encoder_block(s, x, bias, f"encoder.layer.{index}", widths)
    if not pooled:
        return s.model(hidden_states=x)
    return s.model(embedding=_pool(s, x, mask))


def _embed(s: Sketch, ids: ir.Value, vocabulary: int, hidden: int) -> ir.Value:
    at = "embeddings"
    words = s.weight(f"{at}.word_embeddings.weight", vocabulary, hidden, scale=0.5)
    places = s.weight(f"{at}.position_embeddings.weight", 64, hidden, scale=0.5)
    x = s.op("Gather", words, ids, at=f"{at}.word_embeddings", axis=0)
    every = s.constant(f"{at}.position_ids", np.arange(64, dtype=np.int64)[None])
    length = s.op("Shape", ids, at=at, start=1, end=2)
    used = s.op("Slice", every, s.ints(0), length, s.ints(1), s.ints(1), at=at)
    y = s.op("Gather", places, used, at=f"{at}.position_embeddings", axis=0)
    return s.layer_norm(s.op("Add", x, y, at=at), f"{at}.LayerNorm", hidden)


def _mask_bias(s: Sketch, mask: ir.Value) -> ir.Value:
    wide = s.op("Unsqueeze", mask, s.ints(1, 2))
    floats = s.op("Cast", wide, to=ir.DataType.FLOAT)
    return s.op("Mul", s.op("Sub", s.number(1.0), floats), s.number(_LOWEST))


def _split_heads(s: Sketch, x: ir.Value, at: str, heads: int, size: int) -> ir.Value:
    parts = s.op("Reshape", x, s.ints(0, 0, heads, size), at=at)
    return s.op("Transpose", parts, at=at, perm=[0, 2, 1, 3])


def _attend(
    s: Sketch, qkv: tuple[ir.Value, ir.Value, ir.Value], bias: ir.Value, at: str, size: int
) -> ir.Value:
    """Return softmax(QKᵀ/√size + bias)·V with heads joined: [batch, sequence, heads·size]."""
    q, k, v = qkv
    raw = s.op("MatMul", q, s.op("Transpose", k, at=at, perm=[0, 1, 3, 2]), at=at)
    scaled = s.op("Div", raw, s.number(float(np.sqrt(np.float32(size)))), at=at)
    weights = s.op("Softmax", s.op("Add", scaled, bias, at=at), at=at, axis=-1)
    mixed = s.op("Transpose", s.op("MatMul", weights, v, at=at), at=at, perm=[0, 2, 1, 3])
    return s.op("Reshape", mixed, s.ints(0, 0, -1), at=at)


def _encoder_block(
    s: Sketch, x: ir.Value, bias: ir.Value, at: str, widths: tuple[int, int]
) -> ir.Value:
    hidden, heads = widths
    inner, size = f"{at}.attention.self", hidden // heads
    q, k, v = (
        _split_heads(s, s.linear(x, f"{inner}.{part}", hidden, hidden), inner, heads, size)
        for part in ("query", "key", "value")
    )
    out = f"{at}.attention.output"
    y = s.linear(_attend(s, (q, k, v), bias, inner, size), f"{out}.dense", hidden, hidden)
    x = s.layer_norm(s.op("Add", y, x, at=out), f"{out}.LayerNorm", hidden)
    y = s.linear(x, f"{at}.intermediate.dense", hidden, 4 * hidden)
    y = s.op("Gelu", y, at=f"{at}.intermediate.intermediate_act_fn")
    y = s.linear(y, f"{at}.output.dense", 4 * hidden, hidden)
    return s.layer_norm(s.op("Add", y, x, at=f"{at}.output"), f"{at}.output.LayerNorm", hidden)


def _pool(s: Sketch, x: ir.Value, mask: ir.Value) -> ir.Value:
    keep = s.op("Cast", s.op("Unsqueeze", mask, s.ints(-1)), to=ir.DataType.FLOAT)
    total = s.op("ReduceSum", s.op("Mul", x, keep), s.ints(1), keepdims=0)
    count = s.op("Clip", s.op("ReduceSum", keep, s.ints(1), keepdims=0), s.number(1e-9))
    mean = s.op("Div", total, count)
    length = s.op("Clip", s.op("ReduceL2", mean, s.ints(-1), keepdims=1), s.number(1e-12))
    return s.op("Div", mean, length)


def tiny_decoder(
    seed: int = 0,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    past: bool = False,
    tied: bool = True,
) -> ir.Model:
    """Return a decoder in the manner of Llama, 32 wide, with a vocabulary of 100.

    Rotary positions, grouped queries, decomposed RMSNorm, gated SiLU, a causal mask. The input is
    ``input_ids`` int64 [batch, sequence]; with ``past`` also ``past_key_values.<i>.key`` and
    ``.value`` [batch, kv_heads, past, 8], and then ``present.<i>.key`` and ``.value`` are outputs.
    The first output is ``logits`` [batch, sequence, 100].

    Args:
        seed: Seed of the weights.
        layers: Decoder blocks.
        heads: Query heads of size 8.
        kv_heads: Key and value heads; a divisor of ``heads``.
        past: Whether to read and give a cache of keys and values.
        tied: Whether the output projection is the word table.
    """
    s = Sketch(seed)
    ids = s.input("input_ids", ir.DataType.INT64, ("batch", "sequence"))
    shape = ("batch", kv_heads, "past", 8)
    caches = [
        [
            s.input(f"past_key_values.{index}.{part}", ir.DataType.FLOAT, shape)
            for part in ("key", "value")
        ]
        for index in range(layers if past else 0)
    ]
    table = s.weight("model.embed_tokens.weight", 100, 32, scale=0.5)
    x = s.op("Gather", table, ids, at="model.embed_tokens", axis=0)
    turn, bias = _positions(s, ids, caches[0][0] if past else None)
    outputs: dict[str, ir.Value] = {}
    for index in range(layers):
        cache = caches[index] if past else []
        x, kept = _decoder_block(s, x, (*turn, bias, *cache), index, (heads, kv_heads))
        if past:
            outputs |= {f"present.{index}.key": kept[0], f"present.{index}.value": kept[1]}
    x = _rms_norm(s, x, "model.norm")
    if tied:
        flipped = s.op("Transpose", table, at="lm_head", perm=[1, 0])
        logits = s.op("MatMul", x, flipped, at="lm_head")
    else:
        logits = s.linear(x, "lm_head", 32, 100, bias=False)
    return s.model(logits=logits, **outputs)


def _positions(
    s: Sketch, ids: ir.Value, cache: ir.Value | None
) -> tuple[tuple[ir.Value, ir.Value], ir.Value]:
    """Return cosines and sines [1, sequence, 8], and the causal bias [sequence, past+sequence]."""
    zero, one = s.constant("zero", np.int64(0)), s.constant("one", np.int64(1))
    length = s.op("Squeeze", s.op("Shape", ids, start=1, end=2))
    start = zero if cache is None else s.op("Squeeze", s.op("Shape", cache, start=2, end=3))
    end = s.op("Add", start, length)
    places = s.op("Range", start, end, one)
    at = "model.rotary_emb"
    floats = s.op("Cast", s.op("Unsqueeze", places, s.ints(0, 2), at=at), to=ir.DataType.FLOAT)
    speeds = s.constant(f"{at}.inv_freq", (10000.0 ** (-np.arange(4) / 4)).astype(np.float32))
    angles = s.op("Mul", floats, speeds, at=at)
    angles = s.op("Concat", angles, angles, at=at, axis=-1)
    seen = s.op("Range", zero, end, one)
    later = s.op(
        "Greater", s.op("Unsqueeze", seen, s.ints(0)), s.op("Unsqueeze", places, s.ints(1))
    )
    bias = s.op("Where", later, s.number(_LOWEST), s.number(0.0))
    return (s.op("Cos", angles, at=at), s.op("Sin", angles, at=at)), bias


def _rms_norm(s: Sketch, x: ir.Value, at: str) -> ir.Value:
    mean = s.op("ReduceMean", s.op("Pow", x, s.number(2.0), at=at), s.ints(-1), at=at, keepdims=1)
    root = s.op("Sqrt", s.op("Add", mean, s.number(1e-6), at=at), at=at)
    normal = s.op("Mul", x, s.op("Reciprocal", root, at=at), at=at)
    return s.op("Mul", s.weight(f"{at}.weight", 32, mean=1.0, scale=0.1), normal, at=at)


def _rotate(s: Sketch, x: ir.Value, cos: ir.Value, sin: ir.Value, at: str) -> ir.Value:
    low = s.op("Slice", x, s.ints(0), s.ints(4), s.ints(3), at=at)
    high = s.op("Slice", x, s.ints(4), s.ints(8), s.ints(3), at=at)
    turned = s.op("Concat", s.op("Neg", high, at=at), low, at=at, axis=-1)
    return s.op("Add", s.op("Mul", x, cos, at=at), s.op("Mul", turned, sin, at=at), at=at)


def _repeat(s: Sketch, x: ir.Value, times: int, kv_heads: int, at: str) -> ir.Value:
    if times == 1:
        return x
    wide = s.op("Unsqueeze", x, s.ints(2), at=at)
    wide = s.op("Expand", wide, s.ints(1, 1, times, 1, 1), at=at)
    return s.op("Reshape", wide, s.ints(0, kv_heads * times, -1, 8), at=at)


def _decoder_attention(
    s: Sketch, x: ir.Value, context: tuple[ir.Value, ...], block: str, counts: tuple[int, int]
) -> tuple[ir.Value, tuple[ir.Value, ir.Value]]:
    cos, sin, bias, *cache = context
    heads, kv_heads = counts
    at = f"{block}.self_attn"
    q, k, v = (
        _split_heads(s, s.linear(x, f"{at}.{part}_proj", 32, 8 * n, bias=False), at, n, 8)
        for part, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    q, k = _rotate(s, q, cos, sin, at), _rotate(s, k, cos, sin, at)
    if cache:
        k = s.op("Concat", cache[0], k, at=at, axis=2)
        v = s.op("Concat", cache[1], v, at=at, axis=2)
    wide_k, wide_v = (_repeat(s, t, heads // kv_heads, kv_heads, at) for t in (k, v))
    y = _attend(s, (q, wide_k, wide_v), bias, at, 8)
    return s.linear(y, f"{at}.o_proj", 8 * heads, 32, bias=False), (k, v)


def _decoder_block(
    s: Sketch, x: ir.Value, context: tuple[ir.Value, ...], index: int, counts: tuple[int, int]
) -> tuple[ir.Value, tuple[ir.Value, ir.Value]]:
    at = f"model.layers.{index}"
    y = _rms_norm(s, x, f"{at}.input_layernorm")
    y, kept = _decoder_attention(s, y, context, at, counts)
    x = s.op("Add", x, y, at=at)
    y = _gated(s, _rms_norm(s, x, f"{at}.post_attention_layernorm"), at)
    return s.op("Add", x, y, at=at), kept


def _gated(s: Sketch, x: ir.Value, block: str) -> ir.Value:
    at = f"{block}.mlp"
    gate = s.linear(x, f"{at}.gate_proj", 32, 64, bias=False)
    act = s.op("Mul", gate, s.op("Sigmoid", gate, at=f"{at}.act_fn"), at=f"{at}.act_fn")
    up = s.linear(x, f"{at}.up_proj", 32, 64, bias=False)
    return s.linear(s.op("Mul", act, up, at=at), f"{at}.down_proj", 64, 32, bias=False)


def tiny_convnet(seed: int = 0, channels: int = 8, classes: int = 10) -> ir.Model:
    """Return a residual convolutional classifier.

    The input is ``image`` [batch, 3, 16, 16]; the output is ``logits`` [batch, classes].
    """
    s = Sketch(seed)
    x = s.input("image", ir.DataType.FLOAT, ("batch", 3, 16, 16))
    x = s.op("Relu", _conv(s, x, "stem.conv", 3, channels), at="stem.act")
    y = s.op("Relu", _conv(s, x, "block.conv1", channels, channels), at="block.act1")
    y = s.op("Add", _conv(s, y, "block.conv2", channels, channels), x, at="block")
    y = s.op("Relu", y, at="block.act2")
    y = s.op("Flatten", s.op("GlobalAveragePool", y, at="pool"), at="pool", axis=1)
    weight = s.weight("head.weight", classes, channels)
    bias = s.weight("head.bias", classes, scale=0.1)
    return s.model(logits=s.op("Gemm", y, weight, bias, at="head", transB=1))


def _conv(s: Sketch, x: ir.Value, at: str, inputs: int, outputs: int) -> ir.Value:
    weight = s.weight(f"{at}.weight", outputs, inputs, 3, 3, scale=(9 * inputs) ** -0.5)
    bias = s.weight(f"{at}.bias", outputs, scale=0.1)
    return s.op("Conv", x, weight, bias, at=at, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
