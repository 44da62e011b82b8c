"""A journal tells when it was edited, and tolerates what a kill or a power cut leaves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qbench.errors import RunDirError
from qbench.journal import Journal

Lines = list[bytes]
KEY = {"model": "x", "settings": {"seed": 0}}


def record(at: int) -> dict[str, Any]:
    return {"layer": f"läyer.{at}", "format": "int8", "divergence": 0.125 + at, "at": [at]}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    made = Journal(tmp_path / "sweep.jsonl", "qbench sweep")
    made.start(KEY)
    for at in range(4):
        made.append(record(at))
    return made


def edit(journal: Journal, change: Callable[[Lines], Lines]) -> bytes:
    lines = journal.path.read_bytes().splitlines(keepends=True)
    edited = b"".join(change(lines))
    journal.path.write_bytes(edited)
    return edited


def replaced(line: int, old: bytes, new: bytes) -> Callable[[Lines], Lines]:
    def change(lines: Lines) -> Lines:
        assert old in lines[line - 1]
        lines[line - 1] = lines[line - 1].replace(old, new, 1)
        return lines

    return change


def test_lines_are_plain_json_and_records_come_back(journal: Journal) -> None:
    lines = [json.loads(line) for line in journal.path.read_text(encoding="utf-8").splitlines()]
    assert lines[0]["qbench"] == 2 and lines[0]["key"] == KEY
    assert "läyer.0" in journal.path.read_text(encoding="utf-8")
    assert journal.read() == (KEY, [record(at) for at in range(4)])
    assert journal.read_key() == KEY


@pytest.mark.parametrize(
    ("line", "change"),
    [
        (3, replaced(3, b"1.125", b"1.126")),
        (2, replaced(2, b"int8", b"int9")),
        (5, replaced(5, b"3.125", b"3.12")),  # the last one
        (1, replaced(1, b'"seed":0', b'"seed":1')),
        (1, replaced(1, b'"model":"x"', b'"model":"y"')),
        (4, replaced(4, b'"sum":"', b'"sum":"0')),
        (3, lambda lines: [*lines[:2], *lines[3:]]),  # removed
        (2, lambda lines: [lines[0], *lines[2:]]),
        (1, lambda lines: lines[1:]),
        (4, lambda lines: [*lines[:3], lines[2], *lines[3:]]),  # twice
        (6, lambda lines: [*lines, lines[2]]),  # twice, at the end
        (3, lambda lines: [*lines[:2], lines[3], lines[2], lines[4]]),  # moved
        (3, lambda lines: [*lines[:2], b"\n", *lines[2:]]),
        (3, lambda lines: [*lines[:2], b"rubbish\n", *lines[2:]]),
        (1, lambda lines: [line.replace(b"\n", b"\r\n") for line in lines]),
    ],
)
def test_an_edit_is_named_and_nothing_is_touched(
    journal: Journal, line: int, change: Callable[[Lines], Lines]
) -> None:
    edited = edit(journal, change)
    for act in (lambda: journal.read(), lambda: journal.start(KEY)):
        with pytest.raises(RunDirError) as caught:
            act()
        told = str(caught.value)
        assert f"sweep.jsonl, line {line}: " in told
        assert "put it back as it was" in told and "begin anew" in told
        assert (f"head -n {line - 1}" in told) == (line > 1)
    assert journal.path.read_bytes() == edited


def test_the_advice_helps(journal: Journal) -> None:
    edit(journal, replaced(4, b"2.125", b"9.125"))
    edit(journal, lambda lines: lines[:3])
    journal.start(KEY)
    journal.append(record(9))
    assert journal.read()[1] == [record(0), record(1), record(9)]


def test_a_line_of_another_run_of_the_same_key_is_found(journal: Journal, tmp_path: Path) -> None:
    other = Journal(tmp_path / "other" / "sweep.jsonl", "qbench sweep")
    other.start(KEY)
    other.append(record(0))
    line = other.path.read_bytes().splitlines(keepends=True)[1]
    edit(journal, lambda lines: [lines[0], line, *lines[2:]])
    with pytest.raises(RunDirError, match="line 2: .*brought from elsewhere"):
        journal.read()


def torn_tails() -> list[tuple[str, Callable[[bytes], bytes]]]:
    whole = len('{"layer":"l') + 1  # within the two bytes of ä
    return [
        ("no newline", lambda last: last[: len(last) // 2]),
        ("one byte", lambda last: last[:1]),
        ("within a character", lambda last: last[:whole]),
        ("cut, with a newline", lambda last: last[:30] + b"\n"),
        ("without its last brace", lambda last: last[:-2]),
        ("zeros", lambda last: b"\0" * 512),
        ("part and zeros", lambda last: last[:30] + b"\0" * 4096),
        ("zeros and a newline", lambda last: b"\0" * 100 + b"\n"),
        ("zeros within", lambda last: last[:9] + b"\0" * 20 + last[29:60] + b"\n"),
        ("blank", lambda last: b"\n"),
    ]


@pytest.mark.parametrize(("name", "tear"), torn_tails(), ids=[name for name, _ in torn_tails()])
def test_what_a_kill_or_a_power_cut_leaves_is_passed_over(
    journal: Journal, name: str, tear: Callable[[bytes], bytes]
) -> None:
    edit(journal, lambda lines: [*lines[:-1], tear(lines[-1])])
    assert journal.read()[1] == [record(at) for at in range(3)]
    journal.start(KEY)
    journal.append(record(7))
    assert journal.read()[1] == [*(record(at) for at in range(3)), record(7)]
    assert b"\0" not in journal.path.read_bytes()


@pytest.mark.parametrize("tail", [b"", b"\n\n", b"\0\0\0"])
def test_a_whole_last_record_is_kept_whatever_ends_it(journal: Journal, tail: bytes) -> None:
    journal.path.write_bytes(journal.path.read_bytes()[:-1] + tail)
    assert len(journal.read()[1]) == 4
    journal.start(KEY)
    journal.append(record(4))
    assert journal.read()[1] == [record(at) for at in range(5)]


def test_nothing_is_appended_to_half_a_line(journal: Journal) -> None:
    torn = edit(journal, lambda lines: [*lines[:-1], lines[-1][:20]])
    with pytest.raises(RunDirError, match="`qbench sweep` again"):
        journal.append(record(5))
    assert journal.path.read_bytes() == torn


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b'{"qbench": 2, "fi', b'{"qb\n', b"\n"])
def test_a_journal_torn_in_its_first_line_begins_anew(tmp_path: Path, content: bytes) -> None:
    journal = Journal(tmp_path / "sweep.jsonl", "qbench sweep")
    journal.path.write_bytes(content)
    assert journal.read() == ({}, []) and journal.read_key() == {}
    journal.start(KEY)
    assert journal.read() == (KEY, [])


def test_a_journal_of_the_first_version_is_read_and_not_continued(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "sweep.jsonl", "qbench sweep")
    lines = [{"qbench": 1, "file": "sweep", "key": KEY}, record(0), record(1)]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"layer": "to'
    journal.path.write_text(text, encoding="utf-8")
    assert journal.read() == (KEY, [record(0), record(1)])
    with pytest.raises(RunDirError, match="earlier version"):
        journal.start(KEY)
    assert journal.path.read_text(encoding="utf-8") == text


def test_an_older_version_does_not_switch_the_checks_off(journal: Journal) -> None:
    edit(journal, replaced(1, b'"qbench":2', b'"qbench":1'))
    with pytest.raises(RunDirError, match="line 1"):
        journal.read()
    edit(journal, replaced(1, b'"qbench":1', b'"qbench":3'))
    with pytest.raises(RunDirError, match="storage version 3; this qbench reads version 1 and 2"):
        journal.read()


def test_thousands_of_records_with_samples_are_read_quickly(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "sweep.jsonl", "qbench sweep")
    journal.start(KEY)
    samples = np.random.default_rng(0).random(230).tolist()
    journal.append({"layer": "a", "samples": samples})
    began = time.process_time()
    for at in range(300):
        journal.append({"layer": f"l{at}", "samples": samples})
    append_s = (time.process_time() - began) / 300
    began = time.process_time()
    assert len(journal.read()[1]) == 301
    read_s = (time.process_time() - began) / 301
    assert append_s < 2e-3 and read_s < 1e-3
