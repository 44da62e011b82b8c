"""The answer that is declared for the time in which nothing can compute one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import OPTIONS, Served, request, wait_until
from test_overload import ask, hosted

from qbench.errors import ConfigError
from qbench.graph.model import save_graph
from qbench.hosting import describe, prepare_host
from qbench.servable import find_servable
from qbench.serving.decisions import BatchLimits
from qbench.serving.gates import BreakerRules
from qbench.serving.server.contract import Contract, Merging, Tensor
from qbench.serving.server.defaults import fill_default, make_default, read_default
from qbench.serving.service import Gates
from qbench.testing.graphs import tiny_encoder

ROW = [0.5] * 32
STATES = Contract(
    (Tensor("ids", "int64", (None,)),),
    (Tensor("states", "float32", (None, 2)), Tensor("label", "int8", ())),
    Merging.PADDED,
    sequence_axes={"states": (0,), "label": ()},
)


def failing(feeds: Any) -> dict[str, np.ndarray]:
    raise RuntimeError("broken")


def test_it_is_given_while_the_breaker_is_open_and_says_so(served: Served, caplog) -> None:
    default = make_default({"embedding": ROW}, served.hosting.contract)
    gates = Gates(BreakerRules(least=3, window_s=0.2, open_s=30.0), default=default)
    with hosted(served, failing, BatchLimits(), gates) as one:
        assert ask(one, 1)[0] == 500  # closed: the engine's own failure
        wait_until(lambda: ask(one, 1)[0] == 200)
        status, headers, body = one.infer(request([[5, 6], [7, 8]]))
        assert (status, headers["x-served-by"]) == (200, "default")
        assert body["parameters"] == {"served_by": "default"}
        assert body["outputs"][0]["shape"] == [2, 32] and set(body["outputs"][0]["data"]) == {0.5}
        page = one.call("GET", "/metrics")[2].decode()
        counted = 'qbench_rows_total{model="tiny",outcome="default"} '
        assert float(page.split(counted)[1].split()[0]) >= 3


def test_an_answer_of_the_engine_bears_no_mark(served: Served) -> None:
    assert "x-served-by" not in served.infer(request([[5, 6, 7]]))[1]


def test_a_row_follows_the_length_of_the_request() -> None:
    row = make_default({"states": [[1, 2]], "label": 3}, STATES)
    assert fill_default(row, STATES, 3)["states"].tolist() == [[1.0, 2.0]] * 3
    assert fill_default(row, STATES, 0)["states"].shape == (1, 2)
    assert row["label"].dtype == np.int8 and not row["label"].flags.writeable


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1.0], "must be an object"),
        ({"states": [[1, 2]], "labels": 3}, "did you mean 'label'"),
        ({"states": [[1, 2]]}, "output 'label' is missing"),
        ({"states": [[1, 2, 3]], "label": 3}, "has shape [1, 3]; a row of it has [1, 2]"),
        ({"states": [[1, 2], [3]], "label": 3}, "ragged"),
        ({"states": [["a", "b"]], "label": 3}, "values of FP32"),
        ({"states": [[1, 2]], "label": 300}, "out of INT8"),
        ({"states": [[1, 2]], "label": 0.5}, "values of INT8"),
        ({"states": [[1e300, 2]], "label": 3}, "cannot hold"),
    ],
)
def test_what_is_no_answer_of_the_engine_is_refused(content: Any, words: str) -> None:
    with pytest.raises(ConfigError) as told:
        make_default(content, STATES)
    assert words in str(told.value) and str(told.value).startswith("--default-answer: ")


def test_a_free_dimension_that_follows_nothing_cannot_be_declared() -> None:
    contract = Contract(STATES.inputs, (Tensor("boxes", "float32", (None, 4)),), Merging.EQUAL)
    with pytest.raises(ConfigError, match="does not follow"):
        make_default({"boxes": [[0, 0, 0, 0]]}, contract)


def test_a_file_is_read_before_the_server_begins(tmp_path: Path) -> None:
    save_graph(tiny_encoder(), tmp_path / "x.onnx")
    servable = find_servable(str(tmp_path / "x.onnx"))
    path = tmp_path / "default.json"
    options = replace(OPTIONS, default_answer=path)
    for text, words in (("{", "is no JSON"), ("{}", "'embedding' is missing"), (None, "read")):
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            prepare_host(servable, options)
    path.write_text(json.dumps({"embedding": ROW}))
    assert read_default(path, describe(servable)[1])["embedding"].tolist() == ROW
