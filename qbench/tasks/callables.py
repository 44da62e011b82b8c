"""A user's own function, named by ``module:callable`` or ``path/file.py:callable``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from qbench.errors import InputError, did_you_mean


def names_callable(spec: str) -> bool:
    """Return whether ``spec`` has the form ``module:callable`` or ``file.py:callable``."""
    where, colon, name = spec.rpartition(":")
    return bool(colon and where) and name.isidentifier() and not where.startswith("hub")


def load_callable(spec: str, what: str) -> Callable[..., Any]:
    """Return the callable that ``spec`` names.

    Args:
        spec: ``module:callable`` or ``path/file.py:callable``.
        what: What it is for, for messages.

    Raises:
        InputError: If the module, file or name does not exist, or is not callable.
    """
    where, _, name = spec.rpartition(":")
    module = _from_file(Path(where), what) if where.endswith(".py") else _from_name(where, what)
    found = getattr(module, name, None)
    if found is None:
        public = [key for key in vars(module) if not key.startswith("_")]
        raise InputError(f"{what} {spec!r}: {where} has no {name!r}{did_you_mean(name, public)}")
    if not callable(found):
        raise InputError(f"{what} {spec!r}: {name!r} is a {type(found).__name__}, not a callable")
    return found  # type: ignore[no-any-return]


def accepts(function: Callable[..., Any], keyword: str) -> bool:
    """Return whether ``function`` takes ``keyword``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin that states no signature
        return False
    return any(p.name == keyword or p.kind is p.VAR_KEYWORD for p in parameters)


def _from_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{what}: there is no file {str(path)!r}")
    tag = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    module_name = f"qbench_user_{tag}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{what}: {str(path)!r} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses in the file look their module up
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise InputError(f"{what}: {str(path)!r} cannot be imported: {error}") from error
    return module


def _from_name(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, SyntaxError, ValueError, TypeError) as error:
        raise InputError(
            f"{what}: module {name!r} cannot be imported ({error}); for a file that is no"
            " installed module write path/file.py:callable"
        ) from error
