"""On what terms a request is asked: parameters and headers of the Open Inference Protocol v2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qbench.errors import InputError, unknown_name
from qbench.serving.decisions import Priority
from qbench.serving.server.contract import Contract

_FORBIDDEN = {
    "sequence_id": "this model keeps no state between requests",
    "shared_memory_region": "shared memory is not offered; send the data",
    "classification": "classification of outputs is not offered; ask for the scores",
}
_NAMED = {
    "0": Priority.INTERACTIVE,
    "1": Priority.INTERACTIVE,
    "2": Priority.BATCH,
    "interactive": Priority.INTERACTIVE,
    "batch": Priority.BATCH,
}
LONGEST_NAME = 256
_LONGEST_TIMEOUT_S = 86_400.0


class BadRequestError(InputError):
    """A request that cannot be served as it is; ``status`` is a 4xx."""

    def __init__(self, reason: str, status: int = 400) -> None:
        """Say why."""
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Asked:
    """On what terms a request is asked, and how it wants its answer.

    Attributes:
        id: Given back with the answer.
        tenant: Who asks.
        priority: The SLA class.
        timeout_s: Seconds after which the answer is worth nothing, or ``None``.
        outputs: Outputs wanted, each with whether it goes as bytes; all by default.
    """

    id: str = ""
    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE
    timeout_s: float | None = None
    outputs: tuple[tuple[str, bool], ...] = ()


def parse_asked(head: Mapping[str, Any], headers: Mapping[str, str], contract: Contract) -> Asked:
    """Return terms and wanted outputs; the body's parameters go before headers.

    Raises:
        BadRequestError: If one is of a wrong type or value, or an output is not known.
    """
    ident = head.get("id", "")
    if not isinstance(ident, str) or len(ident) > LONGEST_NAME:
        raise BadRequestError(f'"id" must be a string of at most {LONGEST_NAME} characters')
    said = parameters_of(head, "the request")
    return Asked(
        ident,
        _tenant(said.get("tenant", headers.get("x-tenant", ""))),
        _priority(said.get("priority", headers.get("x-priority", 0))),
        _timeout_s(said, headers),
        _outputs(head, bool(said.get("binary_data_output", False)), contract),
    )


def parameters_of(item: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the parameters of a request, input or output.

    Raises:
        BadRequestError: If they are no object, or ask for what is not offered.
    """
    said = item.get("parameters", {})
    if not isinstance(said, dict):
        raise BadRequestError(f'"parameters" of {where} must be an object, got {kind_of(said)}')
    for name, why in _FORBIDDEN.items():
        if said.get(name):
            raise BadRequestError(f"parameter {name!r} of {where}: {why}")
    return said


def _tenant(said: Any) -> str:
    if not isinstance(said, str) or len(said) > LONGEST_NAME:
        raise BadRequestError(f"tenant must be a string of at most {LONGEST_NAME} characters")
    return said


def _priority(said: Any) -> Priority:
    if isinstance(said, bool) or not isinstance(said, int | str) or str(said).lower() not in _NAMED:
        raise BadRequestError(
            f"priority is {str(said)[:40]!r}; allowed: 1 or interactive, 2 or batch, 0 for none"
        )
    return _NAMED[str(said).lower()]


def _timeout_s(said: Mapping[str, Any], headers: Mapping[str, str]) -> float | None:
    """Return the time limit: ``timeout`` in microseconds, or the header in milliseconds."""
    given: Any = said.get("timeout", 0)
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise BadRequestError(f"timeout is {str(given)[:40]!r}; allowed: microseconds, 0 for none")
    seconds = given / 1e6
    if not given and (words := headers.get("x-timeout-ms")) is not None:
        try:
            seconds = float(words) / 1e3
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < math.inf:
            raise BadRequestError(
                f"X-Timeout-Ms is {words[:40]!r}; allowed: milliseconds, 0 for none"
            )
    return min(seconds, _LONGEST_TIMEOUT_S) or None


def _outputs(
    head: Mapping[str, Any], binary: bool, contract: Contract
) -> tuple[tuple[str, bool], ...]:
    known = [tensor.name for tensor in contract.outputs]
    asked = head.get("outputs")
    if asked is None or asked == []:
        return tuple((name, binary) for name in known)
    if not isinstance(asked, list):
        raise BadRequestError(f'"outputs" must be a list, got {kind_of(asked)}')
    found: dict[str, bool] = {}
    for item in asked:
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str):
            raise BadRequestError('each of "outputs" must be an object with a "name"')
        if name not in known:
            raise BadRequestError(unknown_name("output", name[:LONGEST_NAME], known))
        if name in found:
            raise BadRequestError(f"output {name!r} is asked for twice")
        said = parameters_of(item, f"output {name!r}")
        found[name] = bool(said.get("binary_data", binary))
    return tuple(found.items())


def kind_of(value: Any) -> str:
    """Return what a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return names.get(type(value), "a number or a truth value")
