from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from qbench.data.columns import Form, canonical, form_of
from qbench.errors import DataError


def table(**columns: list) -> pd.DataFrame:
    return pd.DataFrame({k: pd.Series(v, dtype=object) for k, v in columns.items()})


@pytest.mark.parametrize(
    ("kind", "names", "columns", "form"),
    [
        ("embedding", ["query", "answer"], {}, Form.RETRIEVAL),
        ("embedding", ["q", "a"], {"query": "q", "answer": "a"}, Form.RETRIEVAL),
        ("embedding", ["text", "text_pair", "score"], {}, Form.SIMILARITY),
        ("classification", ["text"], {}, Form.CLASSIFICATION),
        ("none", ["text"], {}, Form.TEXTS),
        ("own.py:metric", ["text"], {}, Form.TEXTS),
    ],
)
def test_the_form_follows_task_and_columns(kind, names, columns, form) -> None:
    assert form_of(kind, names, columns) is form


def test_columns_that_fit_no_embedding_task_say_what_would() -> None:
    with pytest.raises(DataError, match="query and answer.*text, text_pair and score.*'a', 'b'"):
        form_of("embedding", ["a", "b"], {})


def test_mapped_columns_get_their_roles() -> None:
    raw = table(question=["q "], reply=["a"], id=[7], other=[None])
    frame, remarks = canonical(raw, Form.RETRIEVAL, {"query": "question", "answer": "reply"})
    assert frame.to_dict("records") == [{"query": "q", "answer": "a", "id": "7"}]
    assert remarks == ()


def test_a_missing_column_names_what_there_is() -> None:
    raw = table(txt=["a"], label=[0])
    with pytest.raises(DataError, match=r"'text' for text .did you mean 'txt'.*'txt', 'label'"):
        canonical(raw, Form.CLASSIFICATION, {})
    with pytest.raises(DataError, match="'lable' for label .did you mean 'label'"):
        canonical(raw, Form.CLASSIFICATION, {"text": "txt", "label": "lable"})
    with pytest.raises(DataError, match="names 'query', which classification does not read"):
        canonical(raw, Form.CLASSIFICATION, {"text": "txt", "query": "txt"})
    with pytest.raises(DataError, match="'pair' for text_pair"):
        canonical(raw, Form.CLASSIFICATION, {"text": "txt", "text_pair": "pair"})


def test_rows_without_text_are_left_out_and_said() -> None:
    raw = table(text=["a", None, "  ", float("nan"), pd.NA, 5], label=[0, 1, 2, 3, 4, 5])
    frame, remarks = canonical(raw, Form.CLASSIFICATION, {})
    assert frame["text"].tolist() == ["a", "5"]
    assert frame["label"].tolist() == [0, 5]
    assert remarks == ("4 of 6 rows have no text in 'text' (the first is row 2): left out",)
    with pytest.raises(DataError, match="nothing is left"):
        canonical(raw[1:3], Form.CLASSIFICATION, {})


@pytest.mark.parametrize("value", [["a"], {"a": 1}, np.array(["a"]), b"a"])
def test_a_cell_that_is_no_text_names_its_row(value: object) -> None:
    with pytest.raises(DataError, match="row 2, column 'text': text is needed"):
        canonical(table(text=["a", value]), Form.TEXTS, {})


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["0", "2"], "int64"),
        ([0.0, 1.0], "int64"),
        ([np.int32(0), True], "int64"),
        (["yes", "no"], "object"),
        (["yes", 1], "object"),
    ],
)
def test_labels_are_numbers_where_they_can_be(values: list, kind: str) -> None:
    frame, _ = canonical(table(text=["a", "b"], label=values), Form.CLASSIFICATION, {})
    assert frame["label"].dtype == kind


@pytest.mark.parametrize("value", [-1, 0.5, "", None, float("nan"), [1]])
def test_a_wrong_label_names_its_row(value: object) -> None:
    with pytest.raises(DataError, match="row 2, column 'label'"):
        canonical(table(text=["a", "b"], label=[0, value]), Form.CLASSIFICATION, {})


@pytest.mark.parametrize("value", ["high", None, "nan", float("inf")])
def test_a_wrong_score_names_its_row(value: object) -> None:
    raw = table(text=["a", "b"], text_pair=["c", "d"], score=["1.5", value])
    with pytest.raises(DataError, match="row 2, column 'score': a score must be a finite number"):
        canonical(raw, Form.SIMILARITY, {})
