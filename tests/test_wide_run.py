"""A model that fp16 cannot hold, on each backend whose high precision is fp16, end to end."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qbench.backends import BACKENDS
from qbench.cli.main import run_command_line
from qbench.engine.build import ENGINE_FILE
from qbench.engine.tensorrt import COMMAND_FILE, SERIALIZED_FILE
from qbench.errors import PlanError
from qbench.graph.layers import find_layers
from qbench.pipeline import current_plan
from qbench.planning.planfile import write_plan
from qbench.records import CauseName, Status
from qbench.runtime.ort import SessionSettings, open_session
from qbench.runtime.presence import why_absent
from qbench.testing.models import bert_folder, pairs_csv
from qbench.workbench import Workbench

pytestmark = pytest.mark.slow
needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="needs the extra tensorrt-rtx"
)
needs_cuda = pytest.mark.skipif(
    bool(why_absent(BACKENDS["ort-cuda"])), reason="ONNX Runtime has no CUDA here"
)
HOT = ("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import BertModel

    folder = tmp_path_factory.mktemp("wide")
    bert_folder(folder / "model", layers=1)
    model = BertModel.from_pretrained(folder / "model")
    with torch.no_grad():
        block = model.encoder.layer[0]
        block.intermediate.dense.weight *= 4e4
        block.output.dense.weight *= 5e-5
    model.save_pretrained(folder / "model")
    pairs_csv(folder / "pairs.csv")
    return folder


def swept(place: Path, backend: str) -> Path:
    arguments = [
        *("sweep", str(place / "model"), "--normalize", "--task", "retrieval"),
        *("--data", str(place / "pairs.csv"), "--splits", "8,24,40", "--remedies", "0"),
        *("--column", "query=question", "--column", "answer=reply", "--max-drop", "60 %"),
        *("--format", "fp32", "--format", "int8", "--backend", backend, "--threads", "1"),
        *("--results", str(place / "results"), "--run-id", backend),
    ]
    assert run_command_line(arguments) == 0
    return place / "results" / backend


@pytest.fixture(
    scope="module",
    params=[
        "tensorrt",
        pytest.param("tensorrt-rtx", marks=needs_rtx),
        pytest.param("ort-cuda", marks=needs_cuda),
    ],
)
def run(request: pytest.FixtureRequest, place: Path) -> Iterator[Path]:
    folder = swept(place, request.param)
    assert run_command_line(["plan", str(folder), "--levels", "2", "--rounds", "0"]) in (0, 1)
    assert run_command_line(["build", str(folder)]) == 0
    yield folder


@pytest.fixture
def work(run: Path) -> Iterator[Workbench]:
    found = Workbench.reopen(run)
    yield found
    found.run.unlock()


def test_the_plan_keeps_what_overflows_and_says_why(work: Workbench) -> None:
    rows = {row.name: row for row in current_plan(work).layers}
    hot = [row for name, row in rows.items() if name.endswith(HOT) and "attention" not in name]
    assert len(hot) == 3 and {row.format for row in hot} == {"fp32"}
    assert all("kept, fp16 " in row.reason and "65504" in row.reason for row in hot)
    assert set(work.kept) == {row.name for row in hot}


def test_a_hand_edit_may_not_undo_it(work: Workbench, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan = current_plan(work)
    hot = next(iter(work.kept))
    rows = tuple(replace(r, format="fp16") if r.name == hot else r for r in plan.layers)
    write_plan(replace(plan, layers=rows), path)
    with pytest.raises(PlanError, match=f"{hot}.*cannot be fp16.*write fp32"):
        current_plan(work, path)


def test_the_overflow_is_told_as_a_cause(work: Workbench) -> None:
    told = [c for c in work.run.read_causes() if c.layer in work.kept]
    over = [n for n, why in work.kept.items() if "overflows: its tensor" in why and "dense" in n]
    assert over and {c.layer for c in told if c.cause is CauseName.FP16_OVERFLOW} >= set(over)


def test_cells_in_fp32_are_measured_on_all_samples(work: Workbench) -> None:
    cells = [r for r in work.run.read_sweep() if r.format == "fp32"]
    fine = [r for r in cells if r.status is Status.OK]
    assert len(fine) > 10 and all(r.effort == "full" and r.regained is not None for r in fine)
    assert not [r for r in cells if r.status in (Status.NOT_YET, Status.FAILED)]


def test_no_tensor_of_the_engine_overflows(work: Workbench) -> None:
    import onnx_ir as ir

    graph = ir.load(work.run.engine_dir("plan") / ENGINE_FILE)
    given = {v.name for v in graph.graph.outputs}
    for node in graph.graph:
        for value in node.outputs:
            if value.dtype is ir.DataType.FLOAT16 and value.name not in given:
                graph.graph.outputs.append(value)
    settings = SessionSettings("ort-cpu", 1, {}, None, False)
    with open_session(graph, settings) as session:
        values = session.run(work.batches("verification")[0].feeds)
    halves = {n: v for n, v in values.items() if v.dtype == np.float16}
    assert len(halves) > 10 and all(np.isfinite(v).all() for v in halves.values())


def test_the_engine_is_built_by_the_backends_builder(run: Path) -> None:
    folder = run / "engine" / "plan"
    if run.name == "tensorrt-rtx":
        assert (folder / SERIALIZED_FILE).stat().st_size > 0
    elif run.name == "tensorrt" and importlib.util.find_spec("tensorrt") is None:
        assert "stronglyTyped" in (folder / COMMAND_FILE).read_text()
    else:
        assert (folder / ENGINE_FILE).is_file()


def test_it_is_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["verify", str(run), "--json"]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] in ("verified", "no_gain", "not_resolvable")


def test_pins_keep_layers_in_fp32(run: Path) -> None:
    pins = ["--keep", "*.attention.output.dense=fp32", "--keep", "*.intermediate.dense"]
    assert run_command_line(["plan", str(run), *pins, "--levels", "1", "--rounds", "0"]) in (0, 1)
    work = Workbench.reopen(run)
    formats = current_plan(work).formats()
    work.run.unlock()
    named = {x.name for x in find_layers(work.model.ir).layers}
    pinned = [n for n in named if n.endswith("attention.output.dense")]
    assert pinned and all(formats[name] == "fp32" for name in pinned)
    assert all(formats[n] == "fp32" for n in work.kept)
