"""Which layers break together what each alone does not: a model of pairs, and a search for sets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qbench.planning.problem import Cell, Interaction

Cells = frozenset[Cell]


@dataclass(frozen=True, slots=True)
class Observation:
    """The mean divergence that was measured with exactly these cells lowered."""

    cells: Cells
    divergence: float


class NotMeasured(LookupError):
    """A set of cells whose divergence the search needs next.

    Attributes:
        cells: The set.
    """

    def __init__(self, cells: Cells) -> None:
        super().__init__(f"{len(cells)} cells were not measured together")
        self.cells = cells


def fit_pairs(
    singles: Mapping[Cell, float], seen: Sequence[Observation], cells: Collection[Cell]
) -> dict[Cells, float]:
    """Return the interaction of each pair of ``cells`` that best explains what was measured.

    The divergence of a set is modelled as the sum of its cells' own and of a term for each pair.
    Divergence is quadratic in a small error, so that the term of two cells is at most
    ``2 √(d₁ d₂)`` where errors add up; that, with a floor for cells that are harmless alone, is
    the spread of the prior, and the estimate is the mean of the posterior under Gaussian noise.

    Args:
        singles: Divergence of each cell alone.
        seen: What was measured on sets of cells.
        cells: The cells whose pairs are asked for.
    """
    ordered = sorted(cells)
    pairs = [frozenset(pair) for pair in itertools.combinations(ordered, 2)]
    useful = [o for o in seen if len(o.cells) > 1]
    if not pairs or not useful:
        return dict.fromkeys(pairs, 0.0)
    excess = np.array([o.divergence - _own(o.cells, singles) for o in useful])
    inside = np.array([[pair <= o.cells for pair in pairs] for o in useful], float)
    floor = float(np.abs(excess).max()) / len(pairs)
    spread = np.array([2 * math.sqrt(math.prod(singles.get(c, 0.0) for c in p)) for p in pairs])
    weighted = inside * (spread + floor) ** 2
    noise = (0.02 * float(np.abs(excess).max()) or 1e-300) ** 2
    gram = weighted @ inside.T + noise * np.eye(len(useful))
    means = weighted.T @ np.linalg.lstsq(gram, excess, rcond=None)[0]
    return {pair: float(mean) for pair, mean in zip(pairs, means, strict=True)}


def minimal_set(
    cells: Sequence[Cell], excess_of: Callable[[Cells], float], threshold: float
) -> tuple[Cell, ...]:
    """Return few of the cells whose excess together is at least ``threshold``.

    The shortest prefix that reaches it is found by halving; its last cell is one of the set. With
    that cell kept, the prefix before it is searched again, until what is kept reaches the
    threshold by itself. Where excess grows with the set, no cell of the result can be left out;
    about ``log₂ n`` measurements a cell found.

    Args:
        cells: All of them together reach the threshold.
        excess_of: Excess of a set; a set that was not measured yet raises ``NotMeasured``, which
            passes through.
        threshold: What is looked for.
    """
    kept: list[Cell] = []
    rest = list(cells)
    while rest and not (kept and excess_of(frozenset(kept)) >= threshold):
        low, high = 1, len(rest)
        while low < high:
            middle = (low + high) // 2
            if excess_of(frozenset([*kept, *rest[:middle]])) >= threshold:
                high = middle
            else:
                low = middle + 1
        kept.append(rest[low - 1])
        rest = rest[: low - 1]
    return tuple(kept)


def measured_interactions(
    singles: Mapping[Cell, float], seen: Sequence[Observation], sets: Collection[Cells]
) -> tuple[Interaction, ...]:
    """Return what measured sets of few cells add, beyond their cells' own and smaller sets' terms.

    Args:
        singles: Divergence of each cell alone.
        seen: What was measured.
        sets: The sets that are to be terms; those that were not measured are left out.
    """
    measured = {o.cells: o.divergence for o in seen}
    terms: dict[Cells, float] = {}
    for cells in sorted((s for s in sets if s in measured), key=lambda s: (len(s), sorted(s))):
        known = math.fsum(extra for inner, extra in terms.items() if inner < cells)
        terms[cells] = measured[cells] - _own(cells, singles) - known
    return tuple(Interaction(tuple(sorted(cells)), extra) for cells, extra in terms.items())


def _own(cells: Cells, singles: Mapping[Cell, float]) -> float:
    return math.fsum(singles.get(cell, 0.0) for cell in cells)
