from __future__ import annotations

from dataclasses import replace

from qbench.planning.costs import NotOffered, Offer, Option
from qbench.planning.reasons import explain, ordinal, plan_layers
from qbench.records import Kind, Layer, Layers


def offer() -> Offer:
    options = {
        f"l{i}": (
            Option("fp32", 0.0, 100, 0.0),
            Option("int8", 0.01234567 / (i + 1), 25, -1e-4),
            Option("int8_dynamic", 0.02 / (i + 1), 25, -2e-4),
            Option("w8a16", 1e-5, 25, 1e-5),
        )
        for i in range(4)
    }
    options["norm"] = (Option("fp32", 0.0, 0, 0.0),)
    options["slow"] = (Option("fp32", 0.0, 100, 0.0), Option("w8a16", 1e-5, 25, 1e-5))
    refused = (NotOffered("norm", "int8", "its cell is not_yet: later"),)
    return Offer(options, refused, {"table": ("l2", "l3")}, "fp32")


FORMATS = {
    "l0": "int8_dynamic", "l1": "fp32", "l2": "int8", "l3": "int8", "norm": "fp32", "slow": "fp32",
}  # fmt: skip


def test_each_layer_says_why() -> None:
    why = explain(offer(), FORMATS, "latency")
    assert why["l0"] == (
        "int8_dynamic: least seconds within the divergence budget; divergence 0.02 (rank 1 of 4)"
    )
    assert why["l1"] == "fp32: kept, its divergence as int8 0.0062 is the 2nd largest"
    assert why["l2"] == (
        "int8: within the divergence budget; int8_dynamic takes fewer seconds and diverges by "
        "0.0067; divergence 0.0041 (rank 3 of 4); one format with all that share table"
    )
    assert why["norm"] == (
        "fp32: kept, no other format is offered; int8: its cell is not_yet: later"
    )
    assert why["slow"] == "fp32: kept, none of w8a16 is faster here"


def test_evidence_from_a_part_of_the_samples_says_so() -> None:
    whole = offer()
    options = {
        name: tuple(replace(o, part=4 if o.format == "int8" else 0) for o in own)
        for name, own in whole.options.items()
    }
    why = explain(replace(whole, options=options), FORMATS, "latency")
    assert "divergence ≈ 0.0041 (estimated from 4 samples) (rank 3 of 4)" in why["l2"]
    assert "as int8 ≈ 0.0062 (estimated from 4 samples) is the 2nd largest" in why["l1"]
    assert "≈" not in why["l0"]


def test_bytes_speak_of_size() -> None:
    why = explain(offer(), {**FORMATS, "l0": "w8a16"}, "bytes")
    assert why["l0"].startswith("w8a16: least bytes within")
    assert why["slow"] == "fp32: kept, its divergence as w8a16 1e-05 is the 5th largest"


def test_plan_layers_list_everything_with_evidence_and_clips() -> None:
    layers = Layers(tuple(Layer(name, Kind.LINEAR, ()) for name in FORMATS), ())
    rows = plan_layers(layers, offer(), FORMATS, clips={"l1": {"x": 5.5}}, objective="latency")
    assert [row.name for row in rows] == list(FORMATS)
    kept = rows[1]
    assert (kept.format, kept.divergence, kept.clips) == ("fp32", 0.0, {"x": 5.5})
    assert kept.alternatives == {"int8": 0.006173, "int8_dynamic": 0.01, "w8a16": 1e-5}
    assert rows[2].divergence == 0.004115 and "fp32" not in rows[2].alternatives


def test_ordinals() -> None:
    words = [ordinal(rank).removesuffix(" largest") for rank in (1, 2, 3, 4, 11, 12, 21, 22, 111)]
    assert words == ["largest", "2nd", "3rd", "4th", "11th", "12th", "21st", "22nd", "111th"]
