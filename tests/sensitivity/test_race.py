"""The race's state machine: what is due, what stops and why, and how often it errs."""

from __future__ import annotations

import numpy as np
import pytest

from qbench.records import Estimate
from qbench.sensitivity.race import FELLOWS, Fate, Job, LookTable, Race, Rules, weigh

CHEAP, DEAR = ("a", "int8"), ("b", "int8")
FULL = Estimate(0.5, 0.4, 0.6, 230)


def rules(*samples: int, **changed: float) -> Rules:
    return Rules(samples, (1.0,) * len(samples), **changed)  # type: ignore[arg-type]


def skewed(mean: float, n: int, seed: int = 0) -> np.ndarray:
    """Return divergences with a long tail, as they are."""
    return mean * np.random.default_rng(seed).gamma(1.0, 1.0, n)


def tell_all(race: Race, means: dict[tuple[str, str], float], n: int) -> None:
    for at, (cell, mean) in enumerate(means.items()):
        race.tell(cell, skewed(mean, n, at).tolist())


def test_every_cell_is_looked_at_first() -> None:
    race = Race([CHEAP, DEAR], rules(8, 24))
    assert race.due() == (Job(CHEAP, 0), Job(DEAR, 0))


def test_a_cell_that_saves_nothing_is_taken_by_no_plan() -> None:
    race = Race([CHEAP, DEAR], rules(8))
    tell_all(race, {CHEAP: 1e-3, DEAR: 1e-3}, 8)
    stopped = race.settle({CHEAP: 1.0, DEAR: -0.5})
    assert stopped[DEAR] is Fate.HARMFUL


def test_a_cell_that_another_format_beats_at_less_divergence_is_taken_by_no_plan() -> None:
    better, worse = ("a", "w8a16"), ("a", "int8")
    race = Race([better, worse], rules(24))
    tell_all(race, {better: 1e-6, worse: 1e-2}, 24)
    assert race.settle({better: 1.0, worse: 0.9})[worse] is Fate.HARMFUL


def test_a_trace_of_divergence_is_harmless() -> None:
    names = [(f"layer.{i}", "int8") for i in range(20)]
    race = Race(names, rules(24))
    means = dict.fromkeys(names, 1e-2) | {names[0]: 1e-9}
    tell_all(race, means, 24)
    assert race.settle(dict.fromkeys(names, 1.0))[names[0]] is Fate.HARMLESS


def test_borderline_cells_are_looked_at_again_and_at_last_in_full() -> None:
    race = Race([CHEAP, DEAR], rules(8, 24, tolerance=0.0))
    savings = {CHEAP: 1.0, DEAR: 0.7}
    for look, n in enumerate((8, 24)):
        assert {job.look for job in race.due()} == {look}
        tell_all(race, {CHEAP: 1e-3, DEAR: 1e-3}, n)
        assert not race.settle(savings)
    assert {job.look for job in race.due()} == {None}
    race.finish(CHEAP, FULL)
    race.finish(DEAR, FULL)
    assert race.due() == ()
    assert race.fate(CHEAP) is Fate.FULL
    assert race.estimate(CHEAP) is FULL


def look_intervals(rows: np.ndarray, level: float) -> np.ndarray:
    table = LookTable({(str(at), ""): row for at, row in enumerate(rows)})
    return np.array([table.interval((str(at), ""), level) for at in range(len(rows))])


def test_most_at_stake_comes_first() -> None:
    small, large = ("a", "int8"), ("b", "int8")
    race = Race([small, large], rules(8, 24, tolerance=0.0))
    tell_all(race, {small: 1e-3, large: 1e-3}, 8)
    race.settle({small: 0.1, large: 5.0})
    assert [job.cell for job in race.due()][0] == large


def test_a_cell_that_cannot_be_measured_is_closed() -> None:
    race = Race([CHEAP], rules(8))
    race.finish(CHEAP, None)
    assert race.fate(CHEAP) is Fate.CLOSED
    assert race.due() == ()
    assert race.estimate(CHEAP) is None


def test_the_scale_learns_from_cells_measured_both_ways() -> None:
    race = Race([CHEAP, DEAR], rules(8))
    race.tell(CHEAP, [1.0, 1.0, 1.0, 1.0])
    race.tell(DEAR, [2.0, 2.0, 2.0, 2.0])
    assert race.scale(0) == 1.0
    race.finish(CHEAP, Estimate(4.0, 3.0, 5.0, 230))
    assert race.scale(0) == pytest.approx(2.0)  # one cell at 4 beside the start at 1
    estimate = race.estimate(DEAR)
    assert estimate is not None
    assert estimate.value == pytest.approx(4.0)
    assert estimate.method == "sub_pool"


def test_no_change_is_not_taken_for_certain() -> None:
    low, mean, high = look_intervals(np.array([[0.0] * 8, [0.5] * 8]), 0.95)[0]
    assert low == mean == 0.0
    assert 0.0 < high < 0.5


def test_what_all_cells_share_is_no_error() -> None:
    easy_or_hard = np.array([0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 0.2, 0.7])
    means = np.array([1.0, 3.0, 0.1, 7.0, 2.0, 0.4])
    assert len(means) > FELLOWS
    ends = look_intervals(means[:, None] * easy_or_hard, 0.95)
    np.testing.assert_allclose(ends[:, 0], ends[:, 2])
    alone = look_intervals(easy_or_hard[None], 0.95)[0]
    assert alone[2] > 2 * alone[1]


def test_one_sample_that_carries_all_leaves_the_rest_unknown() -> None:
    rows = np.array([[1.0, 0, 0, 0, 0, 0, 0, 0], *[[0.1] * 8] * 6])
    low, mean, high = look_intervals(rows, 0.95)[0]
    assert low < 0.01 * mean
    assert high > 100 * mean
    assert np.isfinite(high)


def test_stakes_are_shares_and_none_without_a_saving() -> None:
    ends = np.array([[0.5e-3, 1e-3, 2e-3]] * 2)
    none = weigh(["a", "b"], np.array([-1.0, 0.0]), ends, 8)
    assert not none.taken.any()
    assert not none.regret.any()
    one = weigh(["a", "b"], np.array([3.0, 1.0]), ends, 8)
    assert (weigh(["a", "b"], np.array([30.0, 10.0]), ends, 8).regret == one.regret).all()


def misses(level: float, races: int, shape: float, own: float) -> float:
    """Return the share of cells whose interval missed the truth at any of three nested looks.

    Divergence of a cell on a sample: the cell's mean, times how hard the sample is for all (gamma,
    skewed as real ones are), times what is between the two of them (log-normal).
    """
    rng = np.random.default_rng(1)
    missed = []
    for _ in range(races):
        truth = np.exp(rng.normal(-7, 2, 40))
        hard = rng.gamma(shape, 1 / shape, 64)
        rows = truth[:, None] * hard * np.exp(rng.normal(-(own**2) / 2, own, (40, 64)))
        out = np.zeros(40, bool)
        for n in (8, 24, 64):
            ends = look_intervals(rows[:, :n], level)
            common = np.exp(np.log(ends[:, 1] / truth).mean())
            out |= (ends[:, 0] > truth * common) | (ends[:, 2] < truth * common)
        missed.append(out.mean())
    return float(np.mean(missed))


@pytest.mark.parametrize(("shape", "own"), [(0.6, 0.3), (1.0, 0.3), (1.0, 0.5), (2.0, 0.3)])
def test_looks_are_paid_for(shape: float, own: float) -> None:
    """Over all looks at a cell, the truth leaves the interval in about 5 % of races, not more."""
    paid = misses(rules(8, 24, 64).look_level, 40, shape, own)
    assert paid <= 0.05 + 0.02  # 1,600 cells, those of one race alike


def test_unpaid_looks_would_err_more_often() -> None:
    assert misses(0.95, 20, 1.0, 0.3) > 0.05 + 0.02


def test_wrong_stops_are_rare() -> None:
    """Of cells that stop, few lose more than the tolerance by what their layer then takes.

    Thirty layers with two formats each; the truth is known, the race sees samples of it.
    """
    rng = np.random.default_rng(3)
    wrong = stopped = 0
    for _ in range(12):
        cells = [(f"layer.{i}", name) for i in range(30) for name in ("int8", "w4a16")]
        truth = dict(zip(cells, np.exp(rng.normal(-7, 1.5, 60)), strict=True))
        savings = dict(zip(cells, rng.uniform(0.2, 1.0, 60), strict=True))
        race = Race(cells, rules(8, 24))
        samples = {cell: truth[cell] * rng.gamma(1.0, 1.0, 24) for cell in cells}
        for n in (8, 24):
            for job in race.due():
                race.tell(job.cell, samples[job.cell][:n].tolist())
            race.settle(savings)
        ends = np.array([[truth[c]] * 3 for c in cells])
        for at, cell in enumerate(cells):
            fate, estimate = race.fate(cell), race.estimate(cell)
            if fate is Fate.OPEN or estimate is None:
                continue
            stopped += 1
            ends[at] = truth[cell], estimate.value, truth[cell]
            stakes = weigh([c[0] for c in cells], np.array(list(savings.values())), ends, 8)
            wrong += bool(stakes.regret[at] > race.rules.tolerance)
            ends[at] = truth[cell]
    assert stopped > 200
    assert wrong / stopped <= 0.05
