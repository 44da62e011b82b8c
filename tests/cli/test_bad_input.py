"""Bad input through the command line: one clear error, exit code 2, no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qbench.backends import BACKENDS
from qbench.cli.main import run_command_line
from qbench.runtime.presence import why_absent
from qbench.testing.models import bert_folder, pairs_csv


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    bert_folder(folder / "model")
    pairs_csv(folder / "pairs.csv")
    return folder


@pytest.fixture(autouse=True)
def _here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


GOOD = ["sweep", "model", "--data", "pairs.csv", "--task", "retrieval"]
COLUMNS = ["--column", "query=question", "--column", "answer=reply"]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    code = run_command_line([*arguments, "--run-id", "bad"])
    told = capsys.readouterr().err
    assert code == 2, told
    assert "Traceback" not in told
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, told
    return told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*GOOD, *COLUMNS, "--format", "int8_dynamc"], ["int8_dynamc", "int8_dynamic"]),
        (["sweep", "model", "--data", "pairs.csv", "--task", "retreival"], ["retrieval"]),
        ([*GOOD, *COLUMNS, "--backend", "ort-gpu"], ["ort-gpu", "ort-cpu"]),
        pytest.param(
            [*GOOD, *COLUMNS, "--backend", "ort-cuda"],
            [
                "ort-cuda is not installed",
                "CUDAExecutionProvider",
                "offers",
                "qbench[gpu]",
                "ort-cpu",
            ],
            marks=pytest.mark.skipif(
                not why_absent(BACKENDS["ort-cuda"]), reason="ONNX Runtime runs on a GPU here"
            ),
        ),
        ([*GOOD, *COLUMNS, "--max-drop", "lots"], ["lots", "5 %"]),
        ([*GOOD, *COLUMNS, "--metric", "mmr"], ["mmr", "mrr"]),
        ([*GOOD, "--column", "query=qestion", "--column", "answer=reply"], ["question"]),
        ([*GOOD, "--column", "query"], ["ROLE=COLUMN"]),
        ([*GOOD, *COLUMNS, "--include", "encodr.*"], ["encodr.*"]),
        ([*GOOD, *COLUMNS, "--splits", "16,40"], ["64,230,rest"]),
        ([*GOOD, *COLUMNS, "--pooling", "meen"], ["mean"]),
        ([*GOOD, *COLUMNS, "--keep", "*.qury"], ["*.qury", "matches no layer", "query"]),
        ([*GOOD, *COLUMNS, "--keep", "*.query=int9"], ["int9", "int8"]),
        ([*GOOD, *COLUMNS, "--keep", "*=int8", "--ban", "*.query=int8"], ["cannot take int8"]),
        (
            [*GOOD, *COLUMNS, "--keep", "*.query=int8", "--ban", "*.0.*=int8"],
            ["--keep *.query=int8", "--ban *.0.*=int8", "contradict"],
        ),
        ([*GOOD, *COLUMNS, "--ban", "*.query"], ["GLOB=FORMAT"]),
        ([*GOOD, *COLUMNS, "--objective", "divergence"], ["max_bytes", "max_bits"]),
        ([*GOOD, *COLUMNS, "--objective", "divergense"], ["divergense", "divergence"]),
        ([*GOOD, *COLUMNS, "--max-latency", "fast"], ["fast", "60 %"]),
        ([*GOOD, *COLUMNS, "--max-bytes", "big"], ["big", "4G"]),
        (["sweep", "model"], ["--data"]),
        (["sweep", "modle", "--data", "pairs.csv", "--task", "retrieval"], ["modle"]),
        ([*GOOD, "--column", "answer=reply"], ["--column query=COLUMN", "question"]),
        (["sweep", "model", "--data", "model", "--task", "retrieval"], ["is a folder", ".csv"]),
        ([*GOOD, *COLUMNS, "--results", "pairs.csv"], ["pairs.csv", "--results"]),
        (["sweep", "model", "--data", "paris.csv", "--task", "retrieval"], ["paris.csv"]),
    ],
)
def test_one_clear_error(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(arguments, capsys)
    for word in words:
        assert word in told


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"question,reply\n", "row"),
        ("question,reply\ncaf\u00e9,th\u00e9\n".encode("latin-1"), "UTF-8"),
    ],
)
def test_unreadable_data(
    content: bytes, word: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "bad.csv").write_bytes(content)
    arguments = ["sweep", "model", "--data", "bad.csv", "--task", "retrieval", *COLUMNS]
    assert word in refused(arguments, capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {source: model}\ndata: {source: pairs.csv}\nsweeep: {}\n", ["sweeep", "sweep"]),
        ("model: {source: model}\ndata: {source: pairs.csv, limit: many}\n", ["limit", "many"]),
        ("model: [\n", ["wrong.yaml", "line 2"]),
        ("data: {source: pairs.csv}\n", ["model"]),
    ],
)
def test_a_wrong_configuration(
    text: str, words: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "wrong.yaml").write_text(text)
    told = refused(["run", "wrong.yaml"], capsys)
    for word in words:
        assert word in told


def test_with_json_the_error_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line([*GOOD, *COLUMNS, "--format", "int9", "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["exit_code"] == 2 and "int9" in answer["error"]


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (["--max-bits", "2"], "mean bits a weight of at most 2; reachable: "),
        (["--max-bytes", "1K"], "no engine has at most 1,000 bytes; reachable: "),
    ],
)
def test_a_budget_that_nothing_reaches_ends_before_the_sweep(
    limit: list[str], words: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*GOOD, *COLUMNS, "--splits", "16,40,rest", "--run-id", "poor", *limit, "--json"]
    assert run_command_line(arguments) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdict"] == "budget_unreachable" and words in answer["error"]
    assert " to " in answer["error"].partition("reachable: ")[2]
    assert not (place / "results" / "poor" / "sweep.jsonl").exists()


@pytest.mark.parametrize("command", ["plan", "build", "verify", "bench", "report"])
def test_a_folder_that_is_no_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line([command, "results/nothing"]) == 2
    assert "no such run" in capsys.readouterr().err


def test_later_stages_name_the_earlier_one(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["calibrate", "model", "--data", "pairs.csv", "--task", "retrieval", *COLUMNS]
    assert run_command_line([*arguments, "--splits", "16,40,rest", "--run-id", "early"]) == 0
    capsys.readouterr()
    for command, before in (("plan", "sweep"), ("verify", "plan"), ("build", "plan")):
        assert run_command_line([command, "results/early"]) == 2
        assert f"qbench {before}" in capsys.readouterr().err
