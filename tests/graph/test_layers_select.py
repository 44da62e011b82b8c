"""select_layers: globs over names, modules and nodes."""

from __future__ import annotations

import pytest

from qbench.errors import InputError
from qbench.graph.layers import find_layers, select_layers
from qbench.testing.graphs import tiny_encoder

LAYERS = find_layers(tiny_encoder())


def names(include, exclude=()):
    return [layer.name for layer in select_layers(LAYERS, include, exclude)]


def test_nothing_included_is_everything():
    assert select_layers(LAYERS, [], []) == LAYERS.layers


def test_globs_over_names():
    assert names(["*.layer.*.query"]) == [
        f"encoder.layer.{index}.attention.self.query" for index in (0, 1)
    ]


def test_globs_over_modules():
    assert "encoder.layer.0.attention.self.softmax" in names(["encoder.layer.0.attention.self"])


def test_globs_over_nodes():
    assert names(["/encoder/layer.1/output/dense/MatMul"]) == ["encoder.layer.1.output.dense"]


def test_excluded_layers_are_left_out_in_order():
    left = names(["encoder.layer.0.*"], ["*.self.*", "*.residual"])
    assert left[0] == "encoder.layer.0.attention.output.dense"
    assert not any(name.endswith("residual") for name in left)


@pytest.mark.parametrize("what", ["include", "exclude"])
def test_a_pattern_without_a_match_is_an_error_with_near_misses(what):
    with pytest.raises(InputError, match=f"{what} pattern .*did you mean '.*output.dense'"):
        select_layers(
            LAYERS, **{"include": [], "exclude": [], what: ["encoder.layer.0.ouput.dens"]}
        )


def test_a_node_in_no_layer_says_why():
    with pytest.raises(InputError, match="in no layer: scale of attention scores"):
        names(["/encoder/layer.0/attention/self/Div"])
