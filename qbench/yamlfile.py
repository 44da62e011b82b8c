"""YAML that a person writes by hand, read strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from qbench.errors import InputError, did_you_mean


def read_yaml(path: Path, what: str, error: type[InputError]) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Args:
        path: The file.
        what: What the file is, for messages: "configuration file", "plan".
        error: The class to raise.

    Raises:
        InputError: Of class ``error``, if the file is missing, is not UTF-8 or not YAML, gives a
            key twice, or holds something else than a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.y*ml")])
        raise error(f"no such {what}: {path}{near}") from None
    except UnicodeDecodeError as undecodable:
        byte = undecodable.start
        raise error(f"{path}: not UTF-8 text (byte {byte}); save it as UTF-8") from None
    except OSError as unreadable:
        raise error(f"{path}: cannot be read: {unreadable.strerror}") from None
    try:
        values = yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, ValueError) as wrong:
        raise error(f"{path}: not a valid {what}: {' '.join(str(wrong).split())}") from None
    if not isinstance(values, dict):
        given = "an empty file" if values is None else type(values).__name__
        raise error(f"{path}: got {given}; allowed: a mapping of keys to values")
    return values


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, where YAML would keep the last in silence."""


def _unique_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, str) and key in seen:
            line = key_node.start_mark.line + 1
            raise ValueError(f"line {line}: key {key!r} is given twice; keep one of the two")
        if isinstance(key, str):
            seen.add(key)
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
