"""A run folder that was edited, or brought from another machine: one clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from qbench import provenance
from qbench.cli.main import run_command_line
from qbench.cli.options import overrides_from
from qbench.graph.model import save_graph
from qbench.lock import give_lock
from qbench.report.run_records import load_records
from qbench.rundir import RunDir
from qbench.testing.graphs import tiny_encoder
from qbench.testing.models import pairs_csv

TOKENIZER = """
import zlib
def tokenize(texts):
    return [[1 + zlib.crc32(word.encode()) % 98 for word in text.split()] for text in texts]
"""
RUN = Path("results/kept")
SWEEP = [
    "sweep", "model.onnx", "--tokenizer", "tokenizer.py:tokenize", "--task", "retrieval",
    "--data", "pairs.csv", "--column", "query=question", "--column", "answer=reply",
    "--splits", "16,32,rest", "--format", "w4a16", "--include", "*dense", "--run-id", "kept",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    save_graph(tiny_encoder(layers=1, hidden=16), folder / "model.onnx")
    pairs_csv(folder / "pairs.csv", rows=80)
    (folder / "tokenizer.py").write_text(TOKENIZER)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_command_line(SWEEP) == 0
        give_lock(RUN)
    return folder


@pytest.fixture(autouse=True)
def _here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    yield
    give_lock(RUN)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert run_command_line(arguments) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert sum(line.startswith("error: ") for line in told.splitlines()) == 1
    return " ".join(told.split())


COMMANDS = [SWEEP, *([name, str(RUN)] for name in ("resume", "plan", "audit"))]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: str(arguments[0]))
def test_an_edited_journal_is_refused_by_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    journal = RUN / "sweep.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace('"format":"w4a16"', '"format":"int9"', 1)
    journal.write_text("".join(lines))
    told = refused(arguments, capsys)
    assert "sweep.jsonl, line 3:" in told and "put it back as it was" in told
    assert journal.read_text() == "".join(lines)


def test_a_report_of_an_edited_journal_says_so() -> None:
    journal = RUN / "sweep.jsonl"
    journal.write_text(journal.read_text().replace('"n":', '"n":1', 1))
    records = load_records(RunDir(RUN))
    assert not records.sweep
    assert "sweep.jsonl, line 2:" in records.missing["sweep"]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: str(arguments[0]))
def test_a_run_of_another_machine_type_is_refused_by_name(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()}
    monkeypatch.setattr(provenance, "instruction_sets", lambda: "asimd asimddp")
    told = refused(arguments, capsys)
    assert "another type of machine" in told
    assert "machine.instructions was " in told and "is now 'asimd asimddp'" in told
    for name in ("sweep.jsonl", "ranges.jsonl", "model/model.onnx"):
        assert (RUN / name).read_bytes() == before[RUN / name]
    monkeypatch.undo()


def test_a_stored_model_of_another_machine_type_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (RUN / "sweep.jsonl").unlink()
    card = RUN / "model" / "model.json"
    before = json.loads(card.read_text())["card"]["fingerprint"]
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "instruction_sets", lambda: "asimd asimddp")
        assert run_command_line(SWEEP) == 0
    assert json.loads(card.read_text())["card"]["fingerprint"] != before
    facts = json.loads((RUN / "run.json").read_text())
    assert facts["machine_type"]["instructions"] == "asimd asimddp"
    header = json.loads((RUN / "sweep.jsonl").read_text().splitlines()[0])
    assert header["key"]["machine"] == facts["machine_type"]


@pytest.mark.parametrize(
    "options",
    [
        ["--backend", "tensorrt"],
        ["--keep", "*.qury"],
        ["--hardware", "SM86"],
        ["--objective", "latency", "--ban", "*dense=fp32"],
    ],
)
def test_options_of_a_refused_plan_are_not_kept(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = RunDir.open(RUN).read_run()["config"]
    refused(["plan", str(RUN), *options], capsys)
    assert RunDir.open(RUN).read_run()["config"] == before
    assert run_command_line(["plan", str(RUN), "--levels", "1", "--rounds", "0"]) in (0, 1)
    assert RunDir.open(RUN).read_run()["config"]["plan"]["levels"] == 1


def test_a_limit_or_a_pin_can_be_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["plan", str(RUN), "--levels", "1", "--rounds", "0"]
    limits = ["--max-bytes", "1K", "--max-bits", "1", "--keep", "*dense"]
    assert run_command_line([*short, *limits]) == 1
    given = RunDir.open(RUN).read_run()["config"]["plan"]
    assert (given["max_bytes"], given["max_bits"], len(given["keep"])) == ("1K", 1.0, 1)
    back = ["--max-bytes", "none", "--max-bits", "none", "--keep", "none"]
    assert run_command_line([*short, *back]) in (0, 1)
    given = RunDir.open(RUN).read_run()["config"]["plan"]
    assert (given["max_bytes"], given["max_bits"], given["keep"]) == (None, None, [])


def test_a_task_and_a_pooling_may_be_called_none() -> None:
    """The word takes back limits and pins alone."""
    said = overrides_from({"task": "none", "pooling": "none", "max_bytes": "none", "keep": ()})
    assert said == {"task.kind": "none", "model.pooling": "none", "plan.max_bytes": None}
