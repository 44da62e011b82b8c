"""What a run ends with on the console: rich renderables, which only the command line prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qbench.report.comparison import compare_engines, dominance_words, front_table
from qbench.report.multiplicity import multiplicity_words
from qbench.report.plan_tables import shown_front, shown_rounds
from qbench.report.presentation import (
    Shown,
    agreement_words,
    shown_engines,
    shown_plan_counts,
    shown_sensitive,
)
from qbench.report.ranks import half_agreement
from qbench.report.remedy_tables import cause_words, remedy_words
from qbench.report.run_records import RunRecords
from qbench.report.tables import primary_metric, ranking_format
from qbench.report.trust_tables import call_words, floor_words
from qbench.report.uncovered import effort_words
from qbench.report.verdicts import VERDICT_TONE, verdict_of, verdict_words

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

#: Characters that the tables need to stand unbroken; give it to a console that is no terminal.
SUMMARY_WIDTH = 120
_TONE_STYLE = {"good": "bold green", "bad": "bold red", "open": "bold yellow"}


def run_summary(run: RunRecords, top: int = 10) -> Group:
    """Return the end of a run: sensitive layers, formats, engines, verdict, and where it loses.

    Parts that the run has no records for are left out.

    Args:
        run: The records.
        top: Number of sensitive layers; 0 leaves out everything about layers.
    """
    from rich.console import Group
    from rich.padding import Padding

    parts = [*_layer_parts(run, top), *_engine_parts(run), *_verdict_parts(run)]
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def plan_summary(run: RunRecords) -> Group:
    """Return what planning came to: the measured front, the formats chosen, and the verdict."""
    from rich.console import Group
    from rich.padding import Padding

    front = front_table(run.front, run.deciding, run.engines, run.plan)
    parts: list[RenderableType] = [rich_table(shown_front(front, short=True))] if len(front) else []
    if (rounds := shown_rounds(run.plan)).rows:
        parts.append(rich_table(rounds))
    if run.plan is not None:
        parts.append(rich_table(shown_plan_counts(run.plan)))
    parts += _verdict_parts(run)
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def rich_table(shown: Shown) -> Group:
    """Return a table for the console, under its caption (which may be wider than the table)."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in shown.columns:
        table.add_column(
            Text(column.heading),
            justify="right" if column.right else "left",
            overflow="fold",
            no_wrap=column.whole,
        )
    for index, row in enumerate(shown.rows):
        style = "bold" if index in shown.marked else ""
        table.add_row(*(Text(cell) for cell in row), style=style)
    return Group(Text(shown.caption), table)


def _layer_parts(run: RunRecords, top: int) -> list[RenderableType]:
    from rich.text import Text

    parts: list[RenderableType] = []
    if top and any(record.divergence is not None for record in run.sweep):
        parts.append(rich_table(shown_sensitive(run.sweep, top=top, others=False)))
        words = [
            multiplicity_words(run.sweep, primary_metric(run.sweep)),
            agreement_words(half_agreement(run.sweep)),
            cause_words(run.causes),
            remedy_words(run.sweep, run.remedies, run.plan),
            floor_words(run.noise),
            *call_words(run.noise, [ranking_format(run.sweep) or ""]),
        ]
        parts += [Text(text) for text in words if text]
    if top:
        parts += [Text(text) for text in effort_words(run)]
    if run.plan is not None and top:
        parts.append(rich_table(shown_plan_counts(run.plan)))
    return parts


def _engine_parts(run: RunRecords) -> list[RenderableType]:
    from rich.text import Text

    rows = compare_engines(run.judgements, run.engines, run.bench)
    if not rows:
        return []
    words = dominance_words(rows)
    parts: list[RenderableType] = [rich_table(shown_engines(rows))]
    if words:
        parts.append(Text("\n".join(f"• {sentence}" for sentence in words)))
    return parts


def _verdict_parts(run: RunRecords) -> list[RenderableType]:
    from rich.text import Text

    verdict = verdict_of(run)
    if verdict is None:
        return []
    head = Text(verdict.replace("_", " "), style=_TONE_STYLE[VERDICT_TONE[verdict]])
    body = Text("\n".join(verdict_words(run)))
    return [Text("Verdict: ").append_text(head).append("\n").append_text(body)]
