"""Local tables: CSV, TSV, JSON Lines, JSON and Parquet, in UTF-8."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qbench.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pandas

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_file(path: Path) -> pandas.DataFrame:
    """Read a local table as it is: no type is guessed and no word is taken for a missing value.

    Args:
        path: A file whose suffix is ``.csv``, ``.tsv``, ``.jsonl``, ``.json`` or ``.parquet``.

    Raises:
        DataError: If it is missing, of another kind, not UTF-8, malformed, or without rows.
    """
    reader = _READERS.get(path.suffix.lower())
    if path.is_dir():
        raise DataError(_missing(path))
    if reader is None:
        kind = f"a {path.suffix!r} file" if path.suffix else "a file without a suffix"
        raise DataError(
            f"data {str(path)!r}: {kind} is not read;"
            f" allowed: {', '.join(_READERS)}, hub:NAME, package:NAME"
        )
    if not path.is_file():
        raise DataError(_missing(path))
    if path.stat().st_size == 0:
        raise DataError(f"data {str(path)!r} is empty (0 bytes)")
    frame = reader(path)
    if frame.empty:
        raise DataError(
            f"data {str(path)!r} has no rows"
            + (
                f", only the header {', '.join(map(str, frame.columns))}"
                if len(frame.columns)
                else ""
            )
        )
    return frame


def _missing(path: Path) -> str:
    if path.is_dir():
        return (
            f"data {str(path)!r} is a folder, and a file is needed; allowed:"
            f" {', '.join(_READERS)}, hub:NAME, package:NAME"
        )
    folder = path.parent
    if not folder.is_dir():
        return f"data {str(path)!r}: there is no folder {str(folder)!r}"
    near = did_you_mean(path.name, [entry.name for entry in folder.iterdir()])
    return f"data {str(path)!r}: there is no such file{near}"


def _read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, with or without a byte order mark."""
    raw = path.read_bytes()
    if raw.startswith(_UTF16):
        raise DataError(
            f"data {str(path)!r} is UTF-16, and UTF-8 is needed; convert it:"
            f" iconv -f UTF-16 -t UTF-8 {path.name} > new{path.suffix}"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = error.start + (len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0)
        line = raw.count(b"\n", 0, offset) + 1
        raise DataError(
            f"data {str(path)!r} is not UTF-8: byte 0x{raw[offset]:02x} at offset {offset},"
            f" line {line}; convert it, for Western text:"
            f" iconv -f WINDOWS-1252 -t UTF-8 {path.name} > new{path.suffix}"
        ) from None


def _read_csv(path: Path) -> pandas.DataFrame:
    return _separated(path, _read_text(path), ",", csv.QUOTE_MINIMAL)


def _read_tsv(path: Path) -> pandas.DataFrame:
    """Read a TSV in which quotes are plain characters, or enclose fields, as its lines tell.

    Where every line has as many tabs as the header, no field holds a tab or a line break, so a
    quote that opens a field and does not close it is part of the text.
    """
    text = _read_text(path)
    lines = [line for line in re.split(r"\r\n|\n|\r", text) if line]
    tabs = {line.count("\t") for line in lines}
    if len(tabs) != 1 or tabs == {0}:
        return _separated(path, text, "\t", csv.QUOTE_MINIMAL)
    literal = _separated(path, text, "\t", csv.QUOTE_NONE)
    return literal.map(_without_quotes).rename(columns=_without_quotes)


def _without_quotes(field: str) -> str:
    """Return a field without the quotes that enclose it, where all within are doubled."""
    inner = field[1:-1]
    enclosed = len(field) > 1 and field[0] == field[-1] == '"'
    return inner.replace('""', '"') if enclosed and '"' not in inner.replace('""', "") else field


def _separated(path: Path, text: str, separator: str, quoting: Literal[0, 3]) -> pandas.DataFrame:
    import pandas

    csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, delimiter=separator, quoting=quoting, strict=True)
    rows: list[list[str]] = []
    try:
        header = [name.strip() for name in next(reader, [])]
        for row in reader:
            if row and len(row) != len(header):
                raise DataError(
                    f"data {str(path)!r}, line {reader.line_num}: {len(row)} fields, and the"
                    f" header has {len(header)} ({', '.join(header)}); quote fields that hold"
                    f" {separator!r}"
                )
            if row:
                rows.append(row)
    except csv.Error as error:
        raise DataError(f"data {str(path)!r}, line {reader.line_num}: {error}") from None
    _check_names(header, path)
    return pandas.DataFrame(rows, columns=header, dtype=object)


def _check_names(header: list[str], path: Path) -> None:
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError(f"data {str(path)!r}: column {twice[0]!r} stands twice in the header")


def _read_json_lines(path: Path) -> pandas.DataFrame:
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if line.strip():
            row = _parse_json(line, f"data {str(path)!r}, line {number}")
            if not isinstance(row, Mapping):
                raise DataError(
                    f"data {str(path)!r}, line {number}: each line must be a JSON object;"
                    f" got {line.strip()[:60]!r}"
                )
            rows.append(row)
    return _frame(rows)


def _read_json(path: Path) -> pandas.DataFrame:
    import pandas

    content = _parse_json(_read_text(path), f"data {str(path)!r}")
    if isinstance(content, list) and all(isinstance(row, Mapping) for row in content):
        return _frame(content)
    if isinstance(content, Mapping) and all(isinstance(v, list) for v in content.values()):
        sizes = {len(column) for column in content.values()}
        if len(sizes) <= 1:
            return pandas.DataFrame(
                {key: pandas.Series(v, dtype=object) for key, v in content.items()}
            )
    raise DataError(
        f"data {str(path)!r}: a JSON table is a list of objects, or an object of lists of equal"
        " length; one object a line is JSON Lines (.jsonl)"
    )


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from None


def _frame(rows: list[Mapping[str, Any]]) -> pandas.DataFrame:
    import pandas

    names = list(dict.fromkeys(key for row in rows for key in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    return pandas.DataFrame({k: pandas.Series(v, dtype=object) for k, v in columns.items()})


def _read_parquet(path: Path) -> pandas.DataFrame:
    import pandas
    import pyarrow

    try:
        return pandas.read_parquet(path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"data {str(path)!r} cannot be read as Parquet: {reason}") from error


_READERS: dict[str, Callable[[Path], pandas.DataFrame]] = {
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
