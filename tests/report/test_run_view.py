from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qbench import open_run
from qbench.errors import PlanError, RunDirError
from qbench.report.run_records import load_records
from qbench.rundir import RunDir
from qbench.testing.runs import ODD_NAME, made_layers, made_run, made_sweep


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("results"), blocks=1, n=12).path


def test_run_gives_tables(folder: Path) -> None:
    run = open_run(folder)
    assert len(run.layers) == 19
    assert len(run.ranges) == 20
    assert len(run.sweep) == 95
    assert run.sweep["layer"].drop_duplicates().tolist() == run.layers["layer"].tolist()
    assert run.engines["engine"].tolist()[:2] == ["plan", "reference"]
    assert len(run.verification) == 7
    assert run.front["chosen"].sum() == 1
    assert len(run.bench.table) == 7
    assert len(run.bench.latencies) == 420
    assert run.unlayered["nodes"].sum() == 10
    assert run.facts["seed"] == 0


def test_run_and_its_parts_show_themselves(folder: Path) -> None:
    run = open_run(folder)
    assert "verified" in run._repr_html_()
    assert ODD_NAME not in run.plan._repr_html_()
    assert "&lt;/script&gt;" in run.plan._repr_html_()
    assert repr(run.plan).startswith("<plan for ort-cpu: ")
    assert "420 requests" in repr(run.bench)
    assert "P99" in run.bench._repr_html_()
    assert repr(run) == f"open_run('{folder}')"
    assert run.plan.counts["fp32"].sum() + run.plan.counts["int8"].sum() <= len(run.plan.table)


def test_records_survive_the_folder(folder: Path) -> None:
    records = load_records(RunDir.open(folder))
    assert records.missing == {}
    layers = made_layers(1)
    assert records.layers == layers
    assert records.sweep == made_sweep(layers, 12)


def test_parts_that_are_absent_name_their_command(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path, "begun")
    rundir.write_run({"seed": 1})
    rundir.unlock()
    run = open_run(rundir.path)
    for part, command in (("layers", "layers"), ("sweep", "sweep"), ("plan", "layers"),
                          ("bench", "bench"), ("front", "plan")):  # fmt: skip
        with pytest.raises(RunDirError, match=f"qbench {command}"):
            getattr(run, part)
    assert set(run.records.missing) == {
        "layers", "ranges", "sweep", "noise", "plan", "front", "engines", "verification", "bench",
    }  # fmt: skip
    assert "Nothing was verified yet" in run._repr_html_()
    assert run.write_report() == rundir.report_path
    assert rundir.report_path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert run.save_figures(tmp_path / "figures") == ()


def test_no_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RunDirError):
        open_run(tmp_path / "nowhere")


def test_opening_is_light() -> None:
    code = (
        "import sys; from qbench import open_run; "
        "print(*sorted({'pandas', 'altair', 'torch', 'onnxruntime'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_plan_edited_into_nonsense_is_said(tmp_path: Path) -> None:
    rundir = made_run(tmp_path, blocks=0, n=4)
    text = rundir.plan_path.read_text(encoding="utf-8")
    rundir.plan_path.write_text(text.replace("int8", "int9"), encoding="utf-8")
    run = open_run(rundir.path)
    with pytest.raises(PlanError, match="int9"):
        _ = run.plan
    assert "int9" in run.records.missing["plan"]
