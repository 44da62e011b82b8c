from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from qbench.config import DataConfig, SplitsConfig
from qbench.data import SPLITS, prepare_splits, read_prepared
from qbench.data.content import file_sha256
from qbench.errors import DataError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "my rows.csv"
    frame = pd.DataFrame({"text": [f"text {i}" for i in range(50)], "label": [0, 1] * 25})
    frame.to_csv(path, index=False)
    return path


def config(source: Path, **more: object) -> DataConfig:
    given = {"splits": SplitsConfig(calibration=8, sweep=16), "licence": "CC0", **more}
    return DataConfig(source=str(source), prepared=str(source.parent / "calib_data"), **given)


def test_splits_are_made_once_and_read_back(source: Path) -> None:
    made = prepare_splits(config(source, name="rows"), "classification")
    assert made.folder == source.parent / "calib_data" / "rows"
    assert sorted(entry.name for entry in made.folder.iterdir()) == sorted(
        ["manifest.json", *(f"{name}.parquet" for name in SPLITS)]
    )
    before = {path: path.stat().st_mtime_ns for path in made.folder.iterdir()}
    again = prepare_splits(config(source, name="rows"), "classification")
    assert {path: path.stat().st_mtime_ns for path in made.folder.iterdir()} == before
    assert again.sha256 == made.sha256
    for name in SPLITS:
        pd.testing.assert_frame_equal(again.splits.named(name), made.splits.named(name))
    # The folder is a source of its own.
    direct = prepare_splits(config(made.folder), "classification")
    assert direct.splits.samples == {"calibration": 8, "sweep": 16, "verification": 26}


def test_the_manifest_says_where_it_came_from(source: Path) -> None:
    folder = prepare_splits(config(source, name="rows"), "classification").folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["origin"] == {"source": "my rows.csv", "sha256": file_sha256(source)}
    assert manifest["licence"] == "CC0"
    assert manifest["columns"] == ["text", "label", "id"]
    assert manifest["rows"] == {"source": 50, "used": 50}
    assert manifest["created_by"].startswith("qbench ")
    assert "content-hash" in manifest["split_rule"]
    for name, entry in manifest["files"].items():
        assert entry["sha256"] == file_sha256(folder / f"{name}.parquet")


def test_an_edited_file_is_named(source: Path) -> None:
    folder = prepare_splits(config(source, name="rows"), "classification").folder
    rows = pd.read_parquet(folder / "sweep.parquet")
    rows.loc[0, "label"] = 1 - rows.loc[0, "label"]
    rows.to_parquet(folder / "sweep.parquet")
    with pytest.raises(DataError, match=r"sweep.parquet was changed"):
        prepare_splits(config(source, name="rows"), "classification")
    (folder / "sweep.parquet").unlink()
    with pytest.raises(DataError, match=r"sweep.parquet is missing"):
        read_prepared(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "damaged"), ('{"qbench": 9}', "version 9"), ('{"qbench": 1}', "lacks 'name'")],
)
def test_a_bad_manifest_says_so(source: Path, content: str, words: str) -> None:
    folder = prepare_splits(config(source, name="rows"), "classification").folder
    (folder / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=words):
        read_prepared(folder)


def test_a_named_folder_refuses_another_request(source: Path) -> None:
    prepare_splits(config(source, name="rows"), "classification")
    with pytest.raises(DataError, match=r"limit = None, and 40 is asked"):
        prepare_splits(config(source, name="rows", limit=40), "classification")
    source.write_text(source.read_text() + "one more,0\n")
    with pytest.raises(DataError, match="made with sha256"):
        prepare_splits(config(source, name="rows"), "classification")


def test_without_a_name_requests_never_meet(source: Path) -> None:
    first = prepare_splits(config(source), "classification")
    second = prepare_splits(config(source, limit=40), "classification")
    assert first.folder != second.folder
    assert first.name.startswith("my-rows-")
    source.write_text(source.read_text() + "one more,0\n")
    assert prepare_splits(config(source), "classification").folder != first.folder


def test_a_failure_leaves_no_folder(source: Path) -> None:
    with pytest.raises(DataError, match="retrieval needs column 'query'"):
        prepare_splits(config(source, name="rows"), "retrieval")
    assert not (source.parent / "calib_data" / "rows").exists()
    (source.parent / "calib_data" / "rows").mkdir(parents=True)
    (source.parent / "calib_data" / "rows" / "notes.txt").touch()
    with pytest.raises(DataError, match="holds files and no manifest.json"):
        prepare_splits(config(source, name="rows"), "classification")


def test_a_tokenizer_that_confuses_answers_of_two_splits_is_refused(tmp_path: Path) -> None:
    frame = pd.DataFrame({"query": [f"q{i}" for i in range(50)]})
    frame.assign(answer=[f"answer {i}" for i in range(50)]).to_csv(tmp_path / "qa.csv", index=False)
    made = prepare_splits(config(tmp_path / "qa.csv", name="qa"), "embedding")
    same = prepare_splits(config(tmp_path / "qa.csv", name="qa"), "embedding", keys=list)
    assert same.sha256 == made.sha256
    with pytest.raises(DataError, match="prepared for another tokenizer: answer 'answer"):
        prepare_splits(config(made.folder), "embedding", keys=lambda texts: [0 for _ in texts])
