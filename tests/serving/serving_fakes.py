"""Requests and engines of controlled cost for the serving tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np


def encode(texts: Sequence[str]) -> list[dict[str, list[int]]]:
    """Turn ``"abc"`` into its character codes, 1 and more."""
    return [{"ids": [ord(letter) for letter in text], "mask": [1] * len(text)} for text in texts]


def pad(encoded: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, np.ndarray]:
    """Pad on the right with zeros; [batch, longest]."""
    longest = max(len(one["ids"]) for one in encoded)
    feeds = {}
    for name in ("ids", "mask"):
        feeds[name] = np.zeros((len(encoded), longest), dtype=np.int64)
        for row, one in enumerate(encoded):
            feeds[name][row, : len(one[name])] = one[name]
    return feeds


def answer_of(text: str) -> float:
    """What a right engine answers to a text: the sum of its codes."""
    return float(sum(map(ord, text)))


class Summing:
    """An engine that sums ids over the mask and takes a set time for it."""

    def __init__(self, overhead_s: float = 0.0, token_s: float = 0.0) -> None:
        self.overhead_s, self.token_s = overhead_s, token_s
        self.shapes: list[tuple[int, ...]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.gate.wait(10)
        self.shapes.append(feeds["ids"].shape)
        seconds = self.overhead_s + self.token_s * feeds["ids"].size
        if seconds:
            time.sleep(seconds)
        return {"sum": (feeds["ids"] * feeds["mask"]).sum(axis=1).astype(np.float32)}


def texts(count: int, shortest: int = 2, longest: int = 20, seed: int = 0) -> list[str]:
    """Return random texts."""
    rng = np.random.default_rng(seed)
    return [
        "".join(rng.choice(list("abcdefgh"), rng.integers(shortest, longest + 1)))
        for _ in range(count)
    ]
