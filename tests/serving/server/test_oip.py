"""The protocol as clients use it: right answers to the right caller."""

from __future__ import annotations

import gzip
import importlib
import json
import sys
import threading
import types
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from served import JSON, Served, request, serve_graph, tensor

from qbench.serving.opening import ServeSettings
from qbench.testing.graphs import Sketch, tiny_convnet, tiny_decoder, tiny_encoder


def test_json_in_json_out_is_what_the_engine_says(served: Served, direct) -> None:
    rows = [[5, 6, 7], [8, 9, 10]]
    status, _, answer = served.infer(request(rows, id="mine"))
    assert status == 200
    assert answer["id"] == "mine" and answer["model_name"] == "tiny"
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("embedding", "FP32", [2, 32])
    np.testing.assert_allclose(np.reshape(output["data"], (2, 32)), direct(rows), atol=1e-6)


def test_flat_and_nested_data_are_one(served: Served) -> None:
    flat = request([[5, 6, 7]])
    for item in flat["inputs"]:
        item["data"] = item["data"][0]
    assert served.infer(flat)[2] == served.infer(request([[5, 6, 7]]))[2]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_tritonclient_drives_it(served: Served, direct, binary_in: bool, binary_out: bool) -> None:
    http = pytest.importorskip("tritonclient.http")
    rows = np.array([[5, 6, 7, 8], [9, 10, 11, 12]])
    with http.InferenceServerClient(f"127.0.0.1:{served.port}", concurrency=4) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("tiny") and client.is_model_ready("tiny", "1")
        inputs = []
        for name, values in (("input_ids", rows), ("attention_mask", np.ones_like(rows))):
            inputs.append(http.InferInput(name, list(values.shape), "INT64"))
            inputs[-1].set_data_from_numpy(values, binary_data=binary_in)
        wanted = [http.InferRequestedOutput("embedding", binary_data=binary_out)]
        found = client.infer(
            "tiny",
            inputs,
            outputs=wanted,
            request_id="7",
            priority=2,
            timeout=20_000_000,
            request_compression_algorithm="gzip" if binary_in else "deflate",
        )
        assert found.get_response()["id"] == "7"
        np.testing.assert_allclose(found.as_numpy("embedding"), direct(rows.tolist()), atol=1e-6)
        later = [client.async_infer("tiny", inputs) for _ in range(8)]
        for one in later:
            np.testing.assert_allclose(
                one.get_result().as_numpy("embedding"), direct(rows.tolist()), atol=1e-6
            )


def test_tritonclient_reads_what_the_server_says(served: Served) -> None:
    http = pytest.importorskip("tritonclient.http")
    served.infer(request([[5, 6, 7]]))
    with http.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
        assert client.get_server_metadata()["name"] == "qbench"
        metadata = client.get_model_metadata("tiny")
        assert [one["name"] for one in metadata["inputs"]] == ["input_ids", "attention_mask"]
        assert metadata["outputs"][0]["shape"] == [-1, 32]
        assert client.get_model_config("tiny")["max_batch_size"] == 16
        assert client.get_model_repository_index()[0]["state"] == "READY"
        (stats,) = client.get_inference_statistics("tiny")["model_stats"]
        assert stats["inference_count"] >= 1
        assert stats["inference_stats"]["compute_infer"]["ns"] > 0
        again = client.get_inference_statistics("tiny")["model_stats"]
        assert again == [stats]  # the time of the last one too
        served.infer(request([[5, 6, 7], [8, 9, 10]]))
        served.infer(request([[500, 6, 7]]))
        (later,) = client.get_inference_statistics("tiny")["model_stats"]
        counts = [one["inference_stats"]["success"]["count"] for one in (stats, later)]
        assert counts[1] - counts[0] == 1
        assert later["inference_count"] - stats["inference_count"] == 2
        assert later["last_inference"] > stats["last_inference"]


def service_messages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return Triton's messages without its package, which would import gRPC."""
    package = types.ModuleType("tritonclient.grpc")
    package.__path__ = [f"{pytest.importorskip('tritonclient').__path__[0]}/grpc"]
    for name in ("", ".model_config_pb2", ".service_pb2"):
        monkeypatch.delitem(sys.modules, f"tritonclient.grpc{name}", raising=False)
    monkeypatch.setitem(sys.modules, "tritonclient.grpc", package)
    return importlib.import_module("tritonclient.grpc.service_pb2")


def test_what_the_server_says_fits_triton_s_own_messages(tmp_path, monkeypatch) -> None:
    messages = service_messages(monkeypatch)
    json_format = pytest.importorskip("google.protobuf.json_format")
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, ("batch", 4))
    one = s.input("one", ir.DataType.INT64, ("batch",))
    graph = s.model(y=s.op("Neg", x), z=s.op("Greater", one, s.ints(0)))
    with serve_graph(graph, tmp_path, settings=ServeSettings(lanes=1), tokenizer=None) as served:
        for method, path, message in (
            ("GET", "/v2", messages.ServerMetadataResponse()),
            ("GET", "/v2/models/tiny", messages.ModelMetadataResponse()),
            ("GET", "/v2/models/tiny/stats", messages.ModelStatisticsResponse()),
            ("GET", "/v2/models/tiny/config", messages.ModelConfigResponse().config),
        ):
            status, _, answer = served.call(method, path)
            assert status == 200
            json_format.ParseDict(answer, message)  # an unknown field or type is refused


def test_concurrent_clients_get_their_own_answers(served: Served, direct) -> None:
    rng = np.random.default_rng(0)
    wrong: list[str] = []

    def client(number: int) -> None:
        mine = np.random.default_rng(number)
        for turn in range(12):
            shape = (int(mine.integers(1, 4)), int(mine.integers(1, 40)))
            rows = mine.integers(1, 99, shape).tolist()
            status, _, answer = served.infer(request(rows, id=f"{number}-{turn}"))
            if status != 200 or answer["id"] != f"{number}-{turn}":
                wrong.append(f"{status} {answer}")
                continue
            got = np.reshape(answer["outputs"][0]["data"], answer["outputs"][0]["shape"])
            if not np.allclose(got, direct(rows), atol=1e-5):
                wrong.append(f"{number}-{turn} got another's answer")

    threads = [threading.Thread(target=client, args=(int(n),)) for n in rng.integers(0, 999, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]


def test_outputs_can_be_chosen_and_sent_as_bytes(served: Served) -> None:
    asked = request([[5, 6]], parameters={"binary_data_output": True})
    status, headers, body = served.infer(asked)
    assert status == 200 and headers["content-type"] == "application/octet-stream"
    length = int(headers["inference-header-content-length"])
    head = json.loads(body[:length])
    assert head["outputs"][0]["parameters"]["binary_data_size"] == len(body) - length == 32 * 4


def test_texts_are_tokenized_here(served: Served, direct) -> None:
    from served import tokenize

    texts = ["one two three", "four"]
    body = json.dumps({"texts": texts, "id": "t"}).encode()
    for path in ("/text", "/v2/models/tiny/text", "/v2/models/tiny/versions/1/text"):
        status, _, answer = served.call("POST", path, body, JSON)
        assert status == 200 and answer["id"] == "t"
        for text, one in zip(texts, answer["answers"], strict=True):
            assert one["tokens"] == len(text.split())
            np.testing.assert_allclose(
                one["outputs"]["embedding"], direct(tokenize([text]))[0], atol=1e-6
            )


def test_outputs_by_token_come_without_padding(tmp_path) -> None:
    with serve_graph(tiny_encoder(pooled=False), tmp_path) as served:
        found: dict[int, tuple[int, dict]] = {}

        def ask(length: int) -> None:
            status, _, answer = served.infer(request([[7] * length]))
            found[length] = status, answer

        threads = [threading.Thread(target=ask, args=(length,)) for length in range(9, 14)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for length, (status, answer) in found.items():
            assert status == 200
            assert answer["outputs"][0]["shape"] == [1, length, 32]
            mask = np.ones((1, length), int)
            straight = served.session.run({"input_ids": mask * 7, "attention_mask": mask})
            got = np.reshape(answer["outputs"][0]["data"], (1, length, 32))
            np.testing.assert_allclose(got, straight["hidden_states"], atol=1e-5)


def test_graphs_without_a_mask_are_never_padded(tmp_path) -> None:
    with serve_graph(tiny_decoder(), tmp_path) as served:
        assert served.hosting.contract.merging == "equal"
        for length in (3, 5, 5, 4):
            ids = tensor("input_ids", [[9] * length])
            status, _, answer = served.infer({"inputs": [ids]})
            straight = served.session.run({"input_ids": np.full((1, length), 9)})["logits"]
            assert status == 200
            got = np.reshape(answer["outputs"][0]["data"], straight.shape)
            np.testing.assert_allclose(got, straight, atol=1e-4)


def test_images_are_served_too(tmp_path) -> None:
    with serve_graph(tiny_convnet(), tmp_path) as served:
        images = np.random.default_rng(0).normal(size=(3, 3, 16, 16)).astype(np.float32)
        item = {"name": "image", "shape": [3, 3, 16, 16], "datatype": "FP32"}
        status, _, answer = served.infer({"inputs": [{**item, "data": images.ravel().tolist()}]})
        assert status == 200
        got = np.reshape(answer["outputs"][0]["data"], (3, 10))
        np.testing.assert_allclose(got, served.session.run({"image": images})["logits"], atol=1e-4)
        bad = images.ravel().tolist()
        bad[5] = float("nan")
        assert served.infer({"inputs": [{**item, "data": bad}]})[0] == 400
        raw = images.copy()
        raw[0, 0, 0, 0] = np.inf
        head = json.dumps(
            {"inputs": [{**item, "parameters": {"binary_data_size": raw.nbytes}}]}
        ).encode()
        told = {"Inference-Header-Content-Length": str(len(head))}
        told["Content-Type"] = "application/octet-stream"
        status, _, answer = served.infer(head + raw.tobytes(), told)
        assert status == 400 and "finite" in answer["error"]


def test_images_of_any_size_are_served_whole(tmp_path) -> None:
    s = Sketch(0)
    image = s.input("image", ir.DataType.FLOAT, ("batch", 3, "height", "width"))
    graph = s.model(y=s.op("Conv", image, s.weight("w", 2, 3, 7, 7), pads=(3, 3, 3, 3)))
    with serve_graph(graph, tmp_path, settings=ServeSettings(lanes=1), tokenizer=None) as served:
        for size in ((8, 8), (20, 33)):
            pixels = np.random.default_rng(0).normal(size=(2, 3, *size)).astype(np.float32)
            item = {"name": "image", "shape": list(pixels.shape), "datatype": "FP32"}
            asked = {"inputs": [{**item, "data": pixels.ravel().tolist()}]}
            status, _, answer = served.infer(asked)
            assert status == 200, answer
            straight = served.session.run({"image": pixels})["y"]
            got = np.reshape(answer["outputs"][0]["data"], straight.shape)
            np.testing.assert_allclose(got, straight, atol=1e-4)


def test_question_and_passage_may_differ_in_length(tmp_path) -> None:
    s = Sketch(0)
    words = s.weight("words.weight", 50, 4)
    found = [s.input(name, ir.DataType.INT64, ("batch", name)) for name in ("asked", "told")]
    left, right = (s.op("Gather", words, ids, axis=0) for ids in found)
    graph = s.model(y=s.op("MatMul", left, s.op("Transpose", right, perm=(0, 2, 1))))
    with serve_graph(graph, tmp_path, settings=ServeSettings(lanes=1), tokenizer=None) as served:
        feeds = {"told": np.array([[1, 2, 3, 4, 5]] * 2), "asked": np.array([[6, 7, 8]] * 2)}
        inputs = [tensor(name, rows.tolist()) for name, rows in feeds.items()]
        status, _, answer = served.infer({"inputs": inputs})
        assert status == 200, answer
        got = np.reshape(answer["outputs"][0]["data"], (2, 3, 5))
        np.testing.assert_allclose(got, served.session.run(feeds)["y"], atol=1e-5)
        inputs = [tensor("asked", [[1]]), tensor("told", [[1] * 600])]
        status, _, answer = served.infer({"inputs": inputs})
        assert status == 400 and "600 tokens" in answer["error"]


def test_outputs_that_differ_in_shape_by_row_are_told(tmp_path) -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, (1, 1))
    size = s.op("Cast", s.op("Add", s.op("Abs", x), s.number(1.0)), to=ir.DataType.INT64)
    sizes = s.op("Concat", s.ints(1), s.op("Reshape", size, s.ints(-1)), axis=0)
    graph = s.model(y=s.op("Expand", s.number(1.0), sizes))
    with serve_graph(graph, tmp_path, settings=ServeSettings(lanes=1), tokenizer=None) as served:
        rows = [[2.0], [3.0]]
        for chosen, wanted in ((rows[:1], 200), (rows[1:], 200), (rows, 400)):
            status, _, answer = served.infer({"inputs": [tensor("x", chosen, "FP32")]})
            assert status == wanted, answer
        assert "one row at a time" in answer["error"]


def test_gzip_is_unpacked_within_the_limit(served: Served) -> None:
    packed = gzip.compress(json.dumps(request([[5, 6]])).encode())
    assert served.infer(packed, {"Content-Encoding": "gzip"})[0] == 200
    bomb = gzip.compress(b"[" * (40 << 20))
    status, _, answer = served.infer(bomb, {"Content-Encoding": "gzip"})
    assert status == 413 and "1048576" in answer["error"]
    assert served.infer(packed[:-9], {"Content-Encoding": "gzip"})[0] == 400
    assert served.infer(packed, {"Content-Encoding": "br"})[0] == 415
