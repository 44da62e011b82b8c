"""Hardware that a plan is for: formats whose kernels it lacks are not offered."""

from __future__ import annotations

import re
from dataclasses import replace

from qbench.backends import Backend
from qbench.errors import ConfigError
from qbench.planning.costs import NotOffered, Offer

_NUMBER = re.compile(r"SM\s*(\d{2,3})", re.IGNORECASE)


def check_target(target: str, backend: Backend) -> None:
    """Check that a target (``SM86``) is hardware of the backend.

    Raises:
        ConfigError: If it is written in another way, or the backend does not run on it.
    """
    number, least = _number(target), _number(backend.hardware)
    if number is None or least is None or number < least:
        raise ConfigError(
            f"hardware: got {target!r}; {backend.name} runs on {backend.hardware or 'any'}"
            + ("" if least is None else f": give SM and the number, SM{least} or above")
        )


def missing_on(target: str | None, form: str, backend: Backend) -> str:
    """Return why a target has no kernel of a format that the backend can run, or ""."""
    support = backend.support(form)
    if not target or support is None:
        return ""
    number, least = _number(target), _number(support.hardware)
    if number is None or least is None or number >= least:
        return ""
    return f"{form} needs {support.hardware} on {backend.name}, and the target is {target}"


def offer_on(offer: Offer, target: str | None, backend: Backend) -> Offer:
    """Return the offer without the formats that the target lacks; what is gone says why."""
    if not target:
        return offer
    gone = [
        NotOffered(layer, o.format, why)
        for layer, options in offer.options.items()
        for o in options
        if (why := missing_on(target, o.format, backend))
    ]
    left = {
        layer: tuple(o for o in options if not missing_on(target, o.format, backend))
        for layer, options in offer.options.items()
    }
    return replace(offer, options=left, not_offered=(*offer.not_offered, *gone))


def _number(hardware: str) -> int | None:
    found = _NUMBER.search(hardware)
    return None if found is None else int(found.group(1))
