"""What engines carry within the user's SLA: the verdict under load, in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qbench.report.presentation import DASH, Column, Shown
from qbench.report.wording import estimate, interval, number
from qbench.serving.rate import PAIRS, RateFound, RateTrial
from qbench.serving.verdict import ServingVerdict, revive_verdict


def verdict_under_load(facts: Mapping[str, Any]) -> ServingVerdict | None:
    """Return the verdict under load that ``run.json`` tells; ``None`` where no SLA was searched."""
    said = facts.get("serving")
    return revive_verdict(said) if isinstance(said, Mapping) else None


def load_words(verdict: ServingVerdict) -> list[str]:
    """Say what the search came to, and what to do."""
    promise = f"{verdict.share:.0%} of all requests answered within {verdict.sla_ms:g} ms"
    words = [f"Asked for: {promise}, {_ARRIVALS.get(verdict.arrivals, verdict.arrivals)}."]
    words.append(_sentence(verdict.words))
    if verdict.gain is not None:
        gain = verdict.gain
        words.append(
            f"Ratio of the two rates: {number(gain.value)} {interval(gain.low, gain.high)}, "
            "bounded by the highest rate that held and the lowest that did not."
        )
    if verdict.confirmation is not None:
        pairs = verdict.confirmation
        words.append(
            f"Side by side at {number(pairs.rate)} requests/s, {verdict.engine} kept it and "
            f"{verdict.reference} broke it in {pairs.shown} of {len(pairs.engine)} pairs of "
            f"trials, and the other way round in {pairs.against}; a gain needs {PAIRS} and none."
        )
    return words


def load_badge(verdict: ServingVerdict) -> tuple[str, str]:
    """Return the verdict in a word or two, and how good news it is."""
    if not any(verdict.rates.values()):
        return "SLA not kept", "bad"
    if verdict.no_gain:
        return "no gain: do not quantize for this load", "open"
    return "gain under load", "good"


def shown_rates(verdict: ServingVerdict) -> Shown:
    """Return what each engine carries, with its latencies at that rate."""
    prices = bool(verdict.cost_per_million)
    columns = [
        Column("engine", right=False),
        Column("keeps it up to, requests/s"),
        Column("fails at"),
        Column("P50, ms [95 %]"),
        Column("P95, ms [95 %]"),
        Column("P99, ms [95 %]"),
        Column("within it"),
    ]
    if prices:
        columns.append(Column("cost a million"))
    rows = []
    for found in verdict.searches:
        cost = verdict.cost_per_million.get(found.name)
        rows.append(_rate_row(found) + ((number(cost),) if prices else ()))
    caption = (
        "The SLA by engine; latencies at the highest rate that keeps it, from when each was due"
    )
    return Shown(caption, tuple(columns), tuple(rows))


def shown_trials(verdict: ServingVerdict) -> Shown:
    """Return every rate that was tried, the pairs side by side last."""
    headings = ("asked for, requests/s", "offered", "answered", "within it", "P50, ms [95 %]")
    columns = [Column("engine", right=False), *map(Column, headings)]
    columns += [Column("P99, ms [95 %]"), Column("held", right=False)]
    rows = tuple(
        (
            name,
            number(trial.rate),
            number(trial.offered_rps),
            number(trial.goodput_rps),
            f"{trial.within:.1%}",
            estimate(trial.p50_ms),
            estimate(trial.p99_ms),
            ("yes" if trial.kept else "no") + _LATE * trial.generator_late,
        )
        for name, trial in _trials(verdict)
    )
    return Shown("Every rate that was tried, in order", tuple(columns), rows)


def _trials(verdict: ServingVerdict) -> Iterator[tuple[str, RateTrial]]:
    """Yield (engine, trial) of the searches, and of the pairs after them."""
    for found in verdict.searches:
        for trial in found.trials:
            yield found.name, trial
    if verdict.confirmation is not None:
        pairs = verdict.confirmation
        for reference, engine in zip(pairs.reference, pairs.engine, strict=True):
            yield verdict.engine, engine
            yield verdict.reference, reference


_BOUND = "≥ "
_LATE = " (the generator itself was late)"
_ARRIVALS = {
    "poisson": "requests coming at random (Poisson)",
    "constant": "requests coming at a constant pace",
    "bursts": "requests coming in bursts",
    "trace": "requests coming as recorded",
}


def _rate_row(found: RateFound) -> tuple[str, ...]:
    held = found.held
    times = (None, None, None) if held is None else (held.p50_ms, held.p95_ms, held.p99_ms)
    return (
        found.name,
        "none" if held is None else _BOUND * (found.above is None) + number(found.rate),
        number(found.above),
        *(estimate(one) for one in times),
        DASH if held is None else f"{held.within:.1%}",
    )


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + "."
