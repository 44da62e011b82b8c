"""Choosing layers by glob."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from qbench.errors import InputError, did_you_mean
from qbench.records import Layer, Layers


def select_layers(
    layers: Layers, include: Sequence[str], exclude: Sequence[str]
) -> tuple[Layer, ...]:
    """Return the layers that some pattern of ``include`` matches and none of ``exclude`` does.

    A pattern is a glob over the layer's name, its module path and the names of its nodes.

    Args:
        layers: Every layer of a graph.
        include: Patterns of layers to take; empty takes all.
        exclude: Patterns of layers to leave out.

    Returns:
        The chosen layers in their order.

    Raises:
        InputError: If a pattern matches no layer; the message names near misses.
    """
    taken = _matching(layers, include, "include") if include else set(range(len(layers.layers)))
    taken -= _matching(layers, exclude, "exclude")
    return tuple(layer for index, layer in enumerate(layers.layers) if index in taken)


def match_layers(layers: Layers, pattern: str, what: str) -> tuple[Layer, ...]:
    """Return the layers that one pattern matches, as ``select_layers`` reads patterns.

    Args:
        layers: Every layer of a graph.
        pattern: A glob.
        what: What the pattern is for, as the message names it.

    Raises:
        InputError: If it matches no layer; the message names near misses.
    """
    hits = _matching(layers, [pattern], what)
    return tuple(layer for index, layer in enumerate(layers.layers) if index in hits)


def _matching(layers: Layers, patterns: Sequence[str], what: str) -> set[int]:
    matched: set[int] = set()
    for pattern in patterns:
        hits = {i for i, layer in enumerate(layers.layers) if _matches(layer, pattern)}
        if not hits:
            raise InputError(_miss(layers, pattern, what))
        matched |= hits
    return matched


def _matches(layer: Layer, pattern: str) -> bool:
    return any(fnmatchcase(word, pattern) for word in (layer.name, layer.module, *layer.nodes))


def _miss(layers: Layers, pattern: str, what: str) -> str:
    words = dict.fromkeys(
        word for layer in layers.layers for word in (layer.name, layer.module, *layer.nodes) if word
    )
    kinds = sorted({str(layer.kind) for layer in layers.layers})
    bare = re.sub(r"[*?\[\]]+", "", pattern).strip(".")
    hint = did_you_mean(bare, words)
    unlayered = next((u for u in layers.unlayered if fnmatchcase(u.node, pattern)), None)
    if unlayered is not None:
        hint = f"; node {unlayered.node!r} is in no layer: {unlayered.reason}"
    return (
        f"{what} pattern {pattern!r} matches no layer name, module path or node name{hint}; "
        f"allowed: globs such as '*.query' over {len(layers.layers)} layers "
        f"(kinds: {', '.join(kinds)}); list them with qbench layers"
    )
