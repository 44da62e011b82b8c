"""The path to a serialized engine, on a small random embedder: sweep, plan, build, verify."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest

from qbench import budgets, judging, open_run
from qbench.backends import BACKENDS
from qbench.cli.main import run_command_line
from qbench.config import make_config
from qbench.engine.build import ENGINE_FILE
from qbench.engine.tensorrt import COMMAND_FILE, SERIALIZED_FILE
from qbench.errors import ConfigError
from qbench.pipeline import build_engine, calibrate, current_plan, make_plan, start, sweep, verify
from qbench.planning.planfile import plan_sha256, read_plan, write_plan
from qbench.records import Kind, Plan, Status
from qbench.serializing import wanted_of
from qbench.testing.models import bert_folder, pairs_csv
from qbench.workbench import Workbench

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="needs the extra tensorrt-rtx"
)
pytestmark = pytest.mark.slow
NOT_RUN = "the engine of {} itself was not run"


def configured(place: Path, backend: str, **overrides: object) -> object:
    return make_config(
        {
            "model": {"source": str(place / "model"), "normalize": True},
            "data": {
                "source": str(place / "pairs.csv"),
                "name": "pairs",
                "columns": {"query": "question", "answer": "reply"},
                "splits": {"calibration": 8, "sweep": 24, "verification": 40},
                "prepared": str(place / "calib_data"),
            },
            "task": {"kind": "retrieval"},
            "sweep": {"race": False, "formats": ["int8", "w4a16"], "remedies": 0},
            "plan": {"backend": backend, "max_drop": "60 %", "levels": 2, "rounds": 0},
            "run": {"results": str(place / "results"), "id": backend, "threads": 1},
        },
        overrides,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    bert_folder(folder / "model", layers=1)
    pairs_csv(folder / "pairs.csv")
    return folder


def planned(place: Path, backend: str) -> Iterator[Workbench]:
    work = start(configured(place, backend))
    calibrate(work)
    for _ in sweep(work):
        pass
    make_plan(work)
    yield work
    work.run.unlock()


@pytest.fixture(scope="module")
def rtx(place: Path) -> Iterator[Workbench]:
    yield from planned(place, "tensorrt-rtx")


def with_hardware(plan: Plan, hardware: str, linear: str) -> Plan:
    rows = tuple(
        replace(row, format=linear if row.kind is Kind.LINEAR else "fp16") for row in plan.layers
    )
    return replace(plan, layers=rows, constraints={**plan.constraints, "hardware": hardware})


def test_cells_are_of_the_backend_and_say_what_ran_them(rtx: Workbench) -> None:
    records = rtx.run.read_sweep()
    assert {(r.backend, r.executed_on, r.emulated) for r in records} == {
        ("tensorrt-rtx", "ort-cpu", True)
    }
    fine = [r for r in records if r.status is Status.OK]
    assert {r.format for r in fine} == {"int8", "w4a16"}
    assert {r.latency_delta_ms.method for r in fine} == {"not measured"}
    assert rtx.run.read_run()["preflight"]["chain_difference"] < 1e-2
    assert " as fast" not in rtx.run.read_run()["verdict_words"]


@needs_rtx
def test_a_plan_is_built_and_verified_and_says_what_did_not_run(
    rtx: Workbench, tmp_path: Path
) -> None:
    report = build_engine(rtx)
    made = report.serialized
    assert made is not None and made.path == f"engine/plan/{SERIALIZED_FILE}"
    assert (rtx.run.path / made.path).stat().st_size == made.bytes
    assert made.shapes["batch"][0] == 1 and made.shapes["sequence"][0] >= 3
    assert (report.executed_on, report.emulated) == ("ort-cpu", True)
    judged = {j.engine: j for j in verify(rtx)}
    assert judged["plan"].emulated and NOT_RUN.format("tensorrt-rtx") in judged["plan"].remark
    assert not judged["reference"].emulated and "fp16" in judged
    assert NOT_RUN.format("tensorrt-rtx") in rtx.run.read_run()["verdict_words"]
    page = open_run(rtx.run.path).write_report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert NOT_RUN.format("tensorrt-rtx") in page and made.builder in page


@needs_rtx
def test_what_does_not_build_falls_back_and_plan_and_report_say_why(
    rtx: Workbench, tmp_path: Path
) -> None:
    before = rtx.run.plan_path.read_bytes()
    plan = with_hardware(current_plan(rtx), "SM75", "w4a16")
    try:
        write_plan(plan, rtx.run.plan_path)
        report = build_engine(rtx)
        linear = sum(row.kind is Kind.LINEAR for row in plan.layers)
        assert report.asked["w4a16"] == linear and "w4a16" not in report.realised
        assert len(report.fallbacks) == linear
        assert all(
            re.search(r"in w4a16.* does not build alone", f.reason) for f in report.fallbacks
        )
        assert report.serialized is not None and report.serialized.targets == ("SM75",)
        told = current_plan(rtx)
        assert told.formats() == plan.formats()
        assert [h["not_built"] for h in told.history if "not_built" in h] == ["w4a16"] * linear
        engine = ir.load(rtx.run.engine_dir("plan") / ENGINE_FILE)
        assert engine.metadata_props["qbench.plan_sha256"] == plan_sha256(plan)
        assert not any(n.op_type == "DequantizeLinear" for n in engine.graph)
    finally:
        rtx.run.plan_path.write_bytes(before)


def test_another_backend_than_the_run_was_measured_for(rtx: Workbench, capsys) -> None:
    rtx.run.unlock()
    assert run_command_line(["build", str(rtx.run.path), "--backend", "tensorrt"]) == 2
    said = capsys.readouterr().err
    assert "measured for 'tensorrt-rtx'" in said and "sweep with --backend tensorrt" in said
    rtx.run.lock()


@needs_rtx
def test_build_from_the_command_line(rtx: Workbench, tmp_path: Path, capsys) -> None:
    rtx.run.unlock()
    out, run = tmp_path / "out", str(rtx.run.path)
    sizes = ["--dim", "batch=1,2,4", "--dim", "sequence=3,8,16"]
    command = ["build", run, "--backend", "tensorrt-rtx", "--out", str(out), *sizes]
    assert run_command_line([*command, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["engine"]["serialized"]
    assert made["shapes"] == {"batch": [1, 2, 4], "sequence": [3, 8, 16]}
    assert sorted(f.name for f in out.iterdir() if f.suffix != ".data") == [
        ENGINE_FILE,
        SERIALIZED_FILE,
    ]
    assert run_command_line(command) == 2 and "not empty" in capsys.readouterr().err
    other = [*command[:5], str(tmp_path / "other")]
    assert run_command_line([*other, "--dim", "sequenc=1,2,3"]) == 2
    assert "did you mean 'sequence'" in capsys.readouterr().err
    rtx.run.lock()


def test_without_tensorrt_the_command_is_written(place: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("TensorRT is installed here")
    work = start(configured(place, "tensorrt"))
    calibrate(work)
    formats = {x.name: "int8" for x in work.layers.layers if x.kind is Kind.LINEAR}
    clips = judging.clips_of(work, work.run.read_ranges())
    write_plan(
        judging.plan_for(work, judging.Candidate("plan", formats), clips), work.run.plan_path
    )
    report = build_engine(work, None, None, tmp_path / "engine")
    assert report.serialized is not None and not report.serialized.path
    assert "unverified" in report.serialized.remark
    script = (tmp_path / "engine" / COMMAND_FILE).read_text()
    assert report.serialized.command in script and "--stronglyTyped" in script
    engine = ir.load(tmp_path / "engine" / ENGINE_FILE)
    assert {n.domain for n in engine.graph.all_nodes()} == {""}
    work.run.unlock()


@pytest.mark.parametrize("wrong", [{"plan.objective": "latency"}, {"plan.max_latency": "60 %"}])
def test_times_that_nothing_measures_are_not_asked_for(rtx: Workbench, place: Path, wrong) -> None:
    other = Workbench(configured(place, "tensorrt-rtx", **wrong), rtx.run)
    with pytest.raises(ConfigError, match="say nothing of a GPU's"):
        budgets.check_request(other)


def test_sizes_of_an_onnx_engine_are_refused(rtx: Workbench, monkeypatch) -> None:
    monkeypatch.setattr(rtx, "backend", BACKENDS["ort-cpu"])
    with pytest.raises(ConfigError, match="ort-cpu runs the ONNX file itself"):
        wanted_of(rtx, read_plan(rtx.run.plan_path), ["batch=1,2,4"])
