from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pandas as pd
import pytest

from qbench.config import DataConfig
from qbench.data import Form, load_table, prepare_splits
from qbench.errors import DataError, MissingDependencyError

CHATTERBOT = pytest.mark.skipif(
    importlib.util.find_spec("chatterbot_corpus") is None, reason="needs the extra 'demo'"
)


@pytest.mark.demo
@CHATTERBOT
def test_chatterbot_gives_questions_and_answers(tmp_path: Path) -> None:
    config = DataConfig(source="package:chatterbot_corpus", prepared=str(tmp_path), name="demo")
    table = load_table(config)
    assert table.form is Form.RETRIEVAL and table.licence == "BSD"
    assert table.origin["version"] == "1.3.3"
    assert "1 conversation(s) without a second turn left out" in table.remarks
    prepared = prepare_splits(config, "embedding")
    assert prepared.splits.samples == {"calibration": 64, "sweep": 230, "verification": 454}
    answers = [set(prepared.splits.named(name)["answer"]) for name in prepared.splits.samples]
    assert sum(map(len, answers)) == len(set.union(*answers)) == 870


def test_unknown_and_absent_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="unknown data package 'chaterbot' .did you mean"):
        load_table(DataConfig(source="package:chaterbot"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install chatterbot-corpus"):
        load_table(DataConfig(source="package:chatterbot_corpus"))


def test_a_file_has_no_subset(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\na\n")
    with pytest.raises(DataError, match="data.subset is for hub data sets"):
        load_table(DataConfig(source=str(tmp_path / "a.csv"), subset="x"), "none")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the hub's layout, and nothing else reachable."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "pairs"
    folder.mkdir()
    for split in ("train", "test"):
        rows = {"sentence": [f"{split} {i}" for i in range(3)], "label": [0, 1, -1]}
        pd.DataFrame(rows).to_csv(folder / f"{split}.csv", index=False)
    return folder


def test_a_hub_layout_loads_offline(hub: Path) -> None:
    config = DataConfig(source=f"hub:{hub}", split="test", columns={"text": "sentence"})
    table = load_table(config, "none")
    assert table.frame["text"].tolist() == ["test 0", "test 1", "test 2"]
    assert table.origin["fingerprint"]
    with pytest.raises(DataError, match="row 3, column 'label': label -1 is no class"):
        load_table(config, "classification")


def test_a_cached_hub_data_set_loads_offline(hub: Path) -> None:
    import datasets

    datasets.load_dataset(str(hub))
    (hub.parent / "cache" / "pairs").rename(hub.parent / "cache" / "owner___pairs")
    config = DataConfig(source="hub:owner/pairs", split="train", columns={"text": "sentence"})
    assert load_table(config, "none").frame["text"].tolist() == ["train 0", "train 1", "train 2"]


def test_hub_errors_are_clear(hub: Path) -> None:
    with pytest.raises(DataError, match="several splits: set data.split to train or test"):
        load_table(DataConfig(source=f"hub:{hub}"), "none")
    with pytest.raises(DataError, match="unknown split 'tset' .did you mean 'test'"):
        load_table(DataConfig(source=f"hub:{hub}", split="tset"), "none")
    with pytest.raises(DataError, match="hub:owner/absent: not reachable and not in the local"):
        load_table(DataConfig(source="hub:owner/absent", split="test"), "none")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_table(DataConfig(source=f"hub:{hub.parent / 'nothing'}", split="test"), "none")


@pytest.mark.testdata
def test_reactions_are_399_by_content(tmp_path: Path) -> None:
    root = os.environ.get("QBENCH_TEST_DATA")
    if root is None:
        pytest.skip("needs QBENCH_TEST_DATA")
    source = str(Path(root) / "reactions.csv")
    config = DataConfig(source=source, columns={"text": "reaction"}, prepared=str(tmp_path))
    prepared = prepare_splits(config, "classification")
    assert prepared.splits.samples == {"calibration": 64, "sweep": 230, "verification": 105}
    assert set(prepared.splits.sweep["id"].str[:4]) == {"sch_"}
