"""What a batch costs: seconds over batch and length, fitted at warm-up and refined online.

    seconds(b, l) = call + b·l·token + b·l²·pair

A call has a fixed price, each padded token one (products with weights), and each pair of
tokens of one request one (attention). The fit minimises the squared *relative* error, because
times scatter in proportion, and forgets exponentially, so that it follows the machine.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_FORGET = 0.99
_BASE_WEIGHT = 10.0  # the warm-up counts as so many batches for ever: it saw lengths apart
_ERRORS = 64
_LEAST_SEEN = 4
#: Batches from which on the weights are solved for after so many more.
_MANY, _REFIT = 64, 8
_RIDGE = 1e-9


@dataclass(frozen=True, slots=True)
class Point:
    """A batch that was measured: ``batch`` requests of ``length`` tokens took ``seconds``."""

    batch: int
    length: int
    seconds: float


class BatchCost:
    """Seconds that a batch holds its lane, learnt from batches."""

    def __init__(self, points: Iterable[Point] = ()) -> None:
        """Begin with the batches measured at warm-up, if there are any."""
        self._normal, self._right = _empty(), [0.0] * 3  # what forgets
        self._base, self._base_right = _empty(), [0.0] * 3  # the warm-up, which does not
        self._weights: tuple[float, float, float] | None = None
        self._new = 0  # batches since the weights were solved for
        self._seen = 0
        self._errors: deque[float] = deque()
        self._sorted: list[float] = []
        measured = [point for point in points if point.seconds > 0]
        share = min(_BASE_WEIGHT / max(len(measured), 1), 1.0)
        for point in measured:
            row = [feature / point.seconds for feature in _features(point.batch, point.length)]
            _add_row(self._base, self._base_right, row, share, 1.0)
        self._seen = self._new = len(measured)

    @property
    def known(self) -> bool:
        """Whether enough batches were seen to predict one."""
        return self._seen >= _LEAST_SEEN

    def observe(self, batch: int, length: int, seconds: float) -> None:
        """Add a batch of ``batch`` requests padded to ``length`` that took ``seconds``."""
        if seconds <= 0:
            return
        if self.known:
            self._note_error(seconds / max(self.predict(batch, length), 1e-9))
        row = [feature / seconds for feature in _features(batch, length)]
        _add_row(self._normal, self._right, row, 1.0, _FORGET)
        self._seen += 1
        self._new += 1

    def predict(self, batch: int, length: int) -> float:
        """Return the expected seconds of a batch; 0 while nothing is known."""
        if not self.known:
            return 0.0
        call, token, pair = self.weights
        tokens = batch * length
        return call + tokens * (token + pair * length)

    def upper(self, batch: int, length: int) -> float:
        """Return the seconds that nine batches of ten like this one do not exceed."""
        return self.predict(batch, length) * self.spread

    @property
    def spread(self) -> float:
        """The 90th percentile of real over expected seconds of recent batches, 1 or more."""
        if len(self._sorted) < _LEAST_SEEN:
            return 1.0
        return max(self._sorted[int(0.9 * (len(self._sorted) - 1))], 1.0)

    @property
    def doubt(self) -> float:
        """Standard error of the mean of real over expected seconds of recent batches.

        Half of the distance between the 16th and the 84th percentile, over the root of their
        number; 0 while too few are known.
        """
        count = len(self._sorted)
        if count < _LEAST_SEEN:
            return 0.0
        low, high = (self._sorted[int(share * (count - 1))] for share in (0.16, 0.84))
        return (high - low) / (2 * math.sqrt(count))

    @property
    def weights(self) -> tuple[float, float, float]:
        """Seconds a call, a padded token, and a pair of tokens; none is negative.

        Once many batches are known they are solved for after every few of them: each solution
        takes as long as a batch's other bookkeeping, and a single batch moves it by little.
        """
        wanted = 1 if self._seen < _MANY else _REFIT
        if self._weights is None or self._new >= wanted:
            self._weights, self._new = self._solve(), 0
        return self._weights

    def _note_error(self, ratio: float) -> None:
        if len(self._errors) == _ERRORS:
            old = self._errors.popleft()
            del self._sorted[bisect_left(self._sorted, old)]
        self._errors.append(ratio)
        insort(self._sorted, ratio)

    def _solve(self) -> tuple[float, float, float]:
        """Return the least squares with no negative weight: drop the most negative and refit."""
        normal = [
            [new + old for new, old in zip(*rows, strict=True)]
            for rows in zip(self._normal, self._base, strict=True)
        ]
        right = [new + old for new, old in zip(self._right, self._base_right, strict=True)]
        active = [0, 1, 2]
        while active:
            found = _solve_small(normal, right, active)
            worst = min(range(len(active)), key=lambda k: found[k])
            if found[worst] >= 0:
                weights = [0.0, 0.0, 0.0]
                for index, value in zip(active, found, strict=True):
                    weights[index] = value
                return weights[0], weights[1], weights[2]
            del active[worst]
        return 0.0, 0.0, 0.0


def _features(batch: int, length: int) -> tuple[float, float, float]:
    tokens = float(batch * length)
    return 1.0, tokens, tokens * length


def _empty() -> list[list[float]]:
    return [[0.0] * 3 for _ in range(3)]


def _add_row(
    normal: list[list[float]], right: list[float], row: Sequence[float], weight: float, keep: float
) -> None:
    """Add one observation of relative size 1 to the normal equations, in place."""
    for i in range(3):
        line, left = normal[i], weight * row[i]
        for j in range(3):
            line[j] = keep * line[j] + left * row[j]
        right[i] = keep * right[i] + left


def _solve_small(
    normal: Sequence[Sequence[float]], right: Sequence[float], active: Sequence[int]
) -> list[float]:
    """Solve the normal equations of up to three weights by elimination, scaled to unit diagonal."""
    scale = [max(normal[i][i], 1e-300) ** 0.5 for i in active]
    rows = [
        [normal[i][j] / (scale[a] * scale[b]) + (_RIDGE if a == b else 0.0)
         for b, j in enumerate(active)] + [right[i] / scale[a]]
        for a, i in enumerate(active)
    ]  # fmt: skip
    n = len(rows)
    for k in range(n):
        pivot = rows[k][k] or _RIDGE
        for below in rows[k + 1 :]:
            share = below[k] / pivot
            for column in range(k, n + 1):
                below[column] -= share * rows[k][column]
    found = [0.0] * n
    for k in reversed(range(n)):
        known = sum(rows[k][j] * found[j] for j in range(k + 1, n))
        found[k] = (rows[k][n] - known) / (rows[k][k] or _RIDGE)
    return [value / scale[k] for k, value in enumerate(found)]


@dataclass(frozen=True, slots=True)
class BatchMemory:
    """Bytes that a batch needs beside the model: activations by shape, as the arena rounds them.

    Attributes:
        fixed: Bytes whatever the batch.
        token: Bytes a padded token.
        pair: Bytes a pair of tokens of one request (attention scores).
        round_to: The arena takes multiples of so many bytes.
    """

    fixed: float
    token: float
    pair: float
    round_to: int = 1 << 20

    def need(self, batch: int, length: int) -> int:
        """Return the bytes of ``batch`` requests padded to ``length``."""
        tokens = batch * length
        raw = self.fixed + tokens * (self.token + self.pair * length)
        return -(-int(np.ceil(raw)) // self.round_to) * self.round_to

    def most(self, length: int, free: int, share: float = 0.8) -> int:
        """Return the largest batch of that length within ``share`` of ``free`` bytes, or 0."""
        low, high = 0, 1
        allowed = share * free
        while self.need(high, length) <= allowed and high < 1 << 20:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.need(middle, length) <= allowed else (low, middle)
        return low


def fit_memory(points: Sequence[tuple[int, int, int]], round_to: int = 1 << 20) -> BatchMemory:
    """Fit the memory of a batch to measured (batch, length, bytes).

    Raises:
        ValueError: If there are fewer than three points.
    """
    from scipy.optimize import nnls

    if len(points) < 3:
        raise ValueError(f"a memory model needs three shapes or more, got {len(points)}")
    features = np.array([_features(batch, length) for batch, length, _ in points])
    needed = np.array([float(needed) for _, _, needed in points])
    scale = np.maximum(np.abs(features).max(axis=0), 1.0)
    found = nnls(features / scale, needed)[0] / scale
    # NOTE: the model must not be short anywhere it was measured, so it is raised to the worst one.
    short = float(np.max(needed - features @ found, initial=0.0))
    return BatchMemory(
        float(found[0]) + max(short, 0.0), float(found[1]), float(found[2]), round_to
    )
