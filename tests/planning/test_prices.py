from __future__ import annotations

import pytest

from qbench.backends import backend_named
from qbench.planning.costs import Offer, Option
from qbench.planning.prices import compare, pool_profile, reprice
from qbench.records import Estimate, Kind, Layer, Layers

LAYERS = Layers(tuple(Layer(n, Kind.LINEAR, (), weight_shape=(8, 8)) for n in "abc"), ())
KEY = (Kind.LINEAR, (8, 8), "int8")


def ms(value: float, half: float) -> Estimate:
    return Estimate(value, value - half, value + half, 6)


def test_node_times_are_pooled_over_like_layers() -> None:
    deltas = {("a", "int8"): [-1.0, -1.1, -0.9], ("b", "int8"): [-2.0, -2.0, -2.0]}
    pooled = pool_profile(deltas, LAYERS)
    assert pooled[KEY].value == pytest.approx(-1.5) and pooled[KEY].n == 2


def test_sources_that_agree_are_averaged_by_their_precision() -> None:
    price = compare({KEY: ms(-1.0, 0.1)}, {KEY: ms(-1.2, 0.2)})[0]
    assert price.agree
    assert price.used.value == pytest.approx(-1.04)
    assert price.used.high - price.used.low < 0.2


def test_where_they_disagree_what_ships_counts_and_the_interval_says_so() -> None:
    price = compare({KEY: ms(-1.0, 0.1)}, {KEY: ms(0.5, 0.1)})[0]
    assert not price.agree
    assert (price.used.value, price.used.low, price.used.high) == (0.5, -1.1, 0.6)


def test_an_offer_takes_the_prices_of_both() -> None:
    options = {n: (Option("fp32", 0, 4, 0.0), Option("int8", 1e-3, 1, -5e-3)) for n in "abc"}
    offer = Offer(options, (), {}, "fp32")
    cpu = backend_named("ort-cpu")
    agreed = compare({KEY: ms(-1.0, 0.1)}, {KEY: ms(-1.2, 0.2)})
    assert reprice(offer, agreed, LAYERS, cpu).options["a"][1].seconds == pytest.approx(-1.04e-3)
    torn = compare({KEY: ms(-1.0, 0.1)}, {KEY: ms(0.5, 0.1)})
    assert reprice(offer, torn, LAYERS, cpu).options["a"][1].seconds == 0.0
    assert reprice(offer, [], LAYERS, cpu).options == options
