"""The exception tree of qbench.

    QbenchError(Exception)
    ├── InputError(ValueError)            what the user gave cannot be used: exit code 2
    │   ├── ConfigError                   a configuration key or value
    │   ├── ModelError                    a model file, folder or identifier
    │   ├── DataError                     a data file, column, split or label
    │   ├── PlanError                     a plan file
    │   ├── BudgetError                   no plan reaches what was asked: exit code 1
    │   └── RunDirError                   a results folder that does not fit
    ├── MissingDependencyError(ImportError)   an optional package is needed: exit code 2
    └── MeasurementError(RuntimeError)    a measurement could not be made: exit code 1

Every message says what was given, what is allowed and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QbenchError(Exception):
    """Base of every error that qbench raises on purpose."""

    exit_code = 1


class InputError(QbenchError, ValueError):
    """What the user gave cannot be used."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration key is unknown or a value is of the wrong type."""


class ModelError(InputError):
    """A model cannot be read, exported or quantized."""


class DataError(InputError):
    """A data set lacks a column, a split, a label, or cannot be decoded."""


class PlanError(InputError):
    """A plan names an unknown layer, an impossible format, or another model."""


class BudgetError(InputError):
    """No plan reaches what was asked; the message has the range that can be reached."""

    exit_code = 1
    verdict = "budget_unreachable"


class RunDirError(InputError):
    """A results folder belongs to another model, configuration or version."""


class MissingDependencyError(QbenchError, ImportError):
    """An optional package is not installed."""

    exit_code = 2


class MeasurementError(QbenchError, RuntimeError):
    """A measurement could not be made on valid input."""


def did_you_mean(given: str, allowed: Iterable[str], limit: int = 3) -> str:
    """Return `` (did you mean 'a' or 'b'?)`` for near misses of ``given``, else an empty string."""
    names = list(allowed)
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(given.lower(), list(by_lower), n=limit, cutoff=0.55)
    if not near:
        return ""
    return " (did you mean " + " or ".join(repr(by_lower[name]) for name in near) + "?)"


def unknown_name(what: str, given: str, allowed: Iterable[str]) -> str:
    """Return the message for a name that is not one of ``allowed``."""
    names = list(allowed)
    return f"unknown {what} {given!r}{did_you_mean(given, names)}; allowed: {', '.join(names)}"
