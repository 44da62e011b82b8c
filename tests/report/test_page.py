from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from qbench.errors import InputError
from qbench.records import Judgement, Verdict
from qbench.report import markup
from qbench.report.page import write_report
from qbench.report.presentation import Column, Shown
from qbench.report.run_records import RunRecords
from qbench.report.verdicts import key_figures, verdict_of, verdict_words
from qbench.testing.browser import open_page
from qbench.testing.runs import ODD_NAME

_SECTIONS = ["verdict", "engines", "plan", "sensitivity", "trust", "ranges", "front",
             "latency", "uncovered", "provenance"]  # fmt: skip


class Outline(HTMLParser):
    """What a browser would make of a page, as far as these tests need it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: list[str] = []
        self.tags: set[str] = set()
        self.loads: list[str] = []
        self.json: dict[str, str] = {}
        self.text: list[str] = []
        self._script = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.add(tag)
        self.loads += [str(found[k]) for k in ("src", "href", "data", "action") if k in found]
        if tag == "section":
            self.sections.append(str(found.get("id")))
        if tag == "script":
            self._script = str(found.get("id") or "")
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.json[self._script] = data
        else:
            self.text.append(data)


@pytest.fixture(scope="module")
def outline(page: str) -> Outline:
    return Outline(page)


def test_page_is_well_formed_and_has_every_section(outline: Outline) -> None:
    assert outline.open == []
    assert outline.sections == _SECTIONS


def test_page_loads_nothing(outline: Outline, page: str) -> None:
    assert all(target.startswith("#") for target in outline.loads)
    assert not re.search(r"@import|url\(", page.partition("</style>")[0])
    assert "default-src 'none'" in page
    assert len(page.encode()) < 3_000_000


def test_page_holds_the_specification_of_every_figure(
    outline: Outline, specs: dict[str, dict[str, Any]]
) -> None:
    held = {key.removeprefix("spec-"): value for key, value in outline.json.items()
             if key.startswith("spec-")}  # fmt: skip
    assert {name: json.loads(text) for name, text in held.items()} == specs


def test_page_escapes_names_from_the_run(outline: Outline, page: str) -> None:
    assert ODD_NAME in outline.text, "shown as it is"
    assert ODD_NAME not in page, "and never raw in the source"
    assert "b" not in outline.tags


def test_page_says_what_is_noise_and_where_the_plan_loses(outline: Outline) -> None:
    text = "\n".join(outline.text)
    assert "~ is noise: the interval of the drop holds 0" in text
    assert "here the plan does not dominate" in text
    assert "Agreement of two halves of the sweep split" in text


def test_page_of_a_run_that_only_began(tmp_path: Path) -> None:
    missing = {"sweep": "no sweep.jsonl yet; `qbench sweep` makes it"}
    path = write_report(RunRecords("just-begun", missing=missing), tmp_path / "report.html")
    outline = Outline(path.read_text(encoding="utf-8"))
    assert outline.sections == ["verdict", "uncovered"]
    text = "\n".join(outline.text)
    assert "Nothing was verified yet" in text
    assert "`qbench sweep` makes it" in text


def test_table_escapes_and_marks() -> None:
    shown = Shown("a < b", (Column("<x>", right=False), Column("n")), (("&", "1"),), (0,))
    html = markup.table(shown)
    assert "a &lt; b" in html and "&lt;x&gt;" in html and "<td>&amp;</td>" in html
    assert '<tr class="marked">' in html and '<td class="num">1</td>' in html
    assert markup.table(replace(shown, rows=())) == ""


def test_json_cannot_end_its_script() -> None:
    html = markup.json_script("x", {"name": "</script><!--\u2028"})
    assert html.count("<") == 2
    inner = html.partition(">")[2].rpartition("<")[0]
    assert json.loads(inner) == {"name": "</script><!--\u2028"}


def test_definitions_nest() -> None:
    html = markup.definitions({"a_b": {"c": [1, "<"]}, "none": None})
    assert html == (
        "<dl><dt>a b</dt><dd><dl><dt>c</dt><dd>1, &lt;</dd></dl></dd><dt>none</dt><dd>–</dd></dl>"
    )


def plan_judgement(records: RunRecords) -> Judgement:
    return next(j for j in records.judgements if j.engine == "plan")


def test_verdict_comes_from_the_run_or_from_the_plan(records: RunRecords) -> None:
    assert verdict_of(records) is Verdict.VERIFIED
    recorded = replace(records, facts={"verdict": "no_gain"})
    assert verdict_of(recorded) is Verdict.NO_GAIN
    assert verdict_of(RunRecords("empty")) is None


def test_verdict_words_say_how_many_samples_would_do(records: RunRecords) -> None:
    open_one = replace(
        plan_judgement(records), verdict=Verdict.NOT_RESOLVABLE, n_needed=7500, remark="Look."
    )
    said = verdict_words(replace(records, judgements=(open_one,)))
    assert f"This is not resolvable at n = {open_one.n}; about 7,500 would do." in said
    assert said[-1] == "Look."


def test_verdict_words_of_stages_are_said_once(records: RunRecords) -> None:
    said = {"verdict": "no_gain", "verdict_words": "served 0.9x as fast"}
    words = verdict_words(replace(records, facts=said))
    assert words[0].startswith("Nothing is won here")
    assert words[-1] == "Served 0.9x as fast"


def test_records_alone_know_no_folder(records: RunRecords) -> None:
    with pytest.raises(InputError, match="path"):
        write_report(records)


def test_key_figures_need_a_plan(records: RunRecords) -> None:
    assert key_figures(()) == []


@pytest.mark.browser
def test_every_figure_is_drawn_in_a_browser(
    page: str, specs: dict[str, dict[str, Any]], tmp_path: Path, chromium: str
) -> None:
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    seen = open_page(chromium, path, tmp_path / "profile")
    assert seen.console == ()
    assert (seen.figures, seen.errors) == (len(specs), 0)
    assert seen.drawings >= len(specs)


def test_a_plan_is_not_said_to_be_verified_on_samples_that_nothing_saw(records: RunRecords) -> None:
    planned = replace(records, judgements=(), facts={**records.facts, "verdict": "verified"})
    assert "On the sweep samples, which chose this plan" in verdict_words(planned)[0]
    assert (
        "nothing else saw, the whole"
        in verdict_words(replace(planned, judgements=records.judgements))[0]
    )
