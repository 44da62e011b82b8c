"""What each task makes of its rows, beyond the contract."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from qbench.config import TASK_KINDS
from qbench.errors import DataError, InputError, ModelError
from qbench.tasks import KINDS, make_task
from qbench.tasks.classification import class_indices


def settings(kind: str, metric: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(kind=kind, metric=metric)


def frame(**columns: list) -> pd.DataFrame:
    n = len(next(iter(columns.values())))
    return pd.DataFrame({"id": [f"s{i}" for i in range(n)], **columns})


def one_hot(*places: int, width: int = 4) -> np.ndarray:
    return np.eye(width, dtype=np.float32)[list(places)]


def test_queries_and_candidates_merge_by_token_ids(words) -> None:
    rows = frame(query=["Who", "who", "what"], answer=["me", "you", "ME"])
    task = make_task(settings("embedding"), rows, words)
    assert (task.name, task.n, task.items) == ("retrieval", 2, 4)
    assert [text for text, _ in task.texts] == ["Who", "what", "me", "you"]
    assert task.ids == ("s0", "s2")
    # "Who" is answered by both candidates, "what" by "me" alone.
    scores = task.score(one_hot(1, 0, 0, 1))
    assert scores.payloads["mrr"].ravel().tolist() == [1, 1]
    scores = task.score(one_hot(0, 1, 0, 1))
    assert scores.payloads["mrr"].ravel().tolist() == [1, 0.5]
    assert scores.answers.tolist() == [0, 1]


def test_a_duplicate_candidate_does_not_lower_the_rank(words) -> None:
    rows = frame(query=["a", "b", "c"], answer=["same", "Same", "other"])
    task = make_task(settings("retrieval"), rows, words)
    assert task.items == 3 + 2


def test_retrieval_in_chunks_is_the_same(words, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = frame(query=[f"q{i // 2}" for i in range(20)], answer=[f"a{i % 7}" for i in range(20)])
    task = make_task(settings("retrieval"), rows, words)
    outputs = np.random.default_rng(0).normal(size=(task.items, 5)).astype(np.float32)
    other = outputs + 0.1
    whole = task.score(outputs), task.divergence(outputs, other)
    monkeypatch.setattr("qbench.tasks.retrieval._CHUNK", 15)
    parts = task.score(outputs), task.divergence(outputs, other)
    for name in ("mrr", "ndcg@10"):
        np.testing.assert_allclose(whole[0].payloads[name], parts[0].payloads[name])
    np.testing.assert_allclose(whole[1], parts[1], atol=1e-12)


def test_similarity_follows_the_human_order(words) -> None:
    rows = frame(text=["a", "b", "c"], text_pair=["d", "e", "f"], score=[5.0, 3.0, 0.0])
    task = make_task(settings("embedding"), rows, words)
    assert task.name == "similarity"
    outputs = np.float32([[1, 0], [1, 0], [1, 0], [1, 0], [1, 1], [0, 1]])
    scores = task.score(outputs)
    assert scores.value(task.metrics[0]) == 1
    assert scores.answers.tolist() == [10, 7, 0]
    assert task.divergence(outputs, outputs[[0, 1, 2, 5, 4, 3]]).tolist() == [1, 0, 1]


def test_classification_values_are_right(words) -> None:
    rows = frame(text=list("abcd"), label=[0, 1, 1, 1])
    task = make_task(settings("classification", "cross_entropy"), rows, words)
    assert [metric.name for metric in task.metrics] == ["cross_entropy", "accuracy", "macro_f1"]
    logits = np.log(np.float32([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.1, 0.9]]))
    values = {metric.name: task.score(logits).value(metric) for metric in task.metrics}
    assert values["accuracy"] == 0.75
    assert values["macro_f1"] == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert values["cross_entropy"] == pytest.approx(-np.log([0.9, 0.8, 0.4, 0.9]).mean())


def test_labels_outside_the_models_classes_name_the_row(words) -> None:
    rows = frame(text=list("abc"), label=[0, 7, 1])
    task = make_task(settings("classification"), rows, words)
    with pytest.raises(DataError, match="row 's1' has label 7; allowed: 0 to 2"):
        task.score(np.zeros((3, 3), np.float32))
    with pytest.raises(DataError, match="'s1' has label 7; allowed: 0 to 4"):
        make_task(settings("classification"), rows, words, classes=5)


def test_class_names_become_indices() -> None:
    ids = ["r1", "r2"]
    assert class_indices(["pos", "neg"], ids, {"neg": 0, "pos": 1}).tolist() == [1, 0]
    assert class_indices(["pos", "1"], ids, ["neg", "pos"]).tolist() == [1, 1]
    assert class_indices(["3", 2.0], ids, None).tolist() == [3, 2]
    # A config may name fewer classes than the model has.
    assert class_indices([3, 2], ids, {"LABEL_0": 0, "LABEL_1": 1}).tolist() == [3, 2]
    with pytest.raises(DataError, match="row 'r2': unknown label 'ne' .did you mean 'neg'"):
        class_indices(["pos", "ne"], ids, ["neg", "pos"])
    with pytest.raises(DataError, match="'r1' has label 'pos', and the model names no classes"):
        class_indices(["pos", "neg"], ids, None)


def test_kl_needs_logits(words) -> None:
    rows = frame(text=list("abc"))

    def names(task):
        return [metric.name for metric in task.metrics]

    assert names(make_task(settings("none"), rows, words)) == ["cosine", "mse"]
    assert names(make_task(settings("none", "kl"), rows, words)) == ["kl", "cosine", "mse"]
    assert "kl" in names(make_task(settings("none"), rows, words, classes=3))


def test_without_labels_the_reference_scores_perfectly(words) -> None:
    task = make_task(settings("none"), frame(text=list("abc")), words)
    outputs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    scores = task.score(outputs, outputs)
    assert [scores.value(metric) for metric in task.metrics] == [1, 0]
    with pytest.raises(ValueError, match="reference"):
        task.score(outputs)


def test_a_users_function_is_checked(words, tmp_path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def few(outputs, labels): return [1.0]\n"
        "def nan(outputs, labels): return [0.0, float('nan'), 0.0]\n"
        "def lost(outputs, labels): return labels['x']\n"
        "def loss(outputs, labels): return [2.0, 3.0, 4.0]\n"
        "loss.higher_is_better, loss.unit, loss.low = False, 'nat', 0\n"
    )
    rows = frame(text=list("abc"))
    outputs = np.zeros((3, 2), np.float32)
    task = make_task(settings(f"{file}:loss"), rows, words)
    (metric,) = task.metrics
    assert (metric.name, metric.unit, metric.higher_is_better) == ("loss", "nat", False)
    assert task.score(outputs).value(metric) == 3
    with pytest.raises(DataError, match=r"shape \[3\]; got shape \[1\]"):
        make_task(settings(f"{file}:few"), rows, words).score(outputs)
    with pytest.raises(DataError, match=r"'lost' raised TypeError.*outputs \[3, 2\] and no labels"):
        make_task(settings(f"{file}:lost"), rows, words).score(outputs)
    with pytest.raises(DataError, match="nan for sample 's1'"):
        make_task(settings(f"{file}:nan"), rows, words).score(outputs)


def test_unknown_kinds_and_shapes_are_told(words) -> None:
    assert KINDS == TASK_KINDS
    rows = frame(query=["a"], answer=["b"])
    with pytest.raises(InputError, match="unknown task 'retreival' .did you mean 'retrieval'"):
        make_task(settings("retreival"), rows, words)
    with pytest.raises(InputError, match="unknown metric 'mr' .did you mean 'mrr'"):
        make_task(settings("retrieval", "mr"), rows, words)
    with pytest.raises(ModelError, match="model.pooling"):
        make_task(settings("retrieval"), rows, words).score(np.zeros((2, 3, 4)))
    with pytest.raises(DataError, match="no rows"):
        make_task(settings("retrieval"), rows[:0], words)
