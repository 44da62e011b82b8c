from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from serving_fakes import Summing, encode, pad

from qbench.errors import ConfigError
from qbench.serving.arrivals import Arrivals, Process
from qbench.serving.batcher import BatchLimits
from qbench.serving.openload import OpenLoop, OpenResult, Sent, drive_open
from qbench.serving.rate import (
    PAIRS,
    RateFound,
    RateSearch,
    RateTrial,
    Sla,
    confirm,
    judge_rate,
    search_rates,
)
from qbench.serving.request import Work
from qbench.serving.service import Service
from qbench.serving.targets import ServiceTarget
from qbench.serving.verdict import cost_per_million, reach_verdict


def trial(rate: float, kept: bool) -> RateTrial:
    return RateTrial(
        rate, kept, 1.0 if kept else 0.5, rate, None, None, None, {"ok": 10}, 0.1, False
    )


def searched(knee: float, start: float, tolerance: float = 0.05) -> tuple[RateSearch, int]:
    search, tries = RateSearch(start, tolerance=tolerance), 0
    while (rate := search.next_rate()) is not None:
        search.tell(rate, rate <= knee)
        tries += 1
        assert tries < 60
    return search, tries


@pytest.mark.parametrize("knee", [0.3, 7.0, 100.0, 101.0, 5000.0])
@pytest.mark.parametrize("start", [1.0, 90.0, 20_000.0])
def test_the_knee_is_found_to_the_tolerance_from_anywhere(knee, start):
    search, tries = searched(knee, start)
    assert search.kept <= knee < search.failed
    assert search.failed <= search.kept * 1.05
    assert tries <= 21 + math.log2(max(knee / start, 1)), "failures twice, and falls in long steps"


def test_an_engine_that_keeps_it_at_no_rate_or_at_all():
    none, _ = searched(0.0, 10.0)
    assert none.kept is None
    search = RateSearch(10.0, most=1000.0)
    while (rate := search.next_rate()) is not None:
        search.tell(rate, True)
    assert (search.kept, search.failed) == (1000.0, None)


def test_a_later_trial_that_contradicts_an_earlier_one_is_believed():
    search = RateSearch(100.0)
    search.tell(100.0, True)
    fail(search, 200.0)
    fail(search, 90.0)
    assert (search.kept, search.failed) == (None, 90.0)
    assert search.next_rate() == 45.0
    search.tell(120.0, True)
    assert (search.kept, search.failed) == (120.0, None)


def fail(search: RateSearch, rate: float) -> None:
    """Fail twice: once is doubted."""
    search.tell(rate, False)
    assert search.next_rate() == rate
    search.tell(rate, False)


def test_one_failure_is_doubted_and_may_be_taken_back():
    search = RateSearch(100.0)
    search.tell(100.0, False)
    assert search.next_rate() == 100.0 and search.failed is None
    search.tell(100.0, True)
    assert (search.kept, search.failed, search.next_rate()) == (100.0, None, 200.0)


def test_what_is_kept_at_no_rate_is_given_up_after_a_few_trials():
    search, rates = RateSearch(1000.0, least=1000 / 64), []
    while (rate := search.next_rate()) is not None:
        rates.append(rate)
        search.tell(rate, False)
    assert rates[::2] == [1000.0, 500.0, 125.0, 1000 / 64]


def test_engines_are_tried_in_turns():
    order = []

    def measure(name: str, knee: float):
        def run(rate: float) -> RateTrial:
            order.append(name)
            return trial(rate, rate <= knee)

        return run

    found = search_rates({"a": measure("a", 100), "b": measure("b", 210)}, 80.0)
    assert [one.name for one in found] == ["a", "b"]
    assert order[:8] == ["a", "b"] * 4
    assert found[0].rate <= 100 < found[0].above
    assert found[1].rate <= 210 < found[1].above


def test_what_is_refused_was_not_answered_within_any_limit():
    sent = [Sent(i / 10, i / 10, i / 10 + 0.01, "ok") for i in range(97)]
    sent += [Sent(9.7 + i / 10, 9.7 + i / 10, 9.8, "refused") for i in range(3)]
    result = OpenResult(tuple(sent), 10.0, 10.0, 0.0, "time", {"ok": 97, "refused": 3})
    judged = judge_rate(10.0, result, Sla(50.0))
    assert (judged.kept, judged.within) == (False, 0.97)
    assert judge_rate(10.0, result, Sla(50.0, 0.95)).kept
    assert judged.p99_ms.value == pytest.approx(10.0)


def test_a_generator_that_is_late_is_named():
    sent = tuple(Sent(i / 10, i / 10 + 0.02, i / 10 + 0.03, "ok") for i in range(20))
    result = OpenResult(sent, 10.0, 2.0, 0.0, "time", {"ok": 20})
    assert judge_rate(10.0, result, Sla(50.0)).generator_late
    assert not judge_rate(10.0, result, Sla(500.0)).generator_late


def test_the_rate_of_a_real_service_is_found_and_the_quicker_engine_carries_more():
    limits = BatchLimits(max_batch=1, queue=64)  # an engine of 1/overhead a second
    work = Work(pad)
    payloads = encode(["abcdefgh"] * 8)
    services = {
        "slow": Service([Summing(0.02)], work, limits),
        "quick": Service([Summing(0.005)], work, limits),
    }
    sla = Sla(100.0, 0.9)

    def measure(name: str):
        def run(rate: float) -> RateTrial:
            load = OpenLoop(Arrivals(rate, Process.CONSTANT), 0.6, 0.1, drain_s=5.0)
            result = drive_open(ServiceTarget(services[name]), payloads, load)
            return judge_rate(rate, result, sla)

        return run

    found = search_rates({name: measure(name) for name in services}, 30.0, tolerance=0.4)
    for service in services.values():
        service.drain()
    slow, quick = found
    assert 15 <= slow.rate <= 75
    assert quick.rate > 1.5 * slow.rate
    verdict = reach_verdict(slow, quick, sla, price_per_hour=1.0)
    assert not verdict.no_gain and verdict.gain.low > 1
    assert verdict.cost_per_million["quick"] < verdict.cost_per_million["slow"]


def noisy(knee: float, chance: float, rng: np.random.Generator):
    """Return a server that carries ``knee`` on a machine that spoils some trials."""
    return lambda rate: trial(rate, rate <= knee and rng.random() > chance)


def compare(slow: float, quick: float, chance: float, seed: int):
    rng = np.random.default_rng(seed)
    measures = {"reference": noisy(slow, chance, rng), "plan": noisy(quick, chance, rng)}
    reference, engine = search_rates(measures, 70.0, most_trials=24)
    confirmation = confirm((reference, measures["reference"]), (engine, measures["plan"]))
    return reach_verdict(reference, engine, Sla(50.0), confirmation=confirmation)


def test_two_alike_on_a_busy_machine_are_no_gain():
    """One spoilt trial ended a search too low: a ninth of such verdicts told of gains, up to 6x."""
    said = [compare(100.0, 100.0, 0.1, seed) for seed in range(200)]
    assert sum(not one.no_gain for one in said) <= 2
    doubted = [one for one in said if one.confirmation is not None]
    assert all("side by side at" in one.words for one in doubted if one.no_gain)


def test_a_real_gain_is_confirmed():
    said = [compare(100.0, 130.0, 0.0, seed) for seed in range(20)]
    assert not any(one.no_gain for one in said)
    assert all(one.confirmation.shown == PAIRS for one in said)
    assert all(100 < one.confirmation.rate < 130 for one in said)


def test_pairs_that_tell_nothing_are_no_gain_and_no_loss():
    """Both keep it, then both break it, then the engine alone keeps it: five of those show it."""
    outcomes = iter([(True, True), (False, False), *[(True, False)] * 5])
    said: list[bool] = []

    def measure(rate: float) -> RateTrial:
        if not said:
            said.extend(next(outcomes))
        return trial(rate, said.pop(0))

    slow, quick = found("reference", 100.0, 105.0), found("plan", 130.0, 136.0)
    pairs = confirm((slow, measure), (quick, measure))
    assert (pairs.shown, pairs.against, len(pairs.engine), pairs.holds) == (5, 0, 7, True)
    outcomes = iter([(True, False), (False, True)])
    pairs = confirm((slow, measure), (quick, measure))
    assert (pairs.shown, pairs.against, pairs.holds) == (1, 1, False)
    outcomes = iter([(True, True)] * 10)
    pairs = confirm((slow, measure), (quick, measure))
    assert (pairs.shown, len(pairs.engine), pairs.holds) == (0, 6, False)


def test_a_late_generator_says_nothing_of_a_server():
    """Requests leave 60 ms late and are answered in 10: the promise of 50 ms is broken by us."""
    sent = tuple(Sent(i / 10, i / 10 + 0.06, i / 10 + 0.07, "ok") for i in range(20))
    result = OpenResult(sent, 10.0, 2.0, 0.0, "time", {"ok": 20})
    judged = judge_rate(10.0, result, Sla(50.0))
    assert (judged.kept, judged.generator_late, judged.inconclusive) == (False, True, True)
    slow = tuple(Sent(i / 10, i / 10 + 0.06, i / 10 + 0.2, "ok") for i in range(20))
    judged = judge_rate(10.0, OpenResult(slow, 10.0, 2.0, 0.0, "time", {"ok": 20}), Sla(50.0))
    assert judged.generator_late and not judged.inconclusive, "it is the server that is slow"


def test_where_the_generator_ends_the_search_the_rate_is_a_lower_bound():
    def measure(rate: float) -> RateTrial:
        return replace(trial(rate, rate <= 100), inconclusive=rate > 100)

    (bound,) = search_rates({"plan": measure}, 80.0, most_trials=24)
    assert bound.rate <= 100 and bound.above is None and bound.generator_bound
    clear = found("reference", 50.0, 52.0)
    said = reach_verdict(clear, bound, Sla(50.0))
    assert "x or more the load of reference" in said.words
    assert "at least" in said.words and "load generator" in said.words
    other = reach_verdict(replace(bound, name="reference"), found("plan", 200.0, 210.0), Sla(50.0))
    assert other.no_gain and "at least" in other.words
    blind = RateFound("reference", 0.0, None, (replace(trial(10.0, False), inconclusive=True),))
    said = reach_verdict(blind, found("plan", 200.0, 210.0), Sla(50.0))
    assert said.no_gain and "load generator was too late to tell" in said.words


def test_a_server_that_falls_behind_breaks_every_promise_in_the_end():
    """Twice what it carries: after two seconds the last waits for one, within a promise of two."""
    sent = tuple(Sent(i / 100, i / 100, 0.01 + i / 50, "ok") for i in range(200))
    result = OpenResult(sent, 100.0, 2.0, 0.0, "time", {"ok": 200})
    assert result.drift == pytest.approx(1.0)
    assert result.within(2000.0) == 1.0
    assert not judge_rate(100.0, result, Sla(2000.0), steady=True).kept
    assert judge_rate(100.0, result, Sla(2000.0)).kept, "bursts and traces come and go"


def found(name: str, rate: float, above: float | None) -> RateFound:
    return RateFound(name, rate, above, (trial(rate, True),))


def test_the_verdict_names_the_gain_and_its_bracket():
    verdict = reach_verdict(
        found("reference", 100.0, 105.0),
        found("plan", 200.0, 210.0),
        Sla(50.0),
        price_per_hour=0.36,
    )
    assert (verdict.gain.value, verdict.gain.low, verdict.gain.high) == (
        2.0, pytest.approx(200 / 105), 2.1,
    )  # fmt: skip
    assert not verdict.no_gain
    assert verdict.words.startswith("plan carries 2.00x the load of reference: 200/s against 100/s")
    assert verdict.cost_per_million == {"reference": pytest.approx(1.0), "plan": pytest.approx(0.5)}


def test_what_the_brackets_do_not_tell_apart_is_no_gain():
    verdict = reach_verdict(
        found("reference", 100.0, 105.0), found("plan", 103.0, 108.0), Sla(50.0)
    )
    assert verdict.no_gain and verdict.words.startswith("no gain under this load")
    assert verdict.cost_per_million == {}
    slower = reach_verdict(found("reference", 100.0, 105.0), found("plan", 50.0, 52.0), Sla(50.0))
    assert slower.no_gain and slower.gain.high < 1


def test_engines_that_never_keep_the_promise():
    none = RateFound("reference", 0.0, 0.05, (trial(0.05, False),))
    both = reach_verdict(none, replace(none, name="plan"), Sla(1.0), price_per_hour=1.0)
    assert both.no_gain and both.gain is None and both.cost_per_million == {}
    assert "neither engine keeps 99% within 1 ms, at 0.05/s" in both.words
    only = reach_verdict(none, found("plan", 10.0, 11.0), Sla(1.0))
    assert not only.no_gain and "reference never keeps it" in only.words


def test_costs():
    assert cost_per_million(1000.0, 3.6) == pytest.approx(1.0)
    assert cost_per_million(0.0, 3.6) == math.inf


@pytest.mark.parametrize(
    ("limit", "share"), [(0.0, 0.99), (float("nan"), 0.99), (5.0, 0.0), (5.0, 1.1)]
)
def test_promises_that_say_nothing_are_refused(limit, share):
    with pytest.raises(ConfigError):
        Sla(limit, share)


def test_a_rate_to_begin_with_is_needed():
    with pytest.raises(ConfigError, match="start is 0"):
        RateSearch(0.0)
