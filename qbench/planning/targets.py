"""Hardware that a plan is for: formats whose kernels it lacks are not offered."""

from __future__ import annotations

import re
from dataclasses import replace

from qbench.backends import Backend
from qbench.errors import ConfigError
from qbench.planning.costs import NotOffered, Offer

_NUMBER = re.compile(r"SM\s*(\d{2,3})", re.IGNORECASE)


def check_target(target: str, backend: Backend) -> None:
    """Check that a target (``SM86``) is hardware of the backend: before anything is measured.

    Raises:
        ConfigError: If it is written in another way, or the backend does not run on it.
    """
    asked, known = _NUMBER.fullmatch(target.strip()), _numbers(backend.hardware)
    number = None if asked is None else int(asked.group(1))
    if len(known) > 1:  # all that the backend builds for; a single number is the least of many
        fits, allowed = number in known, "one of them"
    else:
        fits = bool(known) and number is not None and number >= known[0]
        allowed = f"SM{known[0]} or above" if known else ""
    if not fits:
        raise ConfigError(
            f"hardware: got {target!r}; {backend.name} runs on {backend.hardware or 'any'}"
            + (f": give SM and the number, {allowed}" if known else "")
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


def _numbers(hardware: str) -> tuple[int, ...]:
    """Return every number of hardware in words: ``SM75, 80, 86`` has three."""
    return tuple(map(int, re.findall(r"\d+", hardware))) if _NUMBER.match(hardware) else ()


def _number(hardware: str) -> int | None:
    found = _NUMBER.search(hardware)
    return None if found is None else int(found.group(1))
