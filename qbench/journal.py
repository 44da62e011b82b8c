"""An append-only file of JSON lines that survives being killed at any time.

The first line holds the storage version and the key that every record depends on. A record is
whole or absent: a last line without its newline is what a killed process left, and is passed over.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench import storage
from qbench.errors import RunDirError


@dataclass(frozen=True, slots=True)
class Journal:
    """The journal in one file.

    Attributes:
        path: The file; it may not exist yet.
        made_by: The command that writes it, for messages.
    """

    path: Path
    made_by: str

    def start(self, key: Mapping[str, Any]) -> None:
        """Begin the journal, or continue it where it has the same key.

        Raises:
            RunDirError: If it has another key; each difference is named.
            InputError: If the disk is full.
        """
        header = {"file": self.path.stem, "key": key}
        raw = self.path.read_bytes() if self.path.is_file() else b""
        whole = _whole_lines(raw)
        if not whole:
            storage.write_lines(self.path, header, ())
            return
        found = storage.parse_object(whole.splitlines()[0], f"{self.path}, line 1")
        storage.check_version(found, self.path)
        _check_same_key(found.get("key"), key, self.path)
        if len(whole) < len(raw):
            os.truncate(self.path, len(whole))

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record; it is on the disk when this returns.

        Raises:
            InputError: If the disk is full; earlier records stay whole.
            RunDirError: If the journal was not started.
        """
        if not self.path.is_file():
            raise RunDirError(f"{self.path}: no journal was started for this run")
        line = storage.line_of(record)
        with storage.clear_disk_errors(self.path), open(self.path, "ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                _write_all(file.fileno(), line)
                os.fsync(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(file.fileno(), size)
                raise

    def read(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the key and every whole record.

        Raises:
            RunDirError: If the file is missing, damaged before its last line, or of another
                version.
        """
        lines = _whole_lines(storage.read_bytes(self.path, self.made_by)).splitlines()
        if not lines:
            return {}, []
        parsed = [
            storage.parse_object(line, f"{self.path}, line {number}")
            for number, line in enumerate(lines, 1)
        ]
        storage.check_version(parsed[0], self.path)
        return parsed[0].get("key", {}), parsed[1:]


def _whole_lines(raw: bytes) -> bytes:
    return raw[: raw.rfind(b"\n") + 1]


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _check_same_key(found: Any, wanted: Mapping[str, Any], path: Path) -> None:
    old, new = dict(flat_keys(found)), dict(flat_keys(wanted))
    differing = [key for key in {**new, **old} if old.get(key) != new.get(key)]
    if differing:
        told = "; ".join(
            f"{key} was {old.get(key)!r} and is now {new.get(key)!r}" for key in differing
        )
        raise RunDirError(
            f"{path} was made under other conditions: {told}. Use another run id, or delete the "
            "folder to begin anew"
        )


def flat_keys(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of nested mappings with its dotted key."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flat_keys(inner, f"{prefix}.{key}".lstrip("."))
    else:
        yield prefix, value
