"""Operators by what they do, across ONNX and the contrib operators of ONNX Runtime."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Change the type of a tensor or nothing at all.
CASTS = _words("Cast CastLike Identity Dropout")
#: Give the same elements another shape or order.
VIEWS = CASTS | _words("Reshape Transpose Squeeze Unsqueeze Flatten")
#: Move, repeat or pick elements.
MOVES = VIEWS | _words(
    "Expand Tile Slice Split Concat Gather GatherElements GatherND ScatterND ScatterElements Pad "
    "DepthToSpace SpaceToDepth Compress ReverseSequence"
)

QUANTIZERS = _words("DequantizeLinear QuantizeLinear")
#: Compute on integers or packed weights: the graph was quantized before it came here.
QUANTIZED = QUANTIZERS | _words(
    "DynamicQuantizeLinear MatMulInteger ConvInteger QLinearMatMul QLinearConv MatMulNBits "
    "MatMulBnb4 MatMulIntegerToFloat DynamicQuantizeMatMul QAttention QLinearAdd QLinearMul QGemm "
    "QOrderedMatMul GatherBlockQuantized"
)

MATMULS = _words("MatMul FusedMatMul")
CONVS = _words("Conv ConvTranspose FusedConv")
NORMS = _words(
    "LayerNormalization RMSNormalization SimplifiedLayerNormalization GroupNormalization "
    "InstanceNormalization GroupNorm SkipGroupNorm"
)
SKIP_NORMS = _words("SkipLayerNormalization SkipSimplifiedLayerNormalization")
ACTIVATIONS = _words(
    "Gelu Relu Tanh Sigmoid Silu Swish Elu LeakyRelu PRelu Selu Celu HardSigmoid HardSwish "
    "Softplus Softsign Mish ThresholdedRelu FastGelu BiasGelu QuickGelu"
)
#: Compute a whole attention in one node; their K and V are inputs 1 and 2.
ATTENTIONS = _words(
    "Attention MultiHeadAttention GroupQueryAttention PackedMultiHeadAttention "
    "DecoderMaskedMultiHeadAttention"
)

POOLS = _words("GlobalAveragePool GlobalMaxPool GlobalLpPool AveragePool MaxPool LpPool MaxRoiPool")
LENGTHS = _words("ReduceL2 ReduceL1 LpNormalization ReduceSumSquare")
ARITHMETIC = _words("Add Sub Mul Div Neg Pow Sqrt Exp Log Min Max Clip Abs Reciprocal")

GIVES_BOOL = _words("And Or Not Xor Equal Less LessOrEqual Greater GreaterOrEqual IsNaN IsInf")
GIVES_INT = _words("Shape Size NonZero ArgMax ArgMin")
RANDOM = _words("RandomNormal RandomUniform RandomNormalLike RandomUniformLike Multinomial")

#: Between scores and softmax, walking back.
TO_SCORES = VIEWS | _words("Add Sub Mul Div Where Clip Min Max Tanh Concat")
#: Between softmax and context, walking ahead.
TO_CONTEXT = VIEWS | _words("Where Mul Slice")
#: Under which a tensor of a residual stream is still the same tensor.
SAME_STREAM = VIEWS | _words("Expand Slice Pad")
#: Between a table of sines and the product with activations.
TABLE_STEPS = VIEWS | _words("Slice Split Concat Expand Tile")
