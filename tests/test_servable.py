"""What may be served or exported: runs, plans, folders of engines, ONNX files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from qbench.cli.main import run_command_line
from qbench.errors import InputError
from qbench.graph.model import save_graph
from qbench.lock import give_lock
from qbench.servable import Servable, find_servable, tokenizer_cutting_at
from qbench.tasks import load_tokenizer
from qbench.testing.graphs import tiny_encoder
from qbench.testing.models import pairs_csv, word_tokenizer

TOKENIZER = """
import zlib
def tokenize(texts):
    return [[1 + zlib.crc32(word.encode()) % 98 for word in text.split()] for text in texts]
"""
SWEEP = [
    "sweep", "model.onnx", "--tokenizer", "tokenizer.py:tokenize", "--task", "retrieval",
    "--data", "pairs.csv", "--column", "query=question", "--column", "answer=reply",
    "--splits", "16,32,rest", "--format", "int8", "--include", "*dense", "--run-id", "mine",
    "--remedies", "0",
]  # fmt: skip
RUN = "results/mine"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    save_graph(tiny_encoder(layers=1, hidden=16), folder / "model.onnx")
    pairs_csv(folder / "pairs.csv", rows=80)
    (folder / "tokenizer.py").write_text(TOKENIZER)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_command_line(SWEEP) == 0
        assert run_command_line(["plan", RUN, "--levels", "1"]) in (0, 1)
        assert run_command_line(["build", RUN]) == 0
        give_lock(Path(RUN))
    return folder


@pytest.fixture(autouse=True)
def _here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("given", [RUN, f"{RUN}/plan.yaml", f"{RUN}/engine/plan"])
def test_a_run_gives_the_engine_of_its_plan(given: str) -> None:
    found = find_servable(given)
    assert found.path == Path(RUN) / "engine" / "plan" / "engine.onnx"
    assert found.name == "mine" and found.run is not None
    assert found.tokenizer is not None and found.tokenizer(["two words"])[0]["input_ids"]
    assert found.settings.entries["session.qdq_matmulnbits_accuracy_level"] == "0"


def test_nothing_is_written_and_nothing_locked_to_serve_a_run() -> None:
    before = {path: path.stat().st_mtime_ns for path in Path(RUN).rglob("*")}
    find_servable(RUN)
    assert {path: path.stat().st_mtime_ns for path in Path(RUN).rglob("*")} == before


def test_other_engines_of_a_run_can_be_named() -> None:
    for name in ("reference", "fp32"):
        found = find_servable(RUN, engine=name)
        assert found.path == Path(RUN) / "model" / "model.onnx"
        assert found.name == "mine-reference"
    with pytest.raises(InputError, match="unknown engine 'fp23'"):
        find_servable(RUN, engine="fp23")


def test_a_plan_that_was_changed_since_is_refused() -> None:
    plan = Path(RUN) / "plan.yaml"
    content = yaml.safe_load(plan.read_text())
    row = next(row for row in content["layers"] if row["kind"] == "linear")
    row["format"] = "fp32" if row["format"] != "fp32" else "w8a16"
    plan.write_text(yaml.safe_dump(content, sort_keys=False))
    with pytest.raises(InputError, match="was not built from"):
        find_servable(RUN)
    with pytest.raises(InputError, match="was not built from"):
        find_servable(str(plan))


@pytest.mark.parametrize(
    ("prepare", "given", "words"),
    [
        ("rm engine", RUN, "qbench build"),
        ("rm plan", RUN, "no plan.yaml"),
        ("", "nowhere", "does not exist"),
        ("", "plan.yaml", "does not exist"),
        ("stray plan", "plan.yaml", "lies in no run"),
        ("two", "two", "must hold one ONNX file"),
        ("none", "none", "none"),
        ("model", "model", "qbench sweep model"),
    ],
)
def test_what_cannot_be_served_is_one_clear_error(prepare: str, given: str, words: str) -> None:
    if prepare == "rm engine":
        shutil.rmtree(Path(RUN) / "engine" / "plan")
    elif prepare == "rm plan":
        (Path(RUN) / "plan.yaml").unlink()
    elif prepare == "stray plan":
        shutil.copy(Path(RUN) / "plan.yaml", "plan.yaml")
    elif prepare:
        Path(prepare).mkdir()
        for name in ("a.onnx", "b.onnx") if prepare == "two" else ():
            shutil.copy("model.onnx", Path(prepare) / name)
        if prepare == "model":
            Path("model/config.json").write_text("{}")
    with pytest.raises(InputError, match=words):
        find_servable(given)


def test_files_and_folders_stand_for_themselves() -> None:
    assert find_servable("model.onnx").name == "model"
    Path("my engine").mkdir()
    shutil.copy("model.onnx", "my engine/engine.onnx")
    found = find_servable("my engine")
    assert isinstance(found, Servable) and found.name == "my-engine" and found.run is None


def test_a_run_is_exported_with_one_command(capsys) -> None:
    pytest.importorskip("tritonclient", reason="needs the extra 'triton'")
    capsys.readouterr()
    assert run_command_line(["export-triton", f"{RUN}/plan.yaml", "models", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == "mine" and "mine/1/model.onnx" in told["files"]


def test_a_run_is_served_with_its_tokenizer() -> None:
    pytest.importorskip("uvicorn", reason="needs the extra 'serve'")
    from qbench.hosting import HostOptions, prepare_host
    from qbench.serving.opening import ServeSettings
    from qbench.serving.server.transport import TransportLimits
    from qbench.serving.server.wire import RequestLimits

    options = HostOptions(
        ServeSettings(lanes=1, token_budget=128), RequestLimits(), TransportLimits(), port=0
    )
    hosting = prepare_host(find_servable(RUN), options)
    assert hosting.name == "mine" and hosting.contract.longest == 64
    assert hosting.host.address[1] > 0
    hosting.host.close()


@pytest.mark.parametrize("spec", ["tokenizer.py:tokenize", "folder", "folder/tokenizer.json"])
def test_tokenizers_cut_where_they_are_told(spec: str) -> None:
    word_tokenizer(Path("folder"))
    tokenizer = load_tokenizer(spec, 8)
    text = "the cat " * 20
    for longest in (5, 12):
        cut = tokenizer_cutting_at(tokenizer, longest)
        assert len(cut([text])[0]["input_ids"]) == longest == cut.max_length
