"""find_layers on whole graphs: counts, names, invariance, reuse, reasons."""

from __future__ import annotations

import collections
import time

import numpy as np
import onnx_ir as ir
import pytest

from qbench.graph.layers import find_layers
from qbench.records import Kind, Layers
from qbench.testing.graphs import (
    Sketch,
    anonymise,
    decompose,
    tiny_convnet,
    tiny_decoder,
    tiny_encoder,
)

GRAPHS = {
    "encoder": tiny_encoder,
    "decoder": tiny_decoder,
    "decoder with a cache": lambda: tiny_decoder(past=True, tied=False),
    "decoder without grouping": lambda: tiny_decoder(kv_heads=4),
    "convnet": tiny_convnet,
}
COUNTS = {
    "encoder": {
        "embedding": 2,
        "layernorm": 5,
        "linear": 12,
        "kv": 4,
        "attention_scores": 2,
        "softmax": 2,
        "attention_context": 2,
        "residual_add": 4,
        "activation": 2,
    },
    "decoder": {
        "embedding": 1,
        "layernorm": 5,
        "linear": 15,
        "kv": 4,
        "attention_scores": 2,
        "softmax": 2,
        "attention_context": 2,
        "residual_add": 4,
        "activation": 2,
    },
    "convnet": {"conv": 3, "activation": 3, "residual_add": 1, "linear": 1},
}
COUNTS["decoder with a cache"] = COUNTS["decoder without grouping"] = COUNTS["decoder"]


def kinds(layers: Layers) -> list[tuple[Kind, int]]:
    return [(layer.kind, len(layer.occurrences)) for layer in layers.layers]


def counts(layers: Layers) -> dict[str, int]:
    return dict(collections.Counter(str(layer.kind) for layer in layers.layers))


@pytest.mark.parametrize("name", GRAPHS)
def test_every_layer_is_found(name):
    assert counts(find_layers(GRAPHS[name]())) == COUNTS[name]


@pytest.mark.parametrize("name", GRAPHS)
def test_structure_alone_decides(name):
    model = GRAPHS[name]()
    expected = kinds(find_layers(model))
    for seed in (1, 2):
        assert kinds(find_layers(anonymise(model, seed))) == expected
    assert kinds(find_layers(decompose(model))) == expected
    assert kinds(find_layers(anonymise(decompose(model), 3))) == expected


@pytest.mark.parametrize("name", GRAPHS)
def test_every_node_has_one_place(name):
    for model in (GRAPHS[name](), decompose(GRAPHS[name]())):
        layers = find_layers(model)
        placed = [node for layer in layers.layers for node in layer.nodes]
        placed += [node.node for node in layers.unlayered]
        assert sorted(placed) == sorted(node.name for node in model.graph)
        assert all(node.reason for node in layers.unlayered)


@pytest.mark.parametrize("name", GRAPHS)
def test_edges_and_tensors_are_in_the_graph(name):
    model = anonymise(GRAPHS[name](), 5)
    nodes = {node.name: node for node in model.graph}
    values = {
        value.name for node in model.graph for value in (*node.inputs, *node.outputs) if value
    }
    for layer in find_layers(model).layers:
        for use in layer.occurrences:
            assert {*use.inputs, use.output} - {""} <= values
            assert bool(use.edges) == (layer.kind is not Kind.EMBEDDING)
        for edge in layer.edges:
            assert nodes[edge.node].inputs[edge.index].name == edge.tensor


@pytest.mark.parametrize("name", GRAPHS)
def test_names_are_unique_and_repeatable(name):
    for model in (GRAPHS[name](), anonymise(GRAPHS[name](), 7)):
        names = [layer.name for layer in find_layers(model).layers]
        assert len(set(names)) == len(names)
        assert names == [layer.name for layer in find_layers(model).layers]


def test_names_of_a_block():
    layers = find_layers(tiny_encoder())
    block = [layer.name for layer in layers.layers if "layer.0" in layer.name]
    assert block == [
        "encoder.layer.0.attention.self.query",
        "encoder.layer.0.attention.self.key",
        "encoder.layer.0.attention.self.value",
        "encoder.layer.0.attention.self.k",
        "encoder.layer.0.attention.self.scores",
        "encoder.layer.0.attention.self.softmax",
        "encoder.layer.0.attention.self.v",
        "encoder.layer.0.attention.self.context",
        "encoder.layer.0.attention.output.dense",
        "encoder.layer.0.attention.output.residual",
        "encoder.layer.0.attention.output.LayerNorm",
        "encoder.layer.0.intermediate.dense",
        "encoder.layer.0.intermediate.intermediate_act_fn",
        "encoder.layer.0.output.dense",
        "encoder.layer.0.output.residual",
        "encoder.layer.0.output.LayerNorm",
    ]
    assert layers.by_name()["encoder.layer.0.output.residual"].module == "encoder.layer.0.output"


def test_decomposition_keeps_names():
    model = tiny_encoder()
    names = [layer.name for layer in find_layers(model).layers]
    assert [layer.name for layer in find_layers(decompose(model)).layers] == names


def test_names_from_weights_alone():
    model = tiny_encoder()
    for index, node in enumerate(model.graph):
        node.name = f"node_{index}"
    names = {layer.name for layer in find_layers(model).layers}
    assert {
        "encoder.layer.1.attention.self.scores",
        "encoder.layer.1.attention.self.v",
        "encoder.layer.1.attention.output.residual",
        "encoder.layer.1.intermediate.activation",
    } <= names


def test_anonymous_names_come_from_weights_and_nodes():
    model = anonymise(tiny_encoder(), 1)
    for layer in find_layers(model).layers:
        first = layer.occurrences[0]
        tail = layer.name.rpartition(".")[2]
        assert layer.module == ""
        assert tail in (layer.weight, *layer.nodes, *(edge.node for edge in first.edges)) or (
            layer.kind is Kind.KV
        )


def test_wrapper_of_an_export_is_no_part_of_names():
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 4))
    y = s.op("Tanh", s.linear(x, "model.pooler.dense", 4, 4))
    model = s.model(y=y)
    scopes = ("pooler.dense", "pooler.dense", "pooler.activation")
    for node, scope in zip(model.graph, scopes, strict=True):
        node.metadata_props["pkg.torch.onnx.name_scopes"] = str(
            ["", "model", f"model.{scope}", "call"]
        )
    assert [layer.name for layer in find_layers(model).layers] == [
        "pooler.dense",
        "pooler.activation",
    ]


def test_foreign_prefix_stays():
    names = [layer.name for layer in find_layers(tiny_decoder()).layers]
    assert names[0] == "model.embed_tokens" and names[-1] == "lm_head"


def test_weight_name_from_folding_beats_the_scope_of_the_node():
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 4))
    weight = s.weight("val_65", 4, 4)
    weight.metadata_props["pkg.onnxscript.optimizer.folded_from"] = "['block.query.weight']"
    y = s.op("MatMul", x, weight)
    y.producer().metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'block', 'call']"
    model = s.model(y=s.linear(y, "head", 4, 4))
    assert [layer.name for layer in find_layers(model).layers] == ["block.query", "head"]


def shared_block(times: int) -> ir.Model:
    """A block of linear, activation, residual and norm, run ``times`` over."""
    s = Sketch(0)
    x = s.linear(s.input("x", ir.DataType.FLOAT, ("batch", 8)), "inward", 8, 8)
    for _ in range(times):
        y = s.op("Relu", s.linear(x, "block.up", 8, 16), at="block.act")
        y = s.linear(y, "block.down", 16, 8)
        x = s.layer_norm(s.op("Add", y, x, at="block"), "block.norm", 8)
    return s.model(y=x)


def test_a_block_run_many_times_is_one_block():
    for model in (shared_block(3), anonymise(shared_block(3)), decompose(shared_block(3))):
        assert kinds(find_layers(model)) == [
            (Kind.LINEAR, 1),
            (Kind.LINEAR, 3),
            (Kind.ACTIVATION, 3),
            (Kind.LINEAR, 3),
            (Kind.RESIDUAL_ADD, 3),
            (Kind.LAYERNORM, 3),
        ]
    norm = find_layers(shared_block(3)).by_name()["block.norm"]
    assert len({use.output for use in norm.occurrences}) == 3


def test_norms_that_share_merged_constants_stay_apart():
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 8))
    ones, zeros = s.constant("ones", np.ones(8, "f")), s.constant("zeros", np.zeros(8, "f"))
    for index in range(3):
        x = s.op("LayerNormalization", s.linear(x, f"l{index}.proj", 8, 8), ones, zeros, axis=-1)
    layers = find_layers(s.model(y=x))
    assert counts(layers) == {"linear": 3, "layernorm": 3}


def test_tied_table_and_projection():
    layers = find_layers(tiny_decoder(tied=True)).by_name()
    table, head = layers["model.embed_tokens"], layers["lm_head"]
    assert table.tie == head.tie != ""
    assert head.weight == table.weight
    assert head.occurrences[0].attributes["weight_transposed"] == 1
    assert not any(layer.tie for layer in find_layers(tiny_decoder(tied=False)).layers)


def test_kv_is_the_tensor_before_repetition():
    model = tiny_decoder(layers=1)
    layers = find_layers(model).by_name()
    nodes = {node.name: node for node in model.graph}
    for part, source in (("k", "Add"), ("v", "Transpose")):
        (edge,) = layers[f"model.layers.0.self_attn.{part}"].edges
        assert nodes[edge.node].op_type == "Unsqueeze"
        assert nodes[edge.node].inputs[0].producer().op_type == source


def test_kv_with_a_cache_is_what_attention_reads():
    layers = find_layers(tiny_decoder(layers=1, past=True)).by_name()
    assert layers["model.layers.0.self_attn.k"].occurrences[0].output == "present.0.key"
    assert layers["model.layers.0.self_attn.v"].occurrences[0].output == "present.0.value"


def test_reasons_of_an_encoder():
    reasons = {(u.op, u.reason) for u in find_layers(tiny_encoder()).unlayered}
    assert {
        ("Shape", "shape computation"),
        ("Slice", "token or position indices"),
        ("Add", "sum of embeddings"),
        ("Sub", "attention mask arithmetic"),
        ("Div", "scale of attention scores"),
        ("Add", "addition of the attention mask or position bias"),
        ("Reshape", "reshape/transpose: data movement"),
        ("ReduceSum", "pooling"),
        ("ReduceL2", "output normalisation"),
    } <= reasons


def test_reasons_of_a_decoder():
    reasons = {(u.op, u.reason) for u in find_layers(tiny_decoder()).unlayered}
    assert {
        ("Cos", "rotary position arithmetic"),
        ("Neg", "rotary position arithmetic"),
        ("Add", "rotary position arithmetic"),
        ("Mul", "product of two branches"),
    } <= reasons


def test_sizes():
    layer = find_layers(tiny_encoder()).by_name()["encoder.layer.0.intermediate.dense"]
    assert layer.weight_shape == (32, 128)
    assert layer.weight_bytes == 4 * 32 * 128
    assert layer.parameters == 32 * 128 + 128


def test_large_weights_are_never_read():
    model = tiny_encoder(hidden=64, vocabulary=1000)

    def refuse() -> ir.TensorProtocol:
        raise AssertionError("a large weight was read")

    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor.size >= 4096:
            value.const_value = ir.LazyTensor(
                refuse, tensor.dtype, ir.Shape(tensor.shape.numpy()), name=value.name
            )
    assert counts(find_layers(model)) == COUNTS["encoder"]


def test_two_thousand_nodes_take_less_than_a_second_of_cpu():
    model = decompose(tiny_encoder(layers=36, hidden=8, heads=2))
    assert len(model.graph) > 1900
    start = time.process_time()
    find_layers(model)
    assert time.process_time() - start < 1.0
