from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from jsonschema import Draft202012Validator

from qbench.backends import BACKENDS, backend_named
from qbench.errors import PlanError
from qbench.formats import FORMATS
from qbench.planning.plancheck import plan_schema
from qbench.planning.planfile import plan_sha256, read_plan, write_plan
from qbench.records import Edge, Kind, Layer, Layers, Occurrence, Plan, PlanLayer

QUERY, TABLE, NORM, HEAD = "encoder.0.query", "embed.words", "encoder.0.norm", "head"
SHA = "ab" * 32


def layer(name: str, kind: Kind, tie: str = "") -> Layer:
    edges = (Edge(f"{name}/MatMul", 0, f"{name}/in"),) if kind is Kind.LINEAR else ()
    use = Occurrence("MatMul", (f"{name}/MatMul",), (f"{name}/in",), f"{name}/out", edges)
    return Layer(name, kind, (use,), weight=f"{name}.weight", tie=tie)


LAYERS = Layers(
    (
        layer(TABLE, Kind.EMBEDDING, "words"),
        layer(QUERY, Kind.LINEAR),
        layer(NORM, Kind.LAYERNORM),
        layer(HEAD, Kind.LINEAR, "words"),
    ),
    (),
)


def plan() -> Plan:
    return Plan(
        version=1,
        backend="ort-cpu",
        model_source="hub:some/model",
        model_sha256=SHA,
        layers=(
            PlanLayer(TABLE, Kind.EMBEDDING, "w8a16", "w8a16: least bytes", 2.5e-7),
            PlanLayer(
                QUERY,
                Kind.LINEAR,
                "int8",
                "int8: least seconds; divergence 0.0003 (rank 1 of 2)",
                np.float64(0.0003),  # type: ignore[arg-type]
                {f"{QUERY}/in": 5.5},
                {"w4a16": 0.01},
            ),
            PlanLayer(NORM, Kind.LAYERNORM, "fp32", "fp32: kept", 0.0),
            PlanLayer(HEAD, Kind.LINEAR, "w8a16", "", None, {f"{HEAD}/in": 1.0 / 3.0}),
        ),
        session_options=dict(backend_named("ort-cpu").session_options),
        constraints={"metric": "mrr", "max_drop": "5 %", "objective": "latency"},
        predicted={"divergence": {"value": 3e-4, "low": 1e-5}, "bytes": 123, "seconds": -0.002},
        measured={"drop": 0.001, "verdict": "verified"},
        history=({"engine": "front-1", "level": 1e-5, "formats": {"int8": 1}},),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "plan.yaml"
    write_plan(plan(), target)
    return target


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = yaml.safe_load(path.read_text())
    change(document)
    path.write_text(yaml.dump(document, sort_keys=False))


def refused(path: Path, change: Callable[[dict[str, Any]], object]) -> str:
    edit(path, change)
    with pytest.raises(PlanError) as caught:
        read_plan(path, LAYERS, "ort-cpu", model_sha256=SHA)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_what_is_written_is_read(path: Path) -> None:
    assert read_plan(path, LAYERS, backend_named("ort-cpu"), model_sha256=SHA) == plan()
    assert read_plan(path) == plan()


def test_the_file_tells_a_person_how_to_change_it(path: Path) -> None:
    text = path.read_text()
    head = [line for line in text.splitlines() if line.startswith("#")]
    told = "\n".join(head)
    assert "qbench build" in told and "qbench verify" in told and "plan-1.schema.json" in told
    assert "embedding: fp32, fp16, bf16, int8, w8a16" in told
    assert "every other kind: fp32, fp16, bf16, int8" in told
    assert max(map(len, head)) <= 100
    assert f"- name: {QUERY}\n  kind: linear\n  format: int8\n  reason: " in text
    assert "&id" not in text and "numpy" not in text and "!!" not in text
    names = [row["name"] for row in yaml.safe_load(text)["layers"]]
    assert names == [TABLE, QUERY, NORM, HEAD]


def test_same_plan_same_bytes(path: Path, tmp_path: Path) -> None:
    write_plan(read_plan(path), tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_bytes() == path.read_bytes()


def test_a_hand_edit_is_taken(path: Path) -> None:
    path.write_text(path.read_text().replace("format: int8\n", "format: int8_dynamic\n"))
    assert read_plan(path, LAYERS).formats()[QUERY] == "int8_dynamic"


def test_layers_in_another_order_come_back_in_the_models(path: Path) -> None:
    edit(path, lambda d: d["layers"].reverse())
    assert [row.name for row in read_plan(path, LAYERS).layers] == [TABLE, QUERY, NORM, HEAD]


# --------------------------------------------------------------------------- the schema


def test_the_schema_is_valid_and_knows_our_words() -> None:
    schema = plan_schema()
    Draft202012Validator.check_schema(schema)
    row = schema["$defs"]["layer"]["properties"]
    assert row["format"]["enum"] == list(FORMATS)
    assert row["kind"]["enum"] == [str(kind) for kind in Kind]
    assert schema["properties"]["backend"]["enum"] == list(BACKENDS)


def test_a_written_plan_fits_the_schema_as_published(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert not list(Draft202012Validator(plan_schema()).iter_errors(document))
    assert json.loads(json.dumps(document)) == document


# ------------------------------------------------------------------- what can be wrong


def test_no_plan_at_all(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such plan"):
        read_plan(tmp_path / "none.yaml")
    for text, words in (("a: [1", "not a valid plan"), ("- 1", "mapping"), ("", "empty")):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(PlanError, match=words):
            read_plan(tmp_path / "bad.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="UTF-8"):
        read_plan(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(version=2), "version 2; this qbench reads version 1"),
        (lambda d: d.pop("version"), "no version"),
        (lambda d: d.update(layer=[]), "unknown key 'layer' (did you mean 'layers'?)"),
        (lambda d: d.pop("layers"), "missing: 'layers'"),
        (lambda d: d.update(layers=[]), "layers: got nothing"),
        (lambda d: d.update(layers={"a": 1}), "layers: got a mapping; allowed: a list"),
        (lambda d: d["layers"].append("x"), "layers[4]: got 'x'; allowed: a mapping"),
        (lambda d: d.update(backend="ort-cpuu"), "unknown backend 'ort-cpuu' (did you mean"),
        (lambda d: d.update(backend="tensorrt"), "'tensorrt', and 'ort-cpu' was asked for"),
        (lambda d: d["model"].update(sha256="xyz"), "64 hexadecimal digits"),
        (lambda d: d["model"].update(sha256="cd" * 32), "sha256 cdcdcdcdcdcd… (hub:some/model)"),
        (
            lambda d: d["session_options"].update({"session.intra_op.alow_spinning": "0"}),
            "session_options: unknown option 'session.intra_op.alow_spinning' (did you mean "
            "'session.intra_op.allow_spinning'",
        ),
        (
            lambda d: d["session_options"].update({"session.intra_op.allow_spinning": 0}),
            "got 0; allowed: text (put quotes around it: '0')",
        ),
        (
            lambda d: d["layers"][1].update(format="int9"),
            f"layer '{QUERY}', format: unknown format 'int9' (did you mean 'int8'",
        ),
        (
            lambda d: d["layers"][2].update(format="fp8"),
            f"layer '{NORM}' cannot take fp8: fp8 on layernorm is not offered by this version",
        ),
        (
            lambda d: d["layers"][2].update(format="int8_dynamic"),
            f"layer '{NORM}' cannot take int8_dynamic: int8_dynamic on layernorm is not offered by "
            "this version of qbench; allowed on layernorm: fp32, fp16, bf16, int8",
        ),
        (
            lambda d: d["layers"][0].update(format="int8_dynamic"),
            "embedding looks up rows; allowed on embedding: fp32, fp16, bf16, int8, w8a16",
        ),
        (
            lambda d: d["layers"][1].update(name="encoder.0.qeury"),
            "unknown layer 'encoder.0.qeury' (did you mean 'encoder.0.query'?)",
        ),
        (lambda d: d["layers"].pop(2), f"layer '{NORM}' is missing"),
        (lambda d: d["layers"].append(d["layers"][2]), f"layer '{NORM}' is listed 2 times"),
        (lambda d: d["layers"][1].update(kind="conv"), f"layer '{QUERY}' is of kind linear"),
        (lambda d: d["layers"][1].update(kind="linaer"), "unknown kind 'linaer' (did you mean"),
        (lambda d: d["layers"][1].pop("clips"), f"needs the clip of '{QUERY}/in'"),
        (
            lambda d: d["layers"][1].update(clips={"other": 1.0}),
            f"needs the clip of '{QUERY}/in' under `clips`",
        ),
        (lambda d: d["layers"][1]["clips"].update(x=0), "got 0; allowed: a number > 0"),
        (lambda d: d["layers"][1]["clips"].update(x=float("inf")), "x is inf; a finite number"),
        (
            lambda d: d["layers"][1].update(divergence="1e-5"),
            "(YAML reads it as text; write 1.000000e-05)",
        ),
        (lambda d: d["layers"][1].update(divergence=-1), "got -1; allowed: a number ≥ 0"),
        (lambda d: d["layers"][1].update(fromat="fp32"), "unknown key 'fromat' (did you mean"),
        (lambda d: d["layers"][1].pop("format"), f"layer '{QUERY}': missing: 'format'"),
        (
            lambda d: d["layers"][3].update(format="fp32"),
            f"share the weight 'words' must take one format; got {TABLE} as w8a16, {HEAD} as fp32",
        ),
    ],
)
def test_one_clear_error(
    path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    message = refused(path, change)
    assert words in message, message
    assert len(message.splitlines()) <= 3


def test_a_key_given_twice_is_refused(path: Path) -> None:
    text = path.read_text().replace("  format: int8\n", "  format: int8\n  format: fp16\n")
    path.write_text(text)
    with pytest.raises(PlanError, match="'format' is given twice"):
        read_plan(path)


def test_an_edit_that_breaks_fused_layers_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = replace(layer("encoder.0.key", Kind.LINEAR), occurrences=LAYERS.layers[1].occurrences)
    known = Layers((*LAYERS.layers, key), ())
    row = {"name": key.name, "kind": "linear", "format": "fp32"}
    edit(path, lambda d: d["layers"].append(row))
    assert read_plan(path, known).formats()[key.name] == "fp32"
    fusing = replace(backend_named("ort-cpu"), fuses_siblings=True)
    monkeypatch.setitem(BACKENDS, "ort-cpu", fusing)
    with pytest.raises(PlanError, match=f"{QUERY} as int8, {key.name} as fp32"):
        read_plan(path, known)


def test_every_problem_is_listed(path: Path) -> None:
    def spoil(document: dict[str, Any]) -> None:
        document["layers"][1]["kind"] = "conv"
        document["layers"][2]["format"] = "w4a16"

    message = refused(path, spoil)
    assert "2 problems" in message and QUERY in message and NORM in message


def test_a_backend_that_is_none(path: Path) -> None:
    edit(path, lambda d: d.update(backend="ort-gpu"))
    with pytest.raises(PlanError, match="backend 'ort-gpu'"):
        read_plan(path)


def test_a_plan_that_could_not_be_read_back_is_not_written(path: Path) -> None:
    before = path.read_text()
    rows = list(plan().layers)
    rows[1] = replace(rows[1], clips={})
    with pytest.raises(PlanError, match="needs the clip"):
        write_plan(replace(plan(), layers=tuple(rows)), path)
    assert path.read_text() == before


# ------------------------------------------------------------------------------ the hash


def changed(index: int, **values: Any) -> Plan:
    rows = list(plan().layers)
    rows[index] = replace(rows[index], **values)
    return replace(plan(), layers=tuple(rows))


def test_the_hash_follows_what_determines_the_engine() -> None:
    same = plan_sha256(plan())
    assert len(same) == 64
    for other in (
        changed(1, format="int8_dynamic"),
        changed(1, clips={f"{QUERY}/in": 5.6}),
        replace(plan(), model_sha256="cd" * 32),
        replace(plan(), session_options={}),
    ):
        assert plan_sha256(other) != same


def test_the_hash_ignores_evidence() -> None:
    same = plan_sha256(plan())
    for other in (
        changed(1, reason="other", divergence=0.5, alternatives={}),
        changed(3, clips={}),  # w8a16 needs no range
        replace(plan(), measured=None, verified={"a": 1}, history=(), constraints={}),
        replace(plan(), layers=tuple(reversed(plan().layers)), model_source="elsewhere"),
    ):
        assert plan_sha256(other) == same
