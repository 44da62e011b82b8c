"""An append-only file of JSON lines that survives being killed, and tells when it was edited.

The first line holds the storage version and the key that every record depends on. Each line ends in
a checksum of itself and of the line before it, so a line that was edited, moved, removed or brought
from elsewhere is found. A last line without a checksum is what a killed process or a power cut
left, and is passed over.

History of the format:
    1: first version, without checksums; it is read, and not continued.
    2: each line ends in a chained checksum.

NOTE: checksums find accidents, not forgery. A whole last line that was removed leaves what a
process killed a moment earlier would have left: its record is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from qbench import storage
from qbench.errors import RunDirError
from qbench.provenance import utc_now

FORMAT_VERSION = 2
_UNSEALED = 1
_DIGITS = 16
_SEAL = re.compile(rb',"sum":"([0-9a-f]{%d})"\}$' % _DIGITS)
_SEAL_BYTES = len(b',"sum":""}') + _DIGITS
#: What a power cut may leave at the end of a file, and what an editor may add there.
_BLANK = b"\0\r\n\t "


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
            RunDirError: If it has another key (each difference is named), was edited, or is of a
                version that is not continued; the file is then as it was.
            InputError: If the disk is full.
        """
        raw = self.path.read_bytes() if self.path.is_file() else b""
        lines = _whole_lines(raw, self.path)
        if not lines:
            self._begin(key)
            return
        header = storage.parse_object(lines[0], f"{self.path}, line 1")
        if header["qbench"] == _UNSEALED:
            raise RunDirError(
                f"{self.path} was written by an earlier version, without checksums: it can be "
                "read, and not continued. Use another run id, or delete the folder to begin anew"
            )
        _check_same_key(header.get("key"), key, self.path)
        _cut(self.path, len(raw), sum(len(line) + 1 for line in lines))

    def _begin(self, key: Mapping[str, Any]) -> None:
        header = {
            "qbench": FORMAT_VERSION,
            "file": self.path.stem,
            "begun_at": utc_now().isoformat(),
            "key": key,
        }
        with storage.atomic_write(self.path) as file:
            file.write(_sealed(header, b""))

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record of at least one field; it is on the disk when this returns.

        Raises:
            InputError: If the disk is full; earlier records stay whole.
            RunDirError: If the journal was not started.
        """
        if not self.path.is_file():
            raise RunDirError(f"{self.path}: no journal was started for this run")
        with storage.clear_disk_errors(self.path), open(self.path, "a+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            line = _sealed(record, self._last_seal(file, size))
            try:
                _write_all(file.fileno(), line)
                os.fsync(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(file.fileno(), size)
                raise

    def _last_seal(self, file: IO[bytes], size: int) -> bytes:
        file.seek(max(0, size - _SEAL_BYTES - 1))
        tail = file.read(_SEAL_BYTES + 1)
        found = _SEAL.search(tail[:-1])
        if found is None or not tail.endswith(b"\n"):
            raise RunDirError(
                f"{self.path}: its last line is not whole, so nothing can follow it; run "
                f"`{self.made_by}` again"
            )
        return found[1]

    def read(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the key and every whole record.

        Raises:
            RunDirError: If the file is missing, edited, or of another version.
        """
        lines = _whole_lines(storage.read_bytes(self.path, self.made_by), self.path)
        if not lines:
            return {}, []
        header, *records = (
            storage.parse_object(line, f"{self.path}, line {number}")
            for number, line in enumerate(lines, 1)
        )
        for record in records:
            record.pop("sum", None)
        return header.get("key", {}), records

    def read_key(self) -> dict[str, Any]:
        """Return the key alone; what follows the first line is not looked at.

        Raises:
            RunDirError: If the file is missing, its first line was edited, or is of another
                version.
        """
        storage.require_file(self.path, self.made_by)
        with open(self.path, "rb") as file:
            lines = _whole_lines(file.readline(), self.path)
        key: dict[str, Any] = storage.parse_object(lines[0], "").get("key", {}) if lines else {}
        return key


def _sealed(content: Mapping[str, Any], before: bytes) -> bytes:
    """Return a line that ends in its checksum; ``before`` is that of the line before it."""
    body = storage.line_of(content)[:-2]
    return body + b',"sum":"' + _checksum(before, body) + b'"}\n'


def _checksum(before: bytes, body: bytes) -> bytes:
    return hashlib.sha256(before + body).hexdigest()[:_DIGITS].encode()


def _whole_lines(raw: bytes, path: Path) -> Sequence[bytes]:
    """Return the lines as they were written, a torn last one left out.

    Raises:
        RunDirError: If one was edited; file and line are named. Or if the version is another.
    """
    lines = raw.rstrip(_BLANK).split(b"\n")
    version = _version_of(lines[0], path)
    if version == _UNSEALED and not any(map(_SEAL.search, lines)):
        return raw[: raw.rfind(b"\n") + 1].splitlines()
    if not _SEAL.search(lines[-1]):
        lines.pop()
    before = b""
    for number, line in enumerate(lines, 1):
        seal = _SEAL.search(line)
        if seal is None or _checksum(before, line[:-_SEAL_BYTES]) != seal[1]:
            raise RunDirError(_edited(path, number))
        before = seal[1]
    return lines


def _version_of(line: bytes, path: Path) -> int | None:
    """Return the version that a first line tells; ``None`` where it is damaged."""
    try:
        header = storage.parse_object(line, "")
    except RunDirError:
        return None
    if "qbench" not in header:
        return None
    storage.check_version(header, path, (_UNSEALED, FORMAT_VERSION))
    return int(header["qbench"])


def _edited(path: Path, number: int) -> str:
    kept = f"keep the {number - 1} lines before it (head -n {number - 1}), so that the rest is "
    return (
        f"{path}, line {number}: not as qbench wrote it, its checksum does not fit: it was edited, "
        "moved or brought from elsewhere, or a line before it is gone. The file was not touched: "
        f"put it back as it was; or {kept if number > 1 else ''}"
        f"{'measured again; or ' if number > 1 else ''}delete it to begin anew"
    )


def _cut(path: Path, size: int, whole: int) -> None:
    """Leave the first ``whole`` bytes of a file, the last of which ends a line."""
    if size == whole:
        return
    with storage.clear_disk_errors(path), open(path, "r+b", buffering=0) as file:
        file.truncate(whole - 1)
        file.seek(whole - 1)
        file.write(b"\n")
        os.fsync(file.fileno())


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _check_same_key(found: Any, wanted: Mapping[str, Any], path: Path) -> None:
    if differing := differences(found, wanted):
        raise RunDirError(
            f"{path} was made under other conditions: {differing}. Use another run id, or delete "
            "the folder to begin anew"
        )


def differences(before: Any, now: Any) -> str:
    """Return in words which leaves of two nested mappings differ; "" where none does."""
    old, new = dict(flat_keys(before)), dict(flat_keys(now))
    return "; ".join(
        f"{key} was {old.get(key)!r} and is now {new.get(key)!r}"
        for key in {**new, **old}
        if old.get(key) != new.get(key)
    )


def flat_keys(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of nested mappings with its dotted key."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flat_keys(inner, f"{prefix}.{key}".lstrip("."))
    else:
        yield prefix, value
