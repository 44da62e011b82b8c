"""Whatever a client sends wrongly is told as 4xx with a reason, and the server goes on."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
from served import JSON, Served, request, serve_graph, tensor

from qbench.serving.opening import ServeSettings
from qbench.testing.graphs import Sketch, tiny_encoder

GOOD = request([[5, 6, 7], [8, 9, 10]])


def changed(edit: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return the good request after an edit."""
    content = copy.deepcopy(GOOD)
    edit(content)
    return content


def first(**values: Any) -> dict[str, Any]:
    """Return the good request with values of its first input replaced."""
    return changed(lambda content: content["inputs"][0].update(values))


CASES: dict[str, tuple[Any, str]] = {
    "no json": (b"{", "no JSON"),
    "empty": (b"", "no JSON"),
    "nan": (json.dumps(GOOD).replace("5", "NaN", 1).encode(), "no JSON"),
    "infinity": (json.dumps(GOOD).replace("5", "Infinity", 1).encode(), "no JSON"),
    "not utf-8": (b'{"id": "\xff\xfe", "inputs": []}', "no JSON"),
    "lone surrogate": (b'{"id": "\\ud800", "inputs": []}', "no JSON"),
    "deep nesting": (b"[" * 200_000, "no JSON"),
    "deep data": (first(data=json.loads("[" * 500 + "5" + "]" * 500)), "data"),
    "a list": ([], "object"),
    "no inputs": ({}, "inputs"),
    "empty inputs": ({"inputs": []}, "inputs"),
    "inputs no list": ({"inputs": {"name": "input_ids"}}, "inputs"),
    "input no object": ({"inputs": ["input_ids"]}, "name"),
    "input without name": (changed(lambda c: c["inputs"][0].pop("name")), "name"),
    "unknown input": (first(name="input_id"), "did you mean 'input_ids'"),
    "input twice": (changed(lambda c: c["inputs"].append(c["inputs"][0])), "twice"),
    "missing tensor": (changed(lambda c: c["inputs"].pop()), "attention_mask"),
    "wrong datatype": (first(datatype="FP32"), "INT64"),
    "no datatype": (first(datatype=None), "INT64"),
    "no shape": (first(shape=None), "shape"),
    "negative size": (first(shape=[-1, 3]), "shape"),
    "zero rows": (first(shape=[0, 3], data=[]), "shape"),
    "zero length": (first(shape=[2, 0], data=[]), "shape"),
    "wrong rank": (first(shape=[6]), "shape"),
    "size no integer": (first(shape=[2.0, 3]), "shape"),
    "size a truth value": (first(shape=[True, 3]), "shape"),
    "huge shape": (first(shape=[2, 10**12]), "values"),
    "huge rows": (first(shape=[10**18, 3]), "at most 16"),
    "overflowing shape": (first(shape=[2, 10**30]), "whole numbers"),
    "too few values": (first(data=[[5, 6], [8, 9]]), "values"),
    "wrong nesting": (first(data=[[5, 6], [7, 8], [9, 10]]), "values"),
    "ragged": (first(data=[[5, 6, 7], [8]]), "ragged"),
    "no data": (first(data=None), "data"),
    "data a string": (first(data="5"), "data"),
    "strings": (first(data=[["5", "6", "7"], ["8", "9", "1"]]), "INT64"),
    "one string of many": (first(shape=[1, 9], data=["x" * 900, *"abcdefgh"]), "INT64"),
    "truth values": (first(data=[[True, 6, 7], [8, 9, 1]]), "INT64"),
    "nested as a column": (first(data=[[5], [6], [7], [8], [9], [1]]), "values"),
    "a value for a list": (first(data=[[5, 6, 7], 8]), "ragged"),
    "a list for a value": (first(shape=[1, 3], data=[5, 6, [7]]), "INT64"),
    "nulls": (first(data=[[None, 6, 7], [8, 9, 1]]), "INT64"),
    "floats": (first(data=[[5.5, 6, 7], [8, 9, 1]]), "INT64"),
    "too large a number": (first(data=[[2**64, 6, 7], [8, 9, 1]]), ""),
    "beyond int64": (first(data=[[2**63, 6, 7], [8, 9, 1]]), "INT64"),
    "out of the vocabulary": (first(data=[[100, 6, 7], [8, 9, 1]]), "0 to 99"),
    "negative id": (first(data=[[-1, 6, 7], [8, 9, 1]]), "0 to 99"),
    "mask of twos": (
        changed(lambda c: c["inputs"][1].update(data=[[2, 1, 1], [1, 1, 1]])),
        "mask",
    ),
    "empty mask": (
        changed(lambda c: c["inputs"][1].update(data=[[0, 0, 0], [1, 1, 1]])),
        "masks every",
    ),
    "batch differs": (
        {"inputs": [tensor("input_ids", [[5], [6]]), tensor("attention_mask", [[1]])]},
        "first dimension",
    ),
    "length differs": (
        {"inputs": [tensor("input_ids", [[5, 6]]), tensor("attention_mask", [[1]])]},
        "length",
    ),
    "too long": (request([[5] * 65]), "at most 64"),
    "too many rows": (request([[5]] * 17), "at most 16"),
    "unknown output": ({**GOOD, "outputs": [{"name": "embeding"}]}, "did you mean 'embedding'"),
    "output twice": ({**GOOD, "outputs": [{"name": "embedding"}] * 2}, "twice"),
    "output no object": ({**GOOD, "outputs": ["embedding"]}, "name"),
    "outputs no list": ({**GOOD, "outputs": {"name": "embedding"}}, "list"),
    "classification": (
        {**GOOD, "outputs": [{"name": "embedding", "parameters": {"classification": 3}}]},
        "classification",
    ),
    "id no string": ({**GOOD, "id": 5}, "id"),
    "long id": ({**GOOD, "id": "x" * 300}, "id"),
    "parameters no object": ({**GOOD, "parameters": []}, "parameters"),
    "sequence": ({**GOOD, "parameters": {"sequence_id": 3}}, "state"),
    "negative timeout": ({**GOOD, "parameters": {"timeout": -1}}, "timeout"),
    "timeout no number": ({**GOOD, "parameters": {"timeout": "soon"}}, "timeout"),
    "unknown priority": ({**GOOD, "parameters": {"priority": 9}}, "priority"),
    "priority a list": ({**GOOD, "parameters": {"priority": [1]}}, "priority"),
    "tenant no string": ({**GOOD, "parameters": {"tenant": 5}}, "tenant"),
    "shared memory": (
        first(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 8}),
        "shared memory",
    ),
    "binary without length": (first(parameters={"binary_data_size": 48}), ""),
    "binary size wrong": (first(parameters={"binary_data_size": 7}, data=None), "bytes"),
}


@pytest.mark.parametrize("name", CASES)
def test_malformed_requests_are_4xx_with_a_reason(served: Served, name: str) -> None:
    content, words = CASES[name]
    status, headers, answer = served.infer(content)
    assert 400 <= status < 500, answer
    assert headers["content-type"] == "application/json"
    assert words in answer["error"] and len(answer["error"]) < 600


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("-1", "allowed"),
        ("x", "allowed"),
        ("1e3", "allowed"),
        ("", "allowed"),
        ("99999999", "bytes"),
        ("9" * 40, "allowed"),
        ("٣", ""),
    ],
)
def test_a_wrong_header_length_is_told(served: Served, header: str, words: str) -> None:
    told = {
        "Inference-Header-Content-Length": header.encode().decode("latin-1"),
        "Content-Type": "application/octet-stream",
    }
    status, _, answer = served.infer(json.dumps(GOOD).encode(), told)
    assert status == 400 and words in answer["error"]


@pytest.mark.parametrize("tail", [b"", b"12345678", b"\0" * 49])
def test_bytes_that_do_not_fit_are_told(served: Served, tail: bytes) -> None:
    content = first(parameters={"binary_data_size": 48})
    del content["inputs"][0]["data"]
    head = json.dumps(content).encode()
    told = {"Inference-Header-Content-Length": str(len(head))}
    told["Content-Type"] = "application/octet-stream"
    status, _, answer = served.infer(head + tail, told)
    assert status == 400 and "bytes" in answer["error"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": "application/octet-stream"}, 415),
        ({"Content-Encoding": "zstd"}, 415),
        ({"Content-Encoding": "gzip"}, 400),
        ({"X-Priority": "9"}, 400),
        ({"X-Timeout-Ms": "nan"}, 400),
        ({"X-Timeout-Ms": "-5"}, 400),
        ({"X-Timeout-Ms": "inf"}, 400),
        ({"X-Tenant": "x" * 300}, 400),
        ({"Content-Type": "application/json; charset=utf-8", "X-Timeout-Ms": "9000"}, 200),
        ({"X-Priority": "batch", "X-Tenant": "a"}, 200),
    ],
)
def test_headers_are_checked(served: Served, headers: dict[str, str], status: int) -> None:
    got, _, answer = served.infer(GOOD, headers)
    assert got == status, answer


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v2/models/tinny/infer", 404),
        ("POST", "/v2/models/tiny/versions/2/infer", 404),
        ("GET", "/v2/models/tiny/versions/-1", 404),
        ("GET", "/v2/models/tiny/infer", 405),
        ("DELETE", "/v2/models/tiny", 405),
        ("GET", "/", 404),
        ("GET", "/v2/models/%00/ready", 404),
        ("GET", "/v2/models/%ff%fe", 404),
        ("GET", "/v2/models/..%2f..%2fetc", 404),
        ("GET", "/v2/models/" + "x" * 5000, 404),
        ("GET", "/metrics/", 404),
    ],
)
def test_unknown_addresses_are_told(served: Served, method: str, path: str, status: int) -> None:
    got, _, answer = served.call(method, path, json.dumps(GOOD).encode(), JSON)
    assert got == status
    assert answer["error"] and len(answer["error"]) < 900


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "texts"),
        ({"text": 5}, "text"),
        ({"texts": []}, "texts"),
        ({"texts": ["a", 5]}, "texts"),
        ({"text": "a", "texts": ["a"]}, "both"),
        ({"texts": ["a", "b"], "pairs": ["c"]}, "pairs"),
        ({"texts": ["a"] * 17}, "at most 16"),
        ({"text": ""}, "no tokens"),
        ({"text": "word " * 65}, "longer than 64"),
        ({"text": "unspeakable"}, "cannot be tokenized"),
        ({"text": "a", "outputs": [{"name": "x"}]}, "output"),
    ],
)
def test_texts_that_cannot_be_served_are_told(served: Served, content: Any, words: str) -> None:
    status, _, answer = served.call("POST", "/text", json.dumps(content).encode(), JSON)
    assert status == 400 and words in answer["error"]


def test_bodies_over_the_limit_are_refused_and_the_reason_can_be_read(served: Served) -> None:
    status, _, answer = served.infer(b" " * (2 << 20))
    assert status == 413 and "1048576" in answer["error"]
    assert served.infer(GOOD)[0] == 200


def test_a_long_string_among_many_costs_no_more_than_itself(served: Served) -> None:
    tracemalloc.start()
    content = first(shape=[1, 50_001], data=["x" * 9_000, *["x"] * 50_000])
    status, _, answer = served.infer(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert status == 400 and "INT64" in answer["error"]
    assert peak < 64 << 20  # an array of strings would take 1.8 GB


def test_what_is_too_long_is_cut_where_that_was_asked_for(tmp_path) -> None:
    from dataclasses import replace

    from served import OPTIONS

    limits = replace(OPTIONS.requests, truncate=True)
    with serve_graph(tiny_encoder(), tmp_path, requests=limits, longest=8) as served:
        cut, whole = served.infer(request([[5] * 12])), served.infer(request([[5] * 8]))
        assert cut[0] == 200 and cut[2] == whole[2]
        said = json.dumps({"text": "a " * 30}).encode()
        status, _, answer = served.call("POST", "/text", said, JSON)
        assert status == 200 and answer["answers"][0]["tokens"] == 8


def test_sizes_that_a_node_of_the_graph_refuses_are_told(tmp_path) -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", "length"))
    pairs = s.op("Reshape", x, s.ints(0, -1, 2))
    graph = s.model(y=s.op("ReduceSum", pairs, s.ints(2), keepdims=0))
    settings = ServeSettings(lanes=1, token_budget=64)
    with serve_graph(graph, tmp_path, settings=settings, tokenizer=None) as served:
        for size, wanted in ((8, 200), (7, 400), (3, 400), (2, 200)):
            status, _, answer = served.infer({"inputs": [tensor("x", [[1.0] * size], "FP32")]})
            assert status == wanted, answer
        assert (
            "engine refuses" in served.infer({"inputs": [tensor("x", [[1.0]], "FP32")]})[2]["error"]
        )


def test_the_server_still_answers(served: Served) -> None:
    assert served.infer(GOOD)[0] == 200
    page = served.call("GET", "/metrics")[2].decode()
    assert 'code="50' not in page.replace('code="504"', "")  # that: a deadline of microseconds
