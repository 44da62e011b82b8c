"""How close a changed tensor is to the reference's: SQNR and cosine, over several pieces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qbench.tasks.base import Array

#: SQNR of an output that did not change.
MOST_DB = 300.0


@dataclass(slots=True)
class Closeness:
    """Sums over the elements seen so far.

    Attributes:
        signal: Sum of squares of the reference.
        noise: Sum of squared differences.
        dot: Sum of products.
        other: Sum of squares of the changed side.
    """

    signal: float = 0.0
    noise: float = 0.0
    dot: float = 0.0
    other: float = 0.0

    def add(self, reference: Array, changed: Array) -> None:
        """Take one more piece of both sides, of equal shape."""
        a = reference.astype(np.float64).ravel()
        b = changed.astype(np.float64).ravel()
        self.signal += float(a @ a)
        self.noise += float((a - b) @ (a - b))
        self.dot += float(a @ b)
        self.other += float(b @ b)

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantization noise, dB, at most ``MOST_DB``; ``None`` without a signal."""
        if self.signal <= 0 or not np.isfinite([self.signal, self.noise]).all():
            return None
        if self.noise <= 0:
            return MOST_DB
        return min(float(10 * np.log10(self.signal / self.noise)), MOST_DB)

    @property
    def cosine(self) -> float | None:
        """Cosine similarity; ``None`` where a side is zero or not finite."""
        sums = [self.dot, self.signal, self.other]
        if self.signal <= 0 or self.other <= 0 or not np.isfinite(sums).all():
            return None
        return float(np.clip(self.dot / np.sqrt(self.signal * self.other), -1.0, 1.0))
