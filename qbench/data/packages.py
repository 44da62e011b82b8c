"""Labelled data that installs from a package index, so it needs no hub."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
from typing import TYPE_CHECKING, Any

import yaml

from qbench.errors import DataError, MissingDependencyError, unknown_name

if TYPE_CHECKING:
    import pandas

PACKAGES = ("chatterbot_corpus",)
_DISTRIBUTION = "chatterbot-corpus"
LICENCES = {"chatterbot_corpus": "BSD"}


def read_package(name: str) -> tuple[pandas.DataFrame, tuple[str, ...]]:
    """Return the table that an installed package holds, and remarks on what was left out.

    ``chatterbot_corpus``: columns ``query`` and ``answer``, turn 1 and turn 2 of each English
    conversation.

    Raises:
        DataError: If qbench does not know the package.
        MissingDependencyError: If it is not installed.
    """
    _require(name)
    return _chatterbot()


def package_version(name: str) -> str:
    """Return the installed version of a data package.

    Raises:
        DataError: If qbench does not know the package.
        MissingDependencyError: If it is not installed.
    """
    _require(name)
    return importlib.metadata.version(_DISTRIBUTION)


def _require(name: str) -> None:
    if name not in PACKAGES:
        raise DataError(unknown_name("data package", name, PACKAGES))
    if importlib.util.find_spec(name) is None:
        raise MissingDependencyError(
            f"data package:{name} is not installed: pip install {_DISTRIBUTION}"
        )


def _chatterbot() -> tuple[pandas.DataFrame, tuple[str, ...]]:
    import pandas

    rows: list[tuple[str, str]] = []
    short = 0
    folder = importlib.resources.files("chatterbot_corpus") / "data" / "english"
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if not entry.name.endswith(".yml"):
            continue
        for conversation in _conversations(entry.read_bytes()):
            if isinstance(conversation, list) and len(conversation) >= 2:
                rows.append((str(conversation[0]), str(conversation[1])))
            else:
                short += 1
    frame = pandas.DataFrame(rows, columns=["query", "answer"], dtype=object)
    return frame, (f"{short} conversation(s) without a second turn left out",) if short else ()


def _conversations(raw: bytes) -> list[Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(raw.decode("utf-8"), Loader=loader)
    return list(content.get("conversations", []))
