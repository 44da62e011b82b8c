"""Pieces of an HTML page; every text from a run passes through ``escape``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from qbench.report.presentation import Column, Shown


def paragraph(text: str, css: str = "") -> str:
    """Return a paragraph; nothing for an empty text."""
    return f"<p{_class(css)}>{escape(text)}</p>" if text else ""


def bullets(texts: Iterable[str], css: str = "") -> str:
    """Return a list; nothing for no texts."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul{_class(css)}>{items}</ul>" if items else ""


def section(anchor: str, heading: str, *parts: str) -> str:
    """Return a section with its heading; nothing where all parts are empty."""
    body = "\n".join(part for part in parts if part)
    if not body:
        return ""
    return f'<section id="{escape(anchor)}">\n<h2>{escape(heading)}</h2>\n{body}\n</section>'


def folded(summary: str, body: str) -> str:
    """Return a part that opens on a click; print shows it closed."""
    return f"<details><summary>{escape(summary)}</summary>\n{body}\n</details>" if body else ""


def table(shown: Shown) -> str:
    """Return a table that scrolls by itself where it is too wide; nothing without rows."""
    if not shown.rows:
        return ""
    head = "".join(
        f'<th scope="col"{_class(_cell_class(column))}>{escape(column.heading)}</th>'
        for column in shown.columns
    )
    body = "\n".join(_row(shown, index) for index in range(len(shown.rows)))
    caption = f"<caption>{escape(shown.caption)}</caption>" if shown.caption else ""
    return (
        f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _row(shown: Shown, index: int) -> str:
    cells = "".join(
        f"<td{_class(_cell_class(column))}>{escape(cell)}</td>"
        for column, cell in zip(shown.columns, shown.rows[index], strict=True)
    )
    return f"<tr{_class('marked' if index in shown.marked else '')}>{cells}</tr>"


def _cell_class(column: Column) -> str:
    return "num" if column.right else ("long" if column.wrap else "")


def side_by_side(*parts: str) -> str:
    """Return parts beside each other where there is room."""
    return f'<div class="beside">{"".join(f"<div>{part}</div>" for part in parts if part)}</div>'


def cards(facts: Iterable[tuple[str, str, str]]) -> str:
    """Return key figures: (what, number, condition) each."""
    items = "".join(
        f'<div class="card"><span class="what">{escape(what)}</span>'
        f'<span class="number">{escape(value)}</span>'
        f'<span class="note">{escape(note)}</span></div>'
        for what, value, note in facts
    )
    return f'<div class="cards">{items}</div>' if items else ""


def definitions(facts: Mapping[str, Any]) -> str:
    """Return nested facts as a list of names and values; nested ones are indented."""
    items = "".join(_definition(str(key), value) for key, value in facts.items())
    return f"<dl>{items}</dl>" if items else ""


def _definition(key: str, value: Any) -> str:
    name = escape(key.replace("_", " "))
    if isinstance(value, Mapping) and value:
        return f"<dt>{name}</dt><dd>{definitions(value)}</dd>"
    return f"<dt>{name}</dt><dd>{escape(_scalar(value))}</dd>"


def _scalar(value: Any) -> str:
    if value is None or value == "" or value == {} or value == []:
        return "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(_scalar(item) for item in value)
    if isinstance(value, (Mapping, bool)):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def figure(name: str) -> str:
    """Return the place where the page's script draws the figure ``name``."""
    return (
        f'<figure id="figure-{escape(name)}"><div class="scroll">'
        f'<div class="drawing" data-figure="{escape(name)}"></div></div></figure>'
    )


def json_script(identity: str, content: Any) -> str:
    """Return JSON inside a script element; no text in it can end the element."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return f'<script type="application/json" id="{escape(identity)}">{safe}</script>'


def _class(name: str) -> str:
    return f' class="{escape(name)}"' if name else ""
