"""What was built, in words: formats asked for and realised, kernels, serialized engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qbench.records import EngineReport
from qbench.report.presentation import DASH, Column, Shown, plain
from qbench.report.wording import listed, number, rewritten_words, serialized_words

_HEADINGS = (
    "engine", "asked for", "realised", "operators after optimisation", "inserted casts",
    "largest output difference", "self-test", "fallbacks", "masks", "serialized",
)  # fmt: skip
_LONG = ("asked for", "realised", "operators after optimisation", *_HEADINGS[6:])


def shown_built(reports: Iterable[EngineReport]) -> Shown:
    """Return what was asked for and what the runtime made of it."""
    rows = [
        (
            report.name,
            plain(report.asked),
            plain(report.realised),
            _kernels(report.kernels),
            f"{report.casts:,}",
            number(report.max_abs_diff),
            report.self_test or DASH,
            "; ".join(f"{f.layer}: {f.asked} → {f.realised}, {f.reason}" for f in report.fallbacks)
            or DASH,
            rewritten_words(report.rewritten) or DASH,
            serialized_words(report.serialized) or DASH,
        )
        for report in reports
    ]
    numbers = ("inserted casts", "largest output difference")
    columns = tuple(Column(h, h in numbers, h in _LONG) for h in _HEADINGS)
    caption = "Layers by format, read back from the runtime's optimised graph"
    return Shown(caption, columns, tuple(rows))


def _kernels(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return listed([f"{count} {name}" for name, count in ordered]) if ordered else DASH
