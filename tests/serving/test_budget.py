from __future__ import annotations

import time

import pytest
from serving_fakes import encode, pad

from qbench.serving.budget import calibrate_budget


def costing(seconds_of):
    """Return an engine whose batch of (requests, length) takes ``seconds_of`` them."""

    def run(feeds):
        end_s = time.perf_counter() + seconds_of(*feeds["ids"].shape)
        while time.perf_counter() < end_s:
            pass
        return {}

    return run


REQUESTS = encode(["a" * length for length in (4, 8, 8, 8, 16)])


def test_a_device_that_batches_well_gets_a_large_budget():
    choice = calibrate_budget(
        costing(lambda batch, length: 0.001), pad, REQUESTS, candidates=(16, 64, 256)
    )
    assert choice.token_budget == 256
    assert choice.requests_per_s[256] > choice.requests_per_s[16]


def test_a_device_on_which_batches_pay_nothing_gets_the_smallest():
    choice = calibrate_budget(
        costing(lambda batch, length: 1e-5 * (batch * length) ** 1.3),
        pad,
        REQUESTS,
        candidates=(16, 64, 128),
    )
    assert choice.token_budget == 16


def test_the_grid_is_kept():
    choice = calibrate_budget(
        costing(lambda batch, length: 1e-4), pad, REQUESTS, candidates=(16, 32), repeats=2
    )
    assert {(cell.batch, cell.length) for cell in choice.grid} == {
        (1, 4), (2, 4), (4, 4), (8, 4), (1, 8), (2, 8), (4, 8), (1, 16), (2, 16),
    }  # fmt: skip
    assert all(cell.best_ms >= 0.1 for cell in choice.grid)
    assert set(choice.requests_per_s) == {16, 32}


def test_requests_longer_than_every_budget_are_measured_alone():
    choice = calibrate_budget(
        costing(lambda batch, length: 1e-4), pad, encode(["a" * 100]), candidates=(16, 64)
    )
    assert [(cell.batch, cell.length) for cell in choice.grid] == [(1, 100)]
    assert choice.token_budget == 16
    assert choice.requests_per_s[16] == pytest.approx(choice.requests_per_s[64])


def test_on_a_slow_device_one_round_counts_and_no_more_begin():
    calls = []

    def run(feeds):
        calls.append(feeds["ids"].shape)
        time.sleep(0.002)
        return {}

    choice = calibrate_budget(run, pad, encode(["abcd"]), candidates=(8,), limit_s=0.0)
    assert calls == [(1, 4), (2, 4)] * 2
    assert all(cell.best_ms >= 2.0 for cell in choice.grid)
