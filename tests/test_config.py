from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qbench.config import Config, load_config, make_config
from qbench.errors import ConfigError, InputError
from qbench.limits import parse_max_drop

BASE = {"model": {"source": "m"}, "data": {"source": "d.csv"}}


def message(overrides: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        make_config(BASE, overrides, origin="x.yaml")
    return str(caught.value)


def test_defaults_are_complete_and_survive_a_round_trip() -> None:
    config = make_config(BASE)
    assert config.sweep.formats == ("fp16", "int8", "int8_dynamic", "w8a16", "w4a16")
    assert config.data.splits.verification == "rest"
    assert make_config(config.to_dict()) == config


def test_overrides_replace_single_keys_and_leave_their_neighbours() -> None:
    config = make_config({**BASE, "run": {"seed": 3}}, {"run.threads": 2, "plan.max_drop": 0.02})
    assert (config.run.seed, config.run.threads, config.run.thread_count) == (3, 2, 2)
    assert config.plan.allowed_drop.margin(10.0) == 0.02


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        make_config(BASE).run.seed = 1


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"plan.backnd": "x"}, ["plan.backnd", "unknown key", "'backend'", "levels"]),
        ({"modl": {}}, ["modl: unknown key (did you mean 'model'?)"]),
        ({"data.splits.swep": 1}, ["data.splits.swep", "did you mean 'sweep'", "in data.splits"]),
        ({"plan.backend": "ort-cp"}, ["plan.backend", "did you mean 'ort-cpu'"]),
        ({"sweep.formats": ["int8", "int9"]}, ["unknown format 'int9' (did you mean 'int8'?)"]),
        ({"sweep.formats": []}, ["sweep.formats", "empty list"]),
        ({"sweep.formats": "int8"}, ["sweep.formats: got 'int8' (text)", "a list"]),
        ({"sweep.include": [1]}, ["sweep.include: got 1 (integer)"]),
        ({"data.splits.verification": "rset"}, ["did you mean 'rest'?", "an integer ≥ 1 or rest"]),
        ({"data.splits.sweep": 0}, ["data.splits.sweep: got 0", "≥ 1"]),
        ({"data.columns": {"quer": "a"}}, ["data.columns", "did you mean 'query'?", "text_pair"]),
        ({"data.columns": {"query": 3}}, ["data.columns: got 3 (integer)"]),
        ({"task.kind": "embeding"}, ["unknown task 'embeding' (did you mean 'embedding'?)"]),
        ({"model.pooling": "meen"}, ["did you mean 'mean'?", "mean or cls or max"]),
        ({"model.source": None}, ["model.source: got nothing (null)"]),
        ({"model.trust_remote_code": "yes"}, ["got 'yes' (text); allowed: true or false"]),
        ({"bench.seconds": "1e-3"}, ["write it without quotes", "1.0e-3"]),
        ({"bench.seconds": float("nan")}, ["bench.seconds: got nan"]),
        ({"bench.clients": 1.5}, ["bench.clients: got 1.5 (number); allowed: an integer ≥ 1"]),
        ({"bench.clients": True}, ["bench.clients: got True"]),
        ({"plan.max_drop": "-5 %"}, ["max_drop", "'-5 %'", "such as '5 %'"]),
        ({"plan.objective": "latancy"}, ["did you mean 'latency'?"]),
        ({"task.expect": {"metric": "mrr", "value": 0.5}}, ["task.expect.tolerance: is missing"]),
        ({"run.id": "../x"}, ["run.id: got '../x'"]),
        ({"data": None}, ["data: got nothing (null); allowed: a mapping of source, name"]),
    ],
)
def test_a_wrong_key_or_value_is_told_with_what_is_allowed(
    overrides: dict[str, object], parts: list[str]
) -> None:
    told = message(overrides)
    assert told.startswith("x.yaml: ")
    for part in parts:
        assert part in told


def test_everything_wrong_is_told_at_once() -> None:
    told = message({"bench.clients": "x", "run.seed": -1})
    assert "2 problems" in told and "bench.clients" in told and "run.seed" in told


def test_missing_sections_are_named() -> None:
    with pytest.raises(ConfigError, match="model: is missing"):
        make_config({})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["got an empty file"]),
        ("- a\n", ["got list"]),
        ("model: [unclosed\n", ["not a valid configuration file", "line"]),
        ("model: {source: a}\nmodel: {source: b}\n", ["line 2", "'model' is given twice"]),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    for part in (str(path), *parts):
        assert part in str(caught.value)


def test_a_file_that_is_missing_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"no such configuration file.*did you mean 'demo.yaml'"):
        load_config(tmp_path / "demmo.yaml")


def test_a_file_that_is_not_utf8_or_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"model: {source: caf\xe9}\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_a_yaml_merge_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {source: m}\ndata: {source: d}\nbench: {rounds: 2}\n")
    assert load_config(path, {"bench.clients": 4}).bench.rounds == 2


@given(st.floats(min_value=0, max_value=1e6), st.floats(min_value=-1e3, max_value=1e3))
def test_a_margin_is_never_negative(amount: float, reference: float) -> None:
    assert parse_max_drop(amount).margin(reference) == amount
    assert parse_max_drop(f"{amount} %").margin(reference) == pytest.approx(
        amount / 100 * abs(reference)
    )


@given(st.one_of(st.text(), st.floats(max_value=-1e-9), st.just(float("nan"))))
def test_any_other_drop_is_an_input_error_or_a_number(given_drop: str | float) -> None:
    try:
        assert parse_max_drop(given_drop).amount >= 0
    except InputError as error:
        assert "max_drop" in str(error)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*Config.model_fields, "x"]), inner, max_size=4)
        ),
        max_leaves=8,
    )
)
def test_no_shape_of_input_escapes_as_another_exception(values: object) -> None:
    try:
        make_config(values if isinstance(values, dict) else {"model": values})
    except ConfigError as error:
        assert str(error)


def test_the_configurations_of_the_project_are_valid(root: Path) -> None:
    paths = sorted((root / "configs").glob("*.yaml"))
    assert [path.name for path in paths] == [
        "demo.yaml",
        "hub_embedder.yaml",
        "local_classifier.yaml",
        "onnx_file.yaml",
        "reactions.yaml",
    ]
    for path in paths:
        load_config(path)
