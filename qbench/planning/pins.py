"""What the user keeps and bans: globs over layers that leave an offer fewer formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qbench.backends import Backend, applicability
from qbench.errors import ConfigError, InputError
from qbench.formats import format_named
from qbench.graph.layers import match_layers
from qbench.planning.costs import NotOffered, Offer, fused_layers, ties_of
from qbench.records import Layers, Status


@dataclass(frozen=True, slots=True)
class Pin:
    """A wish for all layers that a glob matches.

    Attributes:
        glob: Over layer names, module paths and node names.
        format: The format that they keep, or must not take.
        banned: Whether it is a ban.
    """

    glob: str
    format: str
    banned: bool = False

    def __str__(self) -> str:
        return f"{'--ban' if self.banned else '--keep'} {self.glob}={self.format}"


@dataclass(frozen=True, slots=True)
class Pins:
    """Every wish, resolved on one model.

    Attributes:
        kept: The one format that a layer keeps, with the pin that says so.
        banned: The formats that a layer must not take, with the pins that say so.
    """

    kept: Mapping[str, Pin]
    banned: Mapping[str, Mapping[str, Pin]]

    def __bool__(self) -> bool:
        return bool(self.kept or self.banned)


def parse_pins(keep: Sequence[str], ban: Sequence[str], backend: Backend) -> list[Pin]:
    """Return the pins that are written as ``GLOB[=FORMAT]`` (keep) and ``GLOB=FORMAT`` (ban).

    A pin without a format keeps the backend's high precision.

    Raises:
        ConfigError: If one is empty, or a ban names no format.
        InputError: If there is no such format, or the backend cannot run it.
    """
    pins = [_parse(text, "keep", backend) for text in keep]
    return pins + [_parse(text, "ban", backend) for text in ban]


def _parse(text: str, what: str, backend: Backend) -> Pin:
    glob, equals, name = (part.strip() for part in text.rpartition("="))
    if not equals:
        glob, name = text.strip(), ""
    allowed = "GLOB or GLOB=FORMAT, such as '*.query=int8'" if what == "keep" else "GLOB=FORMAT"
    if not glob or (equals and not name) or (what == "ban" and not name):
        raise ConfigError(f"{what}: got {text!r}; allowed: {allowed}")
    form = format_named(name or backend.high_precision).name
    if form not in backend.formats:
        raise InputError(
            f"{what}: got {text!r}; {backend.name} cannot run {form}; it runs "
            f"{', '.join(backend.formats)}"
        )
    if what == "ban" and form == backend.high_precision:
        raise ConfigError(
            f"ban: got {text!r}; {form} is the high precision of {backend.name}: what a layer "
            "shall take in its place is said with --keep GLOB=FORMAT"
        )
    return Pin(glob, form, banned=what == "ban")


def resolve_pins(pins: Sequence[Pin], layers: Layers, backend: Backend) -> Pins:
    """Return what each layer keeps and must not take; needs no sweep.

    Raises:
        InputError: If a glob matches nothing (near misses are named), a matched layer cannot take
            the format that it shall keep, or two pins contradict each other, on one layer or on
            layers that must take one format.
    """
    kept: dict[str, Pin] = {}
    banned: dict[str, dict[str, Pin]] = {}
    for pin in pins:
        what = "ban" if pin.banned else "keep"
        for layer in match_layers(layers, pin.glob, what):
            if pin.banned:
                banned.setdefault(layer.name, {})[pin.format] = pin
                continue
            status, reason = applicability(layer.kind, pin.format, backend)
            if status is not Status.OK:
                raise InputError(
                    f"{pin} matches {layer.name!r} ({layer.kind}), which cannot take {pin.format}: "
                    f"{reason}; give a narrower glob"
                )
            before = kept.setdefault(layer.name, pin)
            if before.format != pin.format:
                raise InputError(
                    f"{before} and {pin} contradict each other on {layer.name!r}; remove one"
                )
    _check_bans(kept, banned)
    _check_bonds(kept, layers, backend)
    return Pins(kept, banned)


def _check_bans(kept: Mapping[str, Pin], banned: Mapping[str, Mapping[str, Pin]]) -> None:
    for name, pin in kept.items():
        if pin.format in banned.get(name, {}):
            raise InputError(
                f"{pin} and {banned[name][pin.format]} contradict each other on {name!r}; remove "
                "one"
            )


def _check_bonds(kept: Mapping[str, Pin], layers: Layers, backend: Backend) -> None:
    bonds = {**ties_of(layers), **fused_layers(layers, backend)}
    for bond, names in bonds.items():
        pinned = {name: kept[name] for name in names if name in kept}
        formats = {pin.format for pin in pinned.values()}
        if len(formats) > 1:
            told = ", ".join(f"{name} as {pin.format} ({pin})" for name, pin in pinned.items())
            raise InputError(f"layers of one group ({bond}) must take one format; got {told}")


def apply_pins(offer: Offer, pins: Pins) -> Offer:
    """Return the offer with what the pins leave; what they take away is said in it.

    Raises:
        InputError: If a layer shall keep a format that was not measured well enough to be
            offered; the message says why it was not.
    """
    options = dict(offer.options)
    refused = list(offer.not_offered)
    for name, pin in pins.kept.items():
        own = [o for o in options[name] if o.format == pin.format]
        if not own:
            raise InputError(
                f"{pin}: {name!r} is not offered {pin.format}: {_why(offer, name, pin)}"
            )
        others = [o.format for o in options[name] if o.format != pin.format]
        refused += [NotOffered(name, form, f"{pin} was asked for") for form in others]
        options[name] = tuple(own)
    for name, bans in pins.banned.items():
        left = tuple(o for o in options[name] if o.format not in bans)
        gone = [o.format for o in options[name] if o.format in bans]
        refused += [NotOffered(name, form, f"{bans[form]} was asked for") for form in gone]
        options[name] = left
    return replace(offer, options=options, not_offered=tuple(refused))


def _why(offer: Offer, name: str, pin: Pin) -> str:
    for refused in offer.not_offered:
        if (refused.layer, refused.format) == (name, pin.format):
            return refused.reason
    return "the sweep has no cell of it; sweep that layer in that format first"
