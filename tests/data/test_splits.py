from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qbench.config import SplitsConfig
from qbench.data import SPLITS, Form, Splits, Table, split_table
from qbench.errors import DataError, InputError

SIZES = SplitsConfig(calibration=8, sweep=16)


def table(form: Form, **columns: list) -> Table:
    return Table(pd.DataFrame(columns), form, {"source": "here"}, "CC0")


def texts(n: int, **more: list) -> Table:
    form = Form.CLASSIFICATION if more else Form.TEXTS
    return table(form, text=[f"text {i}" for i in range(n)], **more)


def contents(splits: Splits, column: str) -> list[set[str]]:
    return [set(splits.named(name)[column]) for name in SPLITS]


@settings(max_examples=15, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=70, max_size=90),
    seed=st.randoms(),
)
def test_no_query_and_no_answer_crosses_whatever_the_row_order(pairs, seed) -> None:
    rows = [(f"q{q}", f"a{a}") for q, a in pairs] + [(f"own {i}", f"mine {i}") for i in range(40)]
    shuffled = list(rows)
    seed.shuffle(shuffled)
    first, second = (
        split_table(table(Form.RETRIEVAL, query=[q for q, _ in r], answer=[a for _, a in r]), SIZES)
        for r in (rows, shuffled)
    )
    for column in ("query", "answer"):
        parts = contents(first, column)
        assert sum(map(len, parts)) == len(set().union(*parts))
    for name in SPLITS:
        pd.testing.assert_frame_equal(first.named(name), second.named(name))
        assert first.samples[name] == first.named(name)["query"].nunique()
        assert not first.named(name).duplicated(["query", "answer"]).any()
    assert sum(first.samples.values()) == len({q for q, _ in rows})
    assert first.samples["calibration"] <= 8 and first.samples["sweep"] <= 16


def test_answers_that_only_a_tokenizer_confuses_do_not_cross() -> None:
    n = 60
    base = [f"answer {i // 2}" for i in range(n)]
    answers = [a if i % 2 else f"{a.upper()} ." for i, a in enumerate(base)]
    data = table(Form.RETRIEVAL, query=[f"q{i}" for i in range(n)], answer=answers)

    def keys(given: list[str]) -> list[str]:
        return [text.lower().removesuffix(" .") for text in given]

    parts = [
        {key for key in keys(list(part))}
        for part in contents(split_table(data, SIZES, keys=keys), "answer")
    ]
    assert sum(map(len, parts)) == n // 2
    # Case, accents and spaces need no tokenizer.
    loose = table(
        Form.RETRIEVAL,
        query=[f"q{i}" for i in range(n)],
        answer=[f"Café{' ' * (i % 2)}{i // 2}" for i in range(n)],
    )
    parts = [
        {a.replace(" ", "") for a in part} for part in contents(split_table(loose, SIZES), "answer")
    ]
    assert sum(map(len, parts)) == n // 2


def test_sizes_are_met_and_rest_takes_the_rest() -> None:
    assert split_table(texts(100), SIZES).samples == {
        "calibration": 8,
        "sweep": 16,
        "verification": 76,
    }
    fixed = split_table(texts(100), SplitsConfig(calibration=8, sweep=16, verification=20))
    assert list(fixed.samples.values()) == [8, 16, 20]
    assert "56 of 100 samples are in no split" in fixed.remarks[-1]
    limited = split_table(texts(100), SIZES, limit=50)
    assert list(limited.samples.values()) == [8, 16, 26]


def test_too_few_samples_scale_all_splits_and_say_so() -> None:
    splits = split_table(texts(80), SplitsConfig())
    assert sum(splits.samples.values()) == 80
    assert splits.samples["verification"] == 80 - 15 - 43
    assert splits.remarks == (
        "80 samples are too few for calibration 64, sweep 230, verification rest: scaled to"
        " calibration 15, sweep 43, verification 22",
    )
    fixed = split_table(texts(30), SplitsConfig(calibration=20, sweep=20, verification=20))
    assert list(fixed.samples.values()) == [10, 10, 10]
    with pytest.raises(DataError, match="11 samples.*at least 12"):
        split_table(texts(11), SplitsConfig())
    assert sum(split_table(texts(12), SplitsConfig()).samples.values()) == 12


def test_samples_that_cannot_be_separated_are_an_error() -> None:
    answers = ["yes" if i % 2 else "no" for i in range(100)]
    data = table(Form.RETRIEVAL, query=[f"q{i // 2 * 2}" for i in range(100)], answer=answers)
    with pytest.raises(DataError, match="50 of 50 samples share texts"):
        split_table(data, SIZES)


def test_duplicates_merge_by_content() -> None:
    data = texts(40, label=[i % 3 for i in range(40)])
    twice = pd.concat([data.frame, data.frame[:5]])
    splits = split_table(Table(twice, data.form, {}, ""), SIZES)
    assert sum(splits.samples.values()) == 40
    assert splits.remarks == ("5 duplicate rows merged",)


def test_contradicting_labels_are_left_out_and_scores_averaged() -> None:
    data = texts(40, label=[0] * 40)
    wrong = pd.DataFrame({"text": ["text 3"], "label": [1]})
    splits = split_table(Table(pd.concat([data.frame, wrong]), data.form, {}, ""), SIZES)
    assert sum(splits.samples.values()) == 39
    assert "2 rows have a text that stands there with different labels" in splits.remarks[0]
    names = [f"a{i}" for i in range(40)]
    pairs = table(
        Form.SIMILARITY,
        text=[*names, "a0"],
        text_pair=[f"b{i}" for i in range(40)] + ["b0"],
        score=[1.0] * 40 + [4.0],
    )
    splits = split_table(pairs, SIZES)
    rows = pd.concat([splits.named(name) for name in SPLITS]).set_index("text")
    assert rows.loc["a0", "score"] == 2.5 and len(rows) == 40


def test_swapped_pairs_share_a_split() -> None:
    pairs = [(f"a{i}", f"b{i}") for i in range(40)]
    pairs += [(b, a) for a, b in pairs]
    data = table(
        Form.SIMILARITY,
        text=[a for a, _ in pairs],
        text_pair=[b for _, b in pairs],
        score=[float(i) for i in range(80)],
    )
    splits = split_table(data, SIZES)
    parts = [
        {frozenset(pair) for pair in zip(rows["text"], rows["text_pair"], strict=True)}
        for rows in (splits.named(name) for name in SPLITS)
    ]
    assert sum(map(len, parts)) == 40


def test_ids_are_the_datas_or_content_hashes() -> None:
    own = texts(40, label=[0] * 40)
    splits = split_table(own, SIZES)
    assert all(len(i) == 16 for i in splits.sweep["id"])
    given_ids = own.frame.assign(id=[f"row{i:02d}" for i in range(40)])
    both = pd.concat([given_ids, given_ids[:1].assign(id="zz")])
    splits = split_table(Table(both, own.form, {}, ""), SIZES)
    ids = pd.concat([splits.named(name) for name in SPLITS])["id"]
    assert sorted(ids) == [f"row{i:02d}" for i in range(40)]
    with pytest.raises(DataError, match="id 'x' stands for two rows"):
        split_table(Table(given_ids.assign(id="x"), own.form, {}, ""), SIZES)


def test_an_unknown_split_is_an_error() -> None:
    with pytest.raises(InputError, match="unknown split 'verify' .did you mean 'verification'"):
        split_table(texts(40), SIZES).named("verify")
