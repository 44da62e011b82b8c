"""fp32 beside fp16 as a choice: it costs more than the high precision and may lower the error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from qbench.formats import format_named
from qbench.planning.costs import NotOffered, Offer, Option, weight_elements
from qbench.planning.pins import Pins
from qbench.records import Layer, Layers, Status, SweepRecord

_WIDE = "fp32"


def offer_wide(
    offer: Offer,
    records: Sequence[SweepRecord],
    layers: Layers,
    kept: Mapping[str, str],
    timed: bool = True,
) -> Offer:
    """Return an offer in which fp32 is worth what it gives back.

    Cells are measured against the model in the high precision, fp16. What fp32 takes off the
    divergence from the model in fp32 (``SweepRecord.regained``, where its interval excludes zero)
    is added to every other format of the layer, the high precision's too, so that sums stay those
    of divergences. Where nothing is given back fp32 can be pinned, and nothing else chooses it: it
    diverges, and costs no less. A layer that fp16 cannot hold is offered fp32 alone, and is joined
    with no other.

    Args:
        offer: What ``make_offer`` gives; it is returned as it is where fp32 is the high precision.
        records: The sweep.
        layers: The layers of the model.
        kept: Why fp16 cannot hold a layer, by layer.
        timed: Whether seconds are the backend's own. Where another one runs its graphs in its
            place they say nothing, and only bytes count.
    """
    if offer.high_precision == _WIDE:
        return offer
    gains = {r.layer: _gain(r) for r in records if r.format == _WIDE and r.status is Status.OK}
    options: dict[str, tuple[Option, ...]] = {}
    refused = list(offer.not_offered)
    for name, layer in layers.by_name().items():
        if name in kept:
            options[name] = (_kept_wide(layer),)
            gone = [r for r in refused if r.layer == name and r.format == offer.high_precision]
            if not gone:
                refused.append(NotOffered(name, offer.high_precision, kept[name]))
            continue
        own = tuple(_priced(o, layer, offer.high_precision, timed) for o in offer.options[name])
        options[name] = _shifted(own, gains.get(name, 0.0))
    fused = {
        bond: left
        for bond, names in offer.fused.items()
        if len(left := tuple(name for name in names if name not in kept)) > 1
    }
    return replace(offer, options=options, not_offered=tuple(refused), fused=fused)


def offer_pinned(offer: Offer, pins: Pins, layers: Layers) -> Offer:
    """Return an offer with fp32 for layers that are pinned to it and were not measured in it.

    It rounds nothing that fp16 does not, so that a pin needs no measurement; no gain is counted.
    """
    if offer.high_precision == _WIDE:
        return offer
    options = dict(offer.options)
    known = layers.by_name()
    for name, pin in pins.kept.items():
        if pin.format == _WIDE and offer.option(name, _WIDE) is None:
            options[name] = (*options[name], _kept_wide(known[name]))
    return replace(offer, options=options)


def _gain(record: SweepRecord) -> float:
    found = record.regained
    return found.value if found is not None and found.low > 0 else 0.0


def _kept_wide(layer: Layer) -> Option:
    bits = format_named(_WIDE).weight_bits
    return Option(_WIDE, 0.0, layer.weight_bytes, 0.0, weight_elements(layer), bits)


def _priced(option: Option, layer: Layer, high: str, timed: bool) -> Option:
    """Return an option with what it costs beside the high precision, which is stored in its width.

    fp32 always costs something, be it a byte: of equals the high precision is taken.
    """
    stored = stored_bytes(layer, high)
    seconds = option.seconds if timed else 0.0
    if option.format == high:
        return replace(option, bytes=stored)
    if option.format == _WIDE:
        return replace(option, bytes=max(option.bytes, stored + 1), seconds=max(0.0, seconds))
    return replace(option, seconds=seconds)


def stored_bytes(layer: Layer, format_name: str) -> int:
    """Return the bytes of a layer's fp32 weight in a floating-point format."""
    return layer.weight_bytes * format_named(format_name).weight_bits // 32


def _shifted(options: tuple[Option, ...], gain: float) -> tuple[Option, ...]:
    if gain <= 0:
        return options
    return tuple(
        replace(o, divergence=0.0 if o.format == _WIDE else o.divergence + gain) for o in options
    )
