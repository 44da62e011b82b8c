from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from qbench.data.files import read_file
from qbench.errors import DataError

ROWS = [{"text": "naïve, “quoted”", "label": "1"}, {"text": "null", "label": "2"}]


def write(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    frame = pd.DataFrame(ROWS)
    if kind in ("csv", "tsv"):
        frame.to_csv(path, index=False, sep="," if kind == "csv" else "\t")
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    else:
        frame.to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_every_kind_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    # "null" is a word here, not a missing value.
    assert read_file(write(tmp_path, kind)).to_dict("records") == ROWS


def test_json_may_be_an_object_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.JSON"
    path.write_text(json.dumps({"text": ["a", "b"], "label": [0, 1]}))
    assert read_file(path)["label"].tolist() == [0, 1]


def test_a_byte_order_mark_and_crlf_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbftext,label\r\n"two\nlines",1\r\n\r\n')
    assert read_file(path).to_dict("records") == [{"text": "two\nlines", "label": "1"}]


def test_quotes_in_a_tsv_are_text_unless_they_enclose_a_field(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text('"text"\tlabel\n"Yes, he said.\t0\nfine"\t1\n"a ""b"""\t0\n"a" "b"\t1\n')
    assert read_file(path)["text"].tolist() == ['"Yes, he said.', 'fine"', 'a "b"', '"a" "b"']
    path.write_text('text\tlabel\n"two\nlines"\t0\n')
    assert read_file(path)["text"].tolist() == ["two\nlines"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"text\nok\ncaf\xe9\n", "byte 0xe9 at offset 11, line 3.*iconv"),
        ("a.csv", b"\xef\xbb\xbftext\ncaf\xe9\n", "byte 0xe9 at offset 11, line 2"),
        ("a.csv", "text\nok\n".encode("utf-16"), "UTF-16.*iconv"),
        ("a.csv", b"", "is empty"),
        ("a.csv", b"text,label\n", "no rows, only the header text, label"),
        ("a.csv", b"text,label\na,b,c\n", "line 2: 3 fields, and the header has 2"),
        ("a.csv", b"text,text\na,b\n", "'text' stands twice"),
        ("a.csv", b'text\n"a\n', "line 2: unexpected end"),
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', "line 2: not JSON"),
        ("a.jsonl", b'["a"]\n', "line 1: each line must be a JSON object"),
        ("a.json", b'{"text": "a"}', "list of objects"),
        ("a.json", b'{"text": ["a"], "label": []}', "of equal length"),
        ("a.json", b"[]", "no rows"),
        ("a.parquet", b"PAR1 but not really", "cannot be read as Parquet"),
        ("a.xlsx", b"x", "a '.xlsx' file is not read.*hub:NAME"),
    ],
)
def test_bad_files_say_what_and_where(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_file(tmp_path / name)


def test_a_missing_file_names_near_ones(tmp_path: Path) -> None:
    (tmp_path / "reactions.csv").touch()
    with pytest.raises(DataError, match=r"no such file .did you mean 'reactions.csv'"):
        read_file(tmp_path / "reaction.csv")
    with pytest.raises(DataError, match="there is no folder"):
        read_file(tmp_path / "absent" / "reactions.csv")
