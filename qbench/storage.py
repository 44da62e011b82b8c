"""Files of a run folder: versioned JSON, JSON Lines and NPZ, written whole or not at all.

Each file says which version of the storage format wrote it (``{"qbench": 1, …}``).

History of the format:
    1: first version.

NOTE: NaN and infinities are stored as Python's ``json`` spells them (``NaN``, ``Infinity``),
because a range of an all-zero tensor really has an infinite headroom and null would lose it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from qbench.errors import InputError, RunDirError

FORMAT_VERSION = 1
_MEND = "put it back as it was, or delete the file and run its stage again"
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
_FULL[errno.EFBIG] = "the file would be larger than the system allows"


@contextlib.contextmanager
def clear_disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, quota or size limit into an error that says what to do.

    Raises:
        InputError: In place of ``OSError`` for these causes; every other one passes through.
    """
    try:
        yield
    except OSError as error:
        # NumPy's short write of a full disk has words ("… requested and … written") and no number.
        short = error.errno is None and "written" in str(error)
        if error.errno not in _FULL and not short:
            raise
        raise InputError(
            f"cannot write {path}: {_FULL[error.errno or errno.ENOSPC]}; what was stored before is "
            "intact: make room and run the same command again"
        ) from error


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that appears at ``path`` only once everything is written and synced.

    Raises:
        InputError: If the disk is full; ``path`` then has its old content, or none.
    """
    with clear_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a versioned JSON object.

    Raises:
        InputError: If the disk is full.
    """
    text = json.dumps({"qbench": FORMAT_VERSION, **content}, indent=1, ensure_ascii=False)
    with atomic_write(path) as file:
        file.write(text.encode() + b"\n")


def read_json(path: Path, made_by: str) -> dict[str, Any]:
    """Read what ``write_json`` wrote.

    Args:
        path: The file.
        made_by: The command that makes it, for the message where it is missing.

    Raises:
        RunDirError: If it is missing, damaged, or of another version.
    """
    content = parse_object(read_bytes(path, made_by), f"{path}")
    check_version(content, path)
    return {key: value for key, value in content.items() if key != "qbench"}


def write_lines(path: Path, header: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a versioned header and then one JSON object a line.

    Raises:
        InputError: If the disk is full.
    """
    with atomic_write(path) as file:
        file.write(line_of({"qbench": FORMAT_VERSION, **header}))
        for line in lines:
            file.write(line_of(line))


def read_lines(path: Path, made_by: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the header and the lines that ``write_lines`` wrote.

    Raises:
        RunDirError: If the file is missing, damaged, or of another version.
    """
    raw = read_bytes(path, made_by).splitlines()
    parsed = [parse_object(line, f"{path}, line {i}") for i, line in enumerate(raw, 1)]
    if not parsed:
        raise RunDirError(f"{path} is empty; delete it and run `{made_by}` again")
    check_version(parsed[0], path)
    return parsed[0], parsed[1:]


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write named arrays of any shape; names may hold any character.

    Raises:
        InputError: If the disk is full.
    """
    members = {f"array_{i}": array for i, array in enumerate(arrays.values())}
    with atomic_write(path) as file:
        np.savez_compressed(
            file,
            allow_pickle=False,
            qbench=np.asarray(FORMAT_VERSION),
            names=np.asarray(list(arrays), dtype=np.str_),
            **members,
        )


def read_arrays(path: Path, made_by: str) -> dict[str, np.ndarray[Any, Any]]:
    """Read what ``write_arrays`` wrote.

    Raises:
        RunDirError: If the file is missing, damaged, or of another version.
    """
    require_file(path, made_by)
    try:
        with np.load(path, allow_pickle=False) as stored:
            check_version({"qbench": int(stored["qbench"])}, path)
            return {str(name): stored[f"array_{i}"] for i, name in enumerate(stored["names"])}
    except (ValueError, KeyError, OSError, EOFError) as error:
        if isinstance(error, RunDirError):
            raise
        raise RunDirError(f"{path} is damaged ({error}); run `{made_by}` again") from error


def line_of(content: Mapping[str, Any]) -> bytes:
    """Return an object as one line of JSON, ending in a newline."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in ``raw``.

    Raises:
        RunDirError: If it is none; ``where`` names the place.
    """
    try:
        content = json.loads(raw)
    except ValueError as error:
        raise RunDirError(f"{where}: damaged, not JSON ({error}); {_MEND}") from None
    if not isinstance(content, dict):
        raise RunDirError(f"{where}: damaged, not a JSON object; {_MEND}")
    return content


def check_version(
    content: Mapping[str, Any], path: Path, readable: Collection[int] = (FORMAT_VERSION,)
) -> None:
    """Check the storage version of a file.

    Raises:
        RunDirError: If it has none, or one that is not ``readable``.
    """
    version = content.get("qbench")
    if version not in readable:
        given = "no storage version" if version is None else f"storage version {version!r}"
        known = " and ".join(map(str, readable))
        raise RunDirError(
            f"{path}: has {given}; this qbench reads version {known}: use the qbench that wrote "
            "it, or another run folder"
        )


def require_file(path: Path, made_by: str) -> None:
    """Check that a file of a run is there.

    Raises:
        RunDirError: If it is not; the message names the command that makes it.
    """
    if not path.is_file():
        raise RunDirError(
            f"{path.parent} has no {path.name} yet; `{made_by}` makes it: run that first"
        )


def read_bytes(path: Path, made_by: str) -> bytes:
    """Return the content of a file of a run.

    Raises:
        RunDirError: If it is missing or cannot be read.
    """
    require_file(path, made_by)
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunDirError(f"{path}: cannot be read: {error.strerror}") from error
