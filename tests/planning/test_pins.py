from __future__ import annotations

from dataclasses import replace

import pytest

from qbench.backends import backend_named
from qbench.errors import ConfigError, InputError
from qbench.planning.costs import NotOffered, Offer, Option
from qbench.planning.pins import Pins, apply_pins, parse_pins, resolve_pins
from qbench.records import Edge, Kind, Layer, Layers, Occurrence

CPU = backend_named("ort-cpu")


def layer(name: str, kind: Kind = Kind.LINEAR, tie: str = "", tensor: str = "") -> Layer:
    edges = (Edge(f"{name}/MatMul", 0, tensor or f"{name}/in"),) if kind is Kind.LINEAR else ()
    use = Occurrence("MatMul", (f"{name}/MatMul",), (), f"{name}/out", edges)
    return Layer(name, kind, (use,), module=name, tie=tie, weight=f"{name}.weight")


LAYERS = Layers(
    (
        layer("words", Kind.EMBEDDING, tie="table"),
        layer("block.0.query", tensor="x0"),
        layer("block.0.key", tensor="x0"),
        layer("block.0.norm", Kind.LAYERNORM),
        layer("block.1.query", tensor="x1"),
        layer("head", tie="table"),
    ),
    (),
)


def resolved(keep: list[str], ban: list[str] | None = None) -> Pins:
    return resolve_pins(parse_pins(keep, ban or [], CPU), LAYERS, CPU)


def offer() -> Offer:
    full = (Option("fp32", 0, 4, 0.0), Option("int8", 1e-3, 1, -1.0), Option("w8a16", 1e-4, 1, 0.1))
    options = {x.name: full if x.kind is Kind.LINEAR else full[:1] for x in LAYERS.layers}
    options["block.1.query"] = full[:1]
    refused = (NotOffered("block.1.query", "int8", "its cell is failed: too odd"),)
    return Offer(options, refused, {}, "fp32")


def test_a_pin_leaves_one_format_and_a_ban_leaves_the_rest() -> None:
    pins = resolved(["block.0.query=int8", "block.0.key"], ["head=w8a16"])
    left = apply_pins(offer(), pins)
    names = {name: [o.format for o in own] for name, own in left.options.items()}
    assert names["block.0.query"] == ["int8"] and names["block.0.key"] == ["fp32"]
    assert names["head"] == ["fp32", "int8"] and names["words"] == ["fp32"]
    why = {(r.layer, r.format): r.reason for r in left.not_offered}
    assert why["block.0.query", "fp32"] == "--keep block.0.query=int8 was asked for"
    assert why["head", "w8a16"] == "--ban head=w8a16 was asked for"
    assert not resolved([]) and apply_pins(offer(), resolved([])) == offer()


@pytest.mark.parametrize(
    ("keep", "ban", "error", "words"),
    [
        (["block.*.qury"], [], InputError, r"keep pattern.*matches no layer.*did you mean"),
        ([], ["nothing=int8"], InputError, "ban pattern 'nothing' matches no layer"),
        (["*.query=int9"], [], InputError, "unknown format 'int9'.*did you mean"),
        (["*.norm=int8_dynamic"], [], InputError, r"matches 'block\.0\.norm' \(layernorm\)"),
        (["*.query=int8", "block.0.*y=fp16"], [], InputError, "contradict each other on 'block"),
        (["*.query=int8"], ["*.query=int8"], InputError, "--ban .* contradict each other"),
        (["head=w8a16", "words"], [], InputError, r"one group \(table\) must take one format"),
        ([], ["*.query"], ConfigError, "ban: got .*allowed: GLOB=FORMAT"),
        ([], ["*.query=fp32"], ConfigError, "high precision of ort-cpu.*--keep"),
        (["=int8"], [], ConfigError, "keep: got '=int8'"),
        ([""], [], ConfigError, "keep: got ''"),
        (["*.query="], [], ConfigError, "keep: got"),
    ],
)
def test_what_cannot_be_is_said(
    keep: list[str], ban: list[str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        resolved(keep, ban)


def test_a_format_that_the_backend_has_not_is_said() -> None:
    few = replace(CPU, supports=tuple(s for s in CPU.supports if s.format in ("fp32", "int8")))
    with pytest.raises(InputError, match="cannot run w4a16; it runs fp32, int8"):
        parse_pins(["*=w4a16"], [], few)


def test_fused_layers_must_be_kept_alike() -> None:
    fusing = replace(CPU, fuses_siblings=True)
    pins = parse_pins(["block.0.query=int8", "block.0.key=fp32"], [], fusing)
    with pytest.raises(InputError, match=r"one group \(siblings of x0\)"):
        resolve_pins(pins, LAYERS, fusing)
    assert resolve_pins(pins, LAYERS, CPU)


def test_what_was_not_measured_well_cannot_be_kept() -> None:
    with pytest.raises(InputError, match=r"not offered int8: its cell is failed: too odd"):
        apply_pins(offer(), resolved(["block.1.query=int8"]))
    with pytest.raises(InputError, match="sweep that layer in that format first"):
        apply_pins(offer(), resolved(["block.1.query=w8a16"]))
