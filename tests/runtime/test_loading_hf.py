from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qbench.errors import ModelError
from qbench.graph.layers import find_layers
from qbench.graph.model import open_stored
from qbench.runtime.loading import LoadOptions, load_model
from qbench.runtime.ort import open_model

Folder = Callable[..., Path]
Samples = dict[str, np.ndarray]

LLAMA = {"num_key_value_heads": 2, "pad_token_id": 0}
DISTIL = {"dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 64}
MODERN = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "local_attention": 8}
MODERN |= {"cls_token_id": 1, "sep_token_id": 2}
T5 = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 4, "d_kv": 8}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "overrides", "pooling", "linear", "longest"),
    [
        ("BertModel", {}, None, 6, 40),
        pytest.param("RobertaModel", {"pad_token_id": 1}, None, 6, 38, marks=slow),
        pytest.param("XLMRobertaModel", {"type_vocab_size": 1}, "cls", 6, 38, marks=slow),
        pytest.param("DistilBertModel", DISTIL, None, 6, 40, marks=slow),
        pytest.param("MPNetModel", {}, None, 6, 38, marks=slow),
        ("AlbertModel", {"num_hidden_layers": 3, "embedding_size": 16}, None, 7, 40),
        pytest.param("ModernBertModel", MODERN, None, 4, 40, marks=slow),
        pytest.param("NomicBertModel", {}, None, 7, 40, marks=slow),
        pytest.param("T5EncoderModel", T5, None, 6, 40, marks=slow),
        ("LlamaModel", LLAMA, "last", 7, 40),
    ],
)
def test_encoders_and_decoders_become_embedders(
    hf_folder: Folder,
    samples: Samples,
    tmp_path: Path,
    name: str,
    overrides: dict[str, Any],
    pooling: str | None,
    linear: int,
    longest: int | None,
) -> None:
    folder = hf_folder(name, **overrides)
    options = LoadOptions(head="embedding", pooling=pooling, samples=samples)
    model = load_model(folder, tmp_path / "out", options)
    assert model.card["export_check"]["max_rel_diff"] < 1e-5
    assert model.card["export_check"]["batches"] == 4  # padded together, and three rows alone
    assert model.card["max_length"] == longest
    assert model.card["pooling"] == (pooling or "mean")
    assert all(spec.shape == ("batch", "sequence") for spec in model.inputs)
    assert [(s.name, s.shape) for s in model.outputs] == [("sentence_embedding", ("batch", 32))]
    counts = Counter(str(layer.kind) for layer in find_layers(model.ir).layers)
    assert counts["linear"] == linear and counts["softmax"] == 1 and counts["kv"] == 2
    assert open_stored(tmp_path / "out").sha256 == model.sha256


@pytest.mark.parametrize(
    ("name", "pickled", "labels"),
    [
        ("BertForSequenceClassification", True, 5),
        pytest.param("RobertaForSequenceClassification", False, 2, marks=slow),
    ],
)
def test_classifiers_give_logits(
    hf_folder: Folder, samples: Samples, tmp_path: Path, name: str, pickled: bool, labels: int
) -> None:
    folder = hf_folder(name, pickled=pickled, num_labels=labels, pad_token_id=1)
    model = load_model(folder, tmp_path / "out", LoadOptions(samples=samples))
    assert model.card["head"] == "classification" and len(model.card["id2label"]) == labels
    assert [(s.name, s.shape) for s in model.outputs] == [("logits", ("batch", labels))]
    assert model.card["export_check"]["max_rel_diff"] < 1e-5


def test_without_samples_made_up_ones_are_used_and_padded(
    hf_folder: Folder, tmp_path: Path
) -> None:
    model = load_model(hf_folder("BertModel"), tmp_path / "out", LoadOptions(head="embedding"))
    with open_model(model.path, "stored") as session:
        feeds = {s.name: np.ones((3, 5), np.int64) for s in session.inputs}
        padded = {n: np.pad(a, ((0, 0), (0, 4))) for n, a in feeds.items()}
        left, right = (session.run(f)["sentence_embedding"] for f in (feeds, padded))
    np.testing.assert_allclose(left, right, atol=1e-6)
    assert model.card["export_check"]["samples"] == 6


def sentence_folder(
    base: Path, stages: list[tuple[str, str]], pooling: dict[str, Any] | None, inner: str = ""
) -> Path:
    """Make a copy of a model folder that declares stages as sentence embedders do."""
    folder = base.with_name(f"{base.name}-{len(list(base.parent.iterdir()))}")
    shutil.copytree(base, folder / inner if inner else folder)
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(stages)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / inner / "sentence_bert_config.json").write_text('{"max_seq_length": 24}')
    return folder


@pytest.mark.parametrize(
    ("pooling", "expected", "normalize", "inner"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls", True, ""),
        pytest.param({"pooling_mode_max_tokens": True}, "max", False, "", marks=slow),
        pytest.param({"pooling_mode": "mean"}, "mean", False, "0_Transformer", marks=slow),
    ],
)
def test_stages_of_a_sentence_embedder_go_into_the_graph(
    hf_folder: Folder,
    samples: Samples,
    tmp_path: Path,
    pooling: dict[str, Any],
    expected: str,
    normalize: bool,
    inner: str,
) -> None:
    stages = [("Transformer", inner), ("Pooling", "1_Pooling")]
    stages += [("Normalize", "2_Normalize")] * normalize
    folder = sentence_folder(hf_folder("BertModel"), stages, pooling, inner)
    model = load_model(folder, tmp_path / "out", LoadOptions(head="embedding", samples=samples))
    assert (model.card["pooling"], model.card["normalize"]) == (expected, normalize)
    assert model.card["max_length"] == 24
    assert model.card["export_check"]["max_rel_diff"] < 1e-5
    with open_model(model.path, "stored") as session:
        feeds = {s.name: samples.get(s.name, np.zeros((4, 9), np.int64)) for s in session.inputs}
        lengths = np.linalg.norm(session.run(feeds)["sentence_embedding"], axis=1)
    assert np.allclose(lengths, 1.0, atol=1e-5) == normalize


DENSE = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")]
MEAN = {"pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    ("stages", "pooling", "part"),
    [
        (DENSE, MEAN, "declares a 'Dense' stage; supported: Transformer, Pooling, Normalize"),
        (DENSE[:2], {"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        (DENSE[:2], None, "1_Pooling"),
        (DENSE[:2], {**MEAN, "pooling_mode_cls_token": True}, "supported: one of mean"),
    ],
)
def test_stages_that_are_not_supported_are_named(
    hf_folder: Folder, tmp_path: Path, stages: Any, pooling: Any, part: str
) -> None:
    folder = sentence_folder(hf_folder("BertModel"), stages, pooling)
    with pytest.raises(ModelError, match=part):
        load_model(folder, tmp_path / "out", LoadOptions(head="embedding"))


def hub_cache(home: Path, folder: Path, name: str) -> None:
    """Lay a folder out as the hub's cache does: snapshots of links into blobs."""
    root = home / "hub" / f"models--{name.replace('/', '--')}"
    commit = "0123456789" * 4
    for part in ("refs", "blobs", f"snapshots/{commit}"):
        (root / part).mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    for index, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, root / "blobs" / str(index))
        (root / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{index}")


def layers_of(arguments: list[str], home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(home), **more}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "qbench.cli.main", "layers", *arguments, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_hub_id_comes_from_the_cache_without_a_network(hf_folder: Folder, tmp_path: Path) -> None:
    hub_cache(tmp_path, hf_folder("BertModel"), "some-org/tiny-v1.5")
    done = layers_of(["some-org/tiny-v1.5"], tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["counts"]["linear"] == 6
    assert "encoder.layer.0.attention.self.query" in {layer["name"] for layer in told["layers"]}


@pytest.mark.parametrize("name", ["some-org/not-there", "no-org-at-all"])
def test_a_hub_id_that_is_not_there_is_one_error(name: str, tmp_path: Path) -> None:
    done = layers_of([name], tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and done.stderr.count("error:") == 1
    assert f"model '{name}' is neither a local folder nor in the hub's cache" in done.stderr
    assert "Traceback" not in done.stderr


def test_code_that_comes_with_a_model_runs_only_where_asked(
    hf_folder: Folder, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(hf_folder("BertModel"), tmp_path / "own"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_kind", "auto_map": {"AutoConfig": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ModelError, match="code of its own.*--trust-remote-code"):
        load_model(folder, tmp_path / "out", LoadOptions(head="embedding"))
    assert not (tmp_path / "ran").exists()


def broken(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "config is cut":
        (folder / "config.json").write_text('{"model_type": "bert",')
    elif how == "config is a list":
        (folder / "config.json").write_text("[]")
    elif how == "config says nothing":
        (folder / "config.json").write_text("{}")
    elif how == "unknown type":
        (folder / "config.json").write_text('{"model_type": "no-such-type"}')
    elif how == "no weights":
        weights.unlink()
    elif how == "weights are cut":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif how == "weights are text":
        weights.write_text("no weights at all\n" * 20)


@pytest.mark.parametrize(
    ("how", "part"),
    [
        ("no config", "no config.json"),
        ("config is cut", "config.json' cannot be read as JSON"),
        ("config is a list", "must hold one JSON object"),
        ("config says nothing", "model_type"),
        ("unknown type", "no-such-type"),
        ("no weights", "no file named model.safetensors"),
        ("weights are cut", "cannot be loaded as an embedding model"),
        ("weights are text", "cannot be loaded as an embedding model"),
    ],
)
def test_a_broken_folder_is_one_clear_error(
    hf_folder: Folder, tmp_path: Path, how: str, part: str
) -> None:
    folder = Path(shutil.copytree(hf_folder("BertModel"), tmp_path / "broken"))
    broken(folder, how)
    with pytest.raises(ModelError, match=part):
        load_model(folder, tmp_path / "out", LoadOptions(head="embedding"))


def test_a_folder_of_onnx_files_names_them(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").write_bytes(b"x")
    with pytest.raises(ModelError, match="it holds onnx/model.onnx: name the file"):
        load_model(tmp_path, tmp_path / "out")


def test_a_pickle_that_would_run_code_is_not_read(hf_folder: Folder, tmp_path: Path) -> None:
    import torch

    class Harmful:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = Path(shutil.copytree(hf_folder("BertModel"), tmp_path / "pickled"))
    (folder / "model.safetensors").unlink()
    torch.save({"a": Harmful()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="could run code"):
        load_model(folder, tmp_path / "out", LoadOptions(head="embedding"))
    assert not (tmp_path / "ran").exists()


def test_weights_that_would_be_random_are_refused(hf_folder: Folder, tmp_path: Path) -> None:
    options = LoadOptions(head="classification")
    with pytest.raises(ModelError, match="classifier.weight.*would be random"):
        load_model(hf_folder("BertModel"), tmp_path / "out", options)


def test_nan_weights_are_named_before_the_export(hf_folder: Folder, tmp_path: Path) -> None:
    import safetensors.torch

    folder = Path(shutil.copytree(hf_folder("BertModel"), tmp_path / "nan"))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["encoder.layer.0.output.dense.weight"][0, 0] = float("nan")
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"NaN.*encoder\.layer\.0\.output\.dense\.weight"):
        load_model(folder, tmp_path / "out", LoadOptions(head="embedding"))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"pooling": "man"}, "unknown pooling 'man' .did you mean 'mean'"),
        ({"samples": {"input_ids": np.full((2, 5), 777)}}, "token id 777.*knows 100 tokens"),
        ({"samples": {"input_ids": np.full((2, 50), 7)}}, "cannot be run on its samples"),
    ],
)
def test_choices_that_do_not_fit_are_explained(
    hf_folder: Folder, tmp_path: Path, options: dict[str, Any], part: str
) -> None:
    with pytest.raises(ModelError, match=part):
        load_model(
            hf_folder("BertModel"), tmp_path / "out", LoadOptions(head="embedding", **options)
        )


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("./not-there", "does not exist; give a folder, an ONNX file or a hub id"),
        ("weights.pt", "does not exist"),
        ("a/b/c", "does not exist"),
        ("package:not_a_package/model", "package 'not_a_package' is not installed"),
        ("package:numpy/model", "package 'numpy' has no 'model'"),
    ],
)
def test_a_source_that_is_not_there_says_what_would_do(
    source: str, part: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=part):
        load_model(source, tmp_path / "out")
