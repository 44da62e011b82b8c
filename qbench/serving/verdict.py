"""The verdict on an engine under the user's load: what it carries within the SLA, and the cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qbench.records import Estimate, from_dict
from qbench.serving.rate import Confirmation, RateFound, Sla

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class ServingVerdict:
    """What the search of rates came to; plain enough for ``run.json``.

    Attributes:
        sla_ms: The limit of latency.
        share: Share of requests that must keep it.
        arrivals: Process of the arrivals.
        reference: Name of the reference.
        engine: Name of the engine.
        rates: Highest rate that kept the SLA, by engine.
        gain: Rate of the engine over the reference's; its interval comes from the brackets of
            both searches. ``None`` where one of them kept the SLA at no rate.
        no_gain: Whether the engine was not shown to carry more than the reference.
        cost_per_million: Price of a million requests at that rate, by engine; empty without a
            price.
        words: The verdict in one sentence.
        searches: Every trial.
        confirmation: Trials of both in pairs at one rate, where the search showed a gain.
    """

    sla_ms: float
    share: float
    arrivals: str
    reference: str
    engine: str
    rates: Mapping[str, float]
    gain: Estimate | None
    no_gain: bool
    cost_per_million: Mapping[str, float]
    words: str
    searches: tuple[RateFound, ...]
    confirmation: Confirmation | None = None


def revive_verdict(said: Mapping[str, Any]) -> ServingVerdict | None:
    """Return a verdict from what was written of it; ``None`` if its trials lack percentiles."""
    trials = [trial for search in said.get("searches", ()) for trial in search["trials"]]
    if not all("p95_ms" in trial for trial in trials):
        return None
    return from_dict(ServingVerdict, said)


def cost_per_million(rate: float, price_per_hour: float) -> float:
    """Return the price of a million requests at a rate: infinite at no rate."""
    return math.inf if rate <= 0 else price_per_hour / (rate * _HOUR_S) * 1e6


def reach_verdict(
    reference: RateFound,
    engine: RateFound,
    sla: Sla,
    *,
    confirmation: Confirmation | None = None,
    arrivals: str = "poisson",
    price_per_hour: float | None = None,
) -> ServingVerdict:
    """Compare an engine with the reference.

    Args:
        reference: What the reference carries.
        engine: What the engine carries.
        sla: The promise to keep.
        confirmation: Pairs of trials; a gain that they do not show is none.
        arrivals: Process of the arrivals, for the record.
        price_per_hour: Price of the machine, any currency; ``None`` for no costs.
    """
    gain = _ratio(reference, engine)
    failed = reference.above is not None
    better = gain.low > 1.0 if gain is not None else failed and engine.rate > reference.rate
    better = better and (confirmation is None or confirmation.holds)
    price = price_per_hour
    costs = (
        {}
        if price is None
        else {one.name: cost_per_million(one.rate, price) for one in (reference, engine)}
    )
    return ServingVerdict(
        sla_ms=sla.limit_ms,
        share=sla.share,
        arrivals=arrivals,
        reference=reference.name,
        engine=engine.name,
        rates={one.name: one.rate for one in (reference, engine)},
        gain=gain,
        no_gain=not better,
        cost_per_million={name: cost for name, cost in costs.items() if math.isfinite(cost)},
        words=_words((reference, engine), sla, (gain, confirmation), better),
        searches=(reference, engine),
        confirmation=confirmation,
    )


def _ratio(reference: RateFound, engine: RateFound) -> Estimate | None:
    """Return the ratio of rates, bounded by what held and what did not."""
    if reference.rate <= 0 or engine.rate <= 0:
        return None
    high = math.inf if engine.above is None else engine.above / reference.rate
    low = 0.0 if reference.above is None else engine.rate / reference.above
    trials = len(reference.trials) + len(engine.trials)
    return Estimate(engine.rate / reference.rate, low, high, trials, 1.0, "search_bracket")


def _words(
    found: tuple[RateFound, RateFound],
    sla: Sla,
    shown: tuple[Estimate | None, Confirmation | None],
    better: bool,
) -> str:
    (reference, engine), (gain, confirmation) = found, shown
    promise = f"{100 * sla.share:g}% within {sla.limit_ms:g} ms"
    if any(one.rate <= 0 and one.generator_bound for one in found):
        return f"the load generator was too late to tell what keeps {promise}"
    if engine.rate <= 0 and reference.rate <= 0:
        least = min(one.rate for search in found for one in search.trials)
        return f"neither engine keeps {promise}, at {_per_second(least)} as little as at more"
    if confirmation is not None and not confirmation.holds:
        return f"no gain under this load: {_rates(found)} with {promise}, {_doubt(confirmation)}"
    if gain is None:
        one, other = (engine, reference) if better else (reference, engine)
        return f"{one.name} carries {_rate(one)} with {promise}; {other.name} never keeps it"
    if better:
        times = f"{gain.value:.2f}x" if engine.above is not None else f"{gain.value:.2f}x or more"
        gained = f"{engine.name} carries {times} the load of {reference.name}"
        return f"{gained}: {_rates(found)} with {promise}"
    return f"no gain under this load: {engine.name} carries {_rates(found)} with {promise}"


def _rates(found: tuple[RateFound, RateFound]) -> str:
    reference, engine = found
    return f"{_rate(engine)} against {_rate(reference)}"


def _rate(found: RateFound) -> str:
    """Say what an engine carries; where no higher rate failed it is a lower bound."""
    if found.above is not None:
        return _per_second(found.rate)
    why = "the load generator came no further" if found.generator_bound else "no more was tried"
    return f"at least {_per_second(found.rate)} ({why})"


def _doubt(pairs: Confirmation) -> str:
    where = f"side by side at {_per_second(pairs.rate)}"
    if pairs.against:
        return f"but {where} the reference kept it where the engine did not"
    return f"but {where} only {pairs.shown} of {len(pairs.engine)} pairs of trials showed it"


def _per_second(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s"
