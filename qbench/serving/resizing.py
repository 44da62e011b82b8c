"""When the token budget of a running service moves: not on noise, and never far at once."""

from __future__ import annotations

from dataclasses import dataclass

from qbench.serving.cost import BatchCost
from qbench.serving.estimator import Demand, Sizing, expect, size_batches

_WORTH = 1.05
_LOOKS = 3
_STEP = 2


@dataclass(frozen=True, slots=True)
class Resizing:
    """A budget to take, and what is expected of it and of the one before."""

    budget: int
    expected: Sizing
    before: Sizing


class Resizer:
    """Looks at what batches cost by now, and says when another token budget is to be taken.

    A budget changes where the SLA would be kept only then; or where three looks in a row point in
    the same direction, each with a gain of more than 5 % beyond what the cost model's recent
    errors could feign (twice the standard error of their mean). It then at most doubles or halves:
    beyond that the model guesses, and batches of the new size tell it more before the next look.
    """

    def __init__(self) -> None:
        """Begin without a look."""
        self._grows: bool | None = None
        self._looks = 0

    def look(self, model: BatchCost, demand: Demand, budget: int) -> Resizing | None:
        """Return what to change, or ``None`` to keep ``budget``."""
        found, stays = size_batches(model, demand), expect(model, demand, budget)
        if found.within_sla and not stays.within_sla and found.token_budget != budget:
            return self._move(found, stays)
        worth = _WORTH + 2 * model.doubt
        grows = found.token_budget > budget
        if found.token_budget == budget or found.requests_per_s <= worth * stays.requests_per_s:
            self._grows, self._looks = None, 0
            return None
        self._looks = self._looks + 1 if grows is self._grows else 1
        self._grows = grows
        if self._looks < _LOOKS:
            return None
        near = budget * _STEP if grows else -(-budget // _STEP)
        step = min(near, found.token_budget) if grows else max(near, found.token_budget)
        expected = expect(model, demand, step)
        pays = expected.requests_per_s > stays.requests_per_s
        fits = expected.within_memory and expected.within_sla >= stays.within_sla
        return Resizing(step, expected, stays) if pays and fits else None

    def _move(self, found: Sizing, stays: Sizing) -> Resizing:
        self._grows, self._looks = None, 0
        return Resizing(found.token_budget, found, stays)
