from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qbench.cli.main import run_command_line
from qbench.testing.graphs import tiny_encoder


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    ir.save(tiny_encoder(), tmp_path / "tiny.onnx")
    return str(tmp_path / "tiny.onnx")


def test_layers_are_listed_for_people_and_for_machines(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["layers", tiny]) == 0
    told = capsys.readouterr()
    assert "layers: " in told.out and "nodes in no layer: " in told.out and told.err == ""
    assert run_command_line(["layers", tiny, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["exit_code"] == 0 and len(content["sha256"]) == 64
    assert sum(content["counts"].values()) == len(content["layers"])
    assert all(node["reason"] for node in content["unlayered"])


def test_globs_choose_layers(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["layers", tiny, "--include", "*.query", "--json"]) == 0
    names = [layer["name"] for layer in json.loads(capsys.readouterr().out)["layers"]]
    assert names and all(name.endswith(".query") for name in names)


def write(path: Path, body: str) -> None:
    ir.save(
        ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21, "my" : 1]> g {body}'), path
    )


@pytest.mark.parametrize(
    ("make", "arguments", "part"),
    [
        (None, [], "does not exist"),
        ("text", [], "cannot be read as ONNX"),
        ("cut", [], "cut short"),
        ("nan", [], "NaN or infinite weights in w"),
        ("(float[b,4] x) => (float[b,4] y) { y = Identity(x) }", [], "no layer that could take"),
        ("(float[b,4] x) => (float[b,4] y) { y = my.Odd(x) }", [], "my:Odd"),
        ("tiny", ["--include", "*.qery"], "matches"),
        ("tiny", ["--output", "no_such_output"], "no output 'no_such_output'"),
        ("tiny", ["--pooling", "mena"], "unknown pooling 'mena' (did you mean 'mean' or 'max'?)"),
    ],
)
def test_bad_input_is_one_error_and_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: str | None,
    arguments: list[str],
    part: str,
) -> None:
    path = tmp_path / "model.onnx"
    if make in ("tiny", "cut", "nan"):
        model = tiny_encoder()
        if make == "nan":
            text = "(float[b,2] x) => (float[b,2] y) <float[2,2] w = {1,2,3,4}> {y = MatMul(x, w)}"
            model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]> g {text}')
            bad = ir.tensor(np.full((2, 2), np.nan, np.float32), name="w")
            model.graph.initializers["w"].const_value = bad
        ir.save(model, path)
    elif make == "text":
        path.write_text("no model at all\n" * 10)
    elif make is not None:
        write(path, make)
    if make == "cut":
        path.write_bytes(path.read_bytes()[:-500])
    assert run_command_line(["layers", str(path), *arguments]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error: ") and told.err.count("error:") == 1
    assert part in " ".join(told.err.split()) and "Traceback" not in told.err and not told.out


def test_an_onnx_file_without_a_tokenizer_says_what_one_is(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.csv").write_text(
        "text,label\n" + "".join(f"t{i},{i % 2}\n" for i in range(9))
    )
    code = run_command_line(
        ["sweep", tiny, "--task", "classification", "--data", str(tmp_path / "data.csv")]
        + ["--column", "text=text", "--column", "label=label", "--results", str(tmp_path / "r")]
    )
    told = capsys.readouterr().err
    assert code == 2 and "--tokenizer" in told and "Traceback" not in told
