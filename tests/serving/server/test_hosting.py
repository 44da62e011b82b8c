"""How a server is made ready from what the user gave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
from served import FAST, OPTIONS, request, serve_graph

from qbench.errors import ConfigError, InputError, ModelError
from qbench.graph.model import save_graph
from qbench.hosting import describe, fitting_settings, prepare_host
from qbench.servable import find_servable
from qbench.serving.opening import ServeSettings
from qbench.testing.graphs import Sketch, tiny_convnet, tiny_decoder, tiny_encoder


def saved(graph: ir.Model, folder: Path, name: str = "x"):  # noqa: ANN201
    save_graph(graph, folder / f"{name}.onnx")
    return find_servable(str(folder / f"{name}.onnx"))


def test_settings_fit_how_rows_may_meet(tmp_path) -> None:
    _, padded = describe(saved(tiny_encoder(), tmp_path))
    assert fitting_settings(FAST, padded).max_padding == FAST.max_padding
    _, equal = describe(saved(tiny_decoder(), tmp_path))
    assert fitting_settings(ServeSettings(), equal).max_padding == 0.0
    _, images = describe(saved(tiny_convnet(), tmp_path))
    found = fitting_settings(ServeSettings(max_batch=4), images)
    assert (found.max_batch, found.token_budget) == (4, 12)


def test_a_batch_of_one_row_is_served_row_by_row(tmp_path) -> None:
    s = Sketch(0)
    x = s.input("x", ir.DataType.FLOAT, (1, 4))
    graph = s.model(y=s.op("Relu", x))
    with serve_graph(graph, tmp_path, settings=ServeSettings(lanes=1), tokenizer=None) as served:
        rows = [[-1.0, 2.0, -3.0, 4.0], [5.0, -6.0, 7.0, -8.0]]
        item = {"name": "x", "shape": [2, 4], "datatype": "FP32", "data": rows}
        status, _, answer = served.infer({"inputs": [item]})
        assert status == 200
        assert answer["outputs"][0]["data"] == [0.0, 2.0, 0.0, 4.0, 5.0, 0.0, 7.0, 0.0]


def test_lanes_and_budget_are_chosen_where_they_are_not_given(tmp_path) -> None:
    texts = tuple("word " * (1 + number % 9) for number in range(20))
    with serve_graph(tiny_encoder(), tmp_path, settings=ServeSettings(), texts=texts) as served:
        opened = served.hosting.opened
        assert opened is not None and opened.lanes.trials and opened.sizing is not None
        assert opened.pooled
        assert served.infer(request([[5, 6, 7]]))[0] == 200


def test_a_fallback_must_take_and_give_the_same(tmp_path) -> None:
    engine = saved(tiny_encoder(), tmp_path)
    for other in (tiny_encoder(pooled=False), tiny_convnet()):
        options = replace(OPTIONS, fallback=saved(other, tmp_path, "other"))
        with pytest.raises(ModelError, match="--fallback"):
            prepare_host(engine, options)


def test_a_fallback_that_fits_is_kept_ready(tmp_path) -> None:
    fallback = saved(tiny_encoder(seed=1), tmp_path, "other")
    with serve_graph(tiny_encoder(), tmp_path, fallback=fallback, breaker_p99_ms=500.0) as served:
        assert served.infer(request([[5, 6, 7]]))[0] == 200


def test_without_a_fallback_a_flood_of_bad_requests_opens_nothing(tmp_path) -> None:
    with serve_graph(tiny_encoder(), tmp_path) as served:
        service = served.hosting.host.face.service
        assert service is not None
        for _ in range(60):
            assert served.infer(request([[500, 6, 7]]))[0] == 400
        assert service.stats().breaker == "closed"
        assert served.infer(request([[5, 6, 7]]))[0] == 200


def test_texts_that_cannot_be_served_are_told_before_the_start(tmp_path) -> None:
    engine = saved(tiny_encoder(), tmp_path)
    with pytest.raises(InputError, match="--texts"):
        prepare_host(engine, replace(OPTIONS, texts=("unspeakable",)))
    with pytest.raises(ConfigError, match="at most 64"):
        prepare_host(engine, replace(OPTIONS, longest=65))


def test_engines_for_other_backends_are_refused(tmp_path) -> None:
    save_graph(tiny_encoder(), tmp_path / "x.onnx")
    engine = find_servable(str(tmp_path / "x.onnx"), backend="tensorrt")
    with pytest.raises(ModelError, match="export-triton"):
        prepare_host(engine, OPTIONS)
