"""Prices from two sources: segments with and without the change, and nodes of the built engine."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qbench.backends import Backend
from qbench.planning.costs import CostKey, Offer, Option, believed_ms
from qbench.records import Estimate, Layers
from qbench.statistics import median_interval

_NORMAL = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Price:
    """What a format costs layers of one kind and shape, a batch.

    Attributes:
        kind: Kind of the layers.
        shape: Shape of their weights.
        format: The format.
        segments: Change of the time from paired runs of segments, ms.
        profile: Change of the time of their nodes in a built engine, ms.
        used: What planning goes on with, ms.
        agree: Whether the two intervals overlap.
    """

    kind: str
    shape: tuple[int, ...]
    format: str
    segments: Estimate
    profile: Estimate
    used: Estimate
    agree: bool


def pool_profile(
    deltas: Mapping[tuple[str, str], Sequence[float]], layers: Layers
) -> dict[CostKey, Estimate]:
    """Return the change of node time of each (kind, weight shape, format), ms a batch.

    Each layer gives the median of its batches; like layers are pooled as those of the sweep are.

    Args:
        deltas: Change in each batch by (layer, format), ms.
        layers: Layers of the model.
    """
    known = layers.by_name()
    pools: dict[CostKey, list[Estimate]] = defaultdict(list)
    for (name, form), values in deltas.items():
        layer = known[name]
        pools[layer.kind, layer.weight_shape, form].append(median_interval(list(values)))
    return {
        key: own[0] if len(own) == 1 else median_interval([item.value for item in own])
        for key, own in pools.items()
    }


def compare(
    segments: Mapping[CostKey, Estimate], profile: Mapping[CostKey, Estimate]
) -> list[Price]:
    """Return the price of each key that both sources know.

    Where the intervals overlap the two are averaged, each weighted by the inverse of its variance.
    Where they do not, what ships counts: the profile of the built engine, with an interval that
    reaches to the other one.
    """
    prices = []
    for key in segments.keys() & profile.keys():
        a, b = segments[key], profile[key]
        agree = a.low <= b.high and b.low <= a.high
        used = _average(a, b) if agree else _reaching(b, a)
        kind, shape, form = key
        prices.append(Price(str(kind), shape, form, a, b, used, agree))
    return sorted(prices, key=lambda p: (p.kind, p.shape, p.format))


def reprice(offer: Offer, prices: Sequence[Price], layers: Layers, backend: Backend) -> Offer:
    """Return the offer with the seconds that both sources say."""
    used = {(p.kind, p.shape, p.format): p.used for p in prices}
    options: dict[str, tuple[Option, ...]] = {}
    for layer in layers.layers:
        options[layer.name] = tuple(
            replace(o, seconds=believed_ms(price, backend.emulates(layer.kind, o.format)) / 1e3)
            if (price := used.get((str(layer.kind), layer.weight_shape, o.format))) is not None
            else o
            for o in offer.options[layer.name]
        )
    return replace(offer, options=options)


def _average(a: Estimate, b: Estimate) -> Estimate:
    spread = [max((e.high - e.low) / (2 * _NORMAL), 1e-9) for e in (a, b)]
    weights = [1 / s**2 for s in spread]
    value = (weights[0] * a.value + weights[1] * b.value) / sum(weights)
    half = _NORMAL / math.sqrt(sum(weights))
    return Estimate(value, value - half, value + half, a.n + b.n, method="inverse_variance")


def _reaching(used: Estimate, other: Estimate) -> Estimate:
    low, high = min(used.low, other.low), max(used.high, other.high)
    return replace(used, low=low, high=high, method="disagreement")
