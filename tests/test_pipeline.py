"""The whole path on a small random embedder: what it leaves behind, and what stops it."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import qbench
from qbench.config import Config, make_config
from qbench.engine.build import file_facts
from qbench.errors import DataError, InputError, PlanError, RunDirError
from qbench.pipeline import (
    bench,
    build_engine,
    calibrate,
    current_plan,
    run,
    start,
    sweep,
    take_plan,
    verify,
)
from qbench.planner import plan_of_modelopt, plan_of_point
from qbench.planning.planfile import read_plan
from qbench.records import Status, SweepRecord, Verdict
from qbench.rundir import RunDir
from qbench.testing.models import bert_folder, labelled_csv, pairs_csv
from qbench.workbench import Workbench

Stage = Callable[[Workbench], object]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    bert_folder(folder / "model")
    pairs_csv(folder / "pairs.csv")
    return folder


def configured(place: Path, **overrides: object) -> Config:
    return make_config(
        {
            "model": {"source": str(place / "model"), "normalize": True},
            "data": {
                "source": str(place / "pairs.csv"),
                "name": "pairs",
                "columns": {"query": "question", "answer": "reply"},
                "splits": {"calibration": 16, "sweep": 40, "verification": "rest"},
                "prepared": str(place / "calib_data"),
            },
            "task": {"kind": "retrieval"},
            "sweep": {"race": False},
            "plan": {"max_drop": "30 %", "levels": 3, "objective": "bytes"},
            "bench": {"clients": 4, "rounds": 2, "seconds": 0.2},
            "run": {"results": str(place / "results"), "id": "whole", "threads": 1},
        },
        overrides,
    )


@pytest.fixture(scope="module")
def whole(place: Path) -> Iterator[Workbench]:
    work = run(configured(place))
    yield work
    work.run.unlock()


def test_the_path_leaves_a_whole_run(whole: Workbench) -> None:
    found = qbench.open_run(whole.run.path)
    assert len(found.sweep) == len(whole.layers.layers) * 5
    assert set(found.sweep["status"]) == {"ok", "not_applicable", "not_yet"}
    assert not found.ranges.empty and not found.front.empty
    assert {"plan", "reference", "int8", "int8_dynamic", "w8a16", "w4a16"} <= set(
        found.engines["engine"]
    )
    assert found.bench is not None and len(found.bench.latencies)
    assert whole.run.read_run()["verdict"] in set(Verdict)


def test_the_export_was_checked_against_torch(whole: Workbench) -> None:
    check = whole.model.card["export_check"]
    assert check["samples"] > 1 and 0 <= check["max_rel_diff"] < 1e-4


def test_records_hold_raw_samples_and_intervals(whole: Workbench) -> None:
    for record in whole.run.read_sweep():
        if record.status is not Status.OK:
            assert record.reason
            continue
        assert record.divergence is not None and record.n == 40
        assert len(record.samples["divergence"]) == 40
        assert record.divergence.low <= record.divergence.value <= record.divergence.high
        assert record.drops["mrr"].low <= record.drops["mrr"].high
        assert record.sqnr_db is not None and record.wall_s > 0


def test_the_reference_does_not_drop_against_itself(whole: Workbench) -> None:
    judged = {j.engine: j for j in whole.run.read_judgements("verification")}
    assert judged["reference"].drop.value == 0
    assert judged["reference"].divergence.value == 0
    assert judged["reference"].flip_rate == 0


def test_splits_do_not_share_texts(whole: Workbench) -> None:
    seen: set[tuple[int, ...]] = set()
    for split in ("calibration", "sweep", "verification"):
        own = {tuple(item["input_ids"]) for item in whole.task(split).encoded}
        assert not own & seen
        seen |= own


def test_a_second_run_takes_the_journal(place: Path, whole: Workbench) -> None:
    before = whole.run.read_sweep()
    notes: list[str] = []

    class Ear:
        def stage(self, name: str, total: int | None = None) -> None: ...

        def step(self, note: str = "") -> None:
            notes.append(note)

    work = start(configured(place))
    again = {(r.layer, r.format): r for r in sweep(work, Ear())}
    assert again == {(r.layer, r.format): r for r in before}
    assert {note for note in notes if "journal" in note} == {"from the journal"}
    assert whole.run.read_sweep() == before


def test_the_no_op_plan_gives_the_reference_bit_for_bit(whole: Workbench, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    text = whole.run.plan_path.read_text()
    for name in ("int8_dynamic", "int8", "w8a16", "w4a16", "fp16"):
        text = text.replace(f"format: {name}\n", "format: fp32\n")
    plan.write_text(text)
    report = build_engine(whole, None, plan, tmp_path / "engine")
    assert "bit for bit" in report.self_test and report.max_abs_diff == 0


def test_an_edited_plan_is_built_and_the_old_verdict_falls(
    place: Path, whole: Workbench, tmp_path: Path
) -> None:
    plan = current_plan(whole)
    layer = next(entry for entry in plan.layers if entry.kind == "linear")
    other = "w4a16" if layer.format != "w4a16" else "int8"
    edited = tmp_path / "edited.yaml"
    lines = whole.run.plan_path.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.strip() == f"- name: {layer.name}")
    changed = next(i for i in range(at, len(lines)) if lines[i].strip().startswith("format:"))
    lines[changed] = lines[changed].replace(layer.format, other)
    edited.write_text("".join(lines))
    read = read_plan(edited, whole.layers, whole.backend.name, model_sha256=whole.model.sha256)
    assert read.formats()[layer.name] == other
    first = build_engine(whole, None, edited, tmp_path / "a")
    second = build_engine(whole, None, edited, tmp_path / "b")
    assert first.sha256 == second.sha256
    assert first.asked.get(other, 0) >= 1


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (r"- name: encoder.layer.0.output.dense\n", "- name: encoder.layer.0.output.dens\n", "did"),
        (
            r"kind: layernorm\n  format: \w+",
            "kind: layernorm\n  format: w4a16",
            "layernorm has none",
        ),
        (r"kind: linear\n  format: \w+", "kind: linear\n  format: int9", "int9"),
    ],
)
def test_an_impossible_edit_is_a_clear_error(
    whole: Workbench, tmp_path: Path, old: str, new: str, word: str
) -> None:
    text, edits = re.subn(old, new, whole.run.plan_path.read_text(), count=1)
    assert edits == 1
    edited = tmp_path / "edited.yaml"
    edited.write_text(text)
    with pytest.raises(PlanError, match=word):
        build_engine(whole, None, edited, tmp_path / "engine")


def test_an_engine_file_holds_no_path_of_this_machine(whole: Workbench, place: Path) -> None:
    folder = whole.run.engine_dir("plan")
    for file in folder.iterdir():
        raw = file.read_bytes()
        assert str(place).encode() not in raw and b"stack_trace" not in raw


def test_a_results_folder_of_another_model_names_the_key(place: Path, whole: Workbench) -> None:
    bert_folder(place / "other", seed=1)
    whole.run.unlock()
    before = whole.run.path.joinpath("run.json").read_text()
    with pytest.raises(RunDirError, match=r"model\.source was"):
        start(configured(place, **{"model.source": str(place / "other"), "run.id": "whole"}))
    assert qbench.open_run(whole.run.path).facts["config"] == json.loads(before)["config"]


def test_a_model_whose_files_changed_is_refused(place: Path, whole: Workbench) -> None:
    kept = {file: file.read_bytes() for file in (place / "model").iterdir()}
    bert_folder(place / "model", seed=5)
    whole.run.unlock()
    try:
        with pytest.raises(RunDirError, match="another content"):
            start(configured(place))
        assert whole.model.path.is_file()
    finally:
        RunDir(whole.run.path).unlock()
        for file, content in kept.items():
            file.write_bytes(content)


def test_a_missed_expectation_stops_with_both_numbers(place: Path) -> None:
    expect = {"metric": "mrr", "value": 0.999, "tolerance": 1e-6}
    work = start(configured(place, **{"task.expect": expect, "run.id": "expect"}))
    calibrate(work)
    with pytest.raises(DataError, match=r"0\.999"):
        next(sweep(work))
    work.run.unlock()


def test_a_classifier_runs_the_path(place: Path) -> None:
    bert_folder(place / "classifier", classes=3)
    labelled_csv(place / "labelled.csv")
    config = make_config(
        {
            "model": {"source": str(place / "classifier")},
            "data": {
                "source": str(place / "labelled.csv"),
                "splits": {"calibration": 16, "sweep": 40, "verification": 60},
                "prepared": str(place / "calib_data"),
            },
            "task": {"kind": "classification", "metric": "cross_entropy"},
            "sweep": {"formats": ["int8", "w4a16"], "include": ["*output.dense"]},
            "plan": {"max_drop": 0.5, "levels": 2},
            "bench": {"clients": 2, "rounds": 2, "seconds": 0.1},
            "run": {"results": str(place / "results"), "id": "classes", "threads": 1},
        }
    )
    work = run(config)
    records = work.run.read_sweep()
    assert {r.format for r in records} == {"int8", "w4a16"}
    assert all("output.dense" in r.layer for r in records)
    metrics = {"cross_entropy", "accuracy", "macro_f1"}
    whole, part = ([r for r in records if (r.effort == "full") is full] for full in (True, False))
    assert whole and all(set(r.drops) == metrics and r.n == 40 for r in whole)
    # A cell that the race stopped has no drop: its sub-pool would be another estimand.
    assert all(r.effort.startswith("stopped after") and not r.drops and r.n < 40 for r in part)
    work.run.unlock()


def test_a_killed_sweep_continues_where_it_stopped(place: Path) -> None:
    args = [sys.executable, "-m", "qbench.cli.main", "sweep", str(place / "model")]
    args += ["--normalize", "--data", str(place / "pairs.csv"), "--task", "retrieval"]
    args += ["--column", "query=question", "--column", "answer=reply", "--splits", "16,40,rest"]
    args += ["--results", str(place / "results"), "--run-id", "killed", "--threads", "1"]
    env = {**os.environ, "PYTHONPATH": str(Path(qbench.__file__).parents[1])}
    process = subprocess.Popen(
        args, env=env, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    journal = place / "results" / "killed" / "sweep.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if journal.is_file() and journal.read_bytes().count(b"\n") > 12:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = RunDir.open(journal.parent).read_sweep()
    assert before
    done = subprocess.run([*args, "--json"], env=env, cwd=place, capture_output=True, check=True)
    answer = json.loads(done.stdout)
    after = RunDir.open(journal.parent).read_sweep()
    assert after[: len(before)] == before  # what was measured stays as it was
    assert len(after) == sum(answer["cells"].values())
    assert all(np.isfinite(r.divergence.value) for r in after if r.divergence)


def test_verify_again_after_an_edit_judges_the_new_engine(whole: Workbench) -> None:
    size, sha256 = file_facts(whole.run.engine_dir("plan") / "engine.onnx")
    built = next(r for r in whole.run.read_engines() if r.name == "plan")
    assert (built.bytes, built.sha256) == (size, sha256)
    judgements = verify(whole)
    assert judgements[0].engine == "plan"
    assert judgements[0].n == whole.task("verification").n


def test_an_engine_goes_into_a_new_or_empty_folder(whole: Workbench, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    build_engine(whole, folder=mine)
    assert (mine / "engine.onnx").is_file()
    with pytest.raises(InputError, match="exists and is not empty"):
        build_engine(whole, folder=mine)
    with pytest.raises(InputError, match="is a file"):
        build_engine(whole, folder=mine / "engine.onnx")


def test_no_space_leaves_no_half_engine(whole: Workbench, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(InputError, match="larger than the system allows; what was stored"):
            build_engine(whole, folder=tmp_path / "engine")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "engine").iterdir())


def test_a_point_of_the_front_becomes_the_plan(whole: Workbench, tmp_path: Path) -> None:
    said, facts = whole.run.plan_path.read_text(), whole.run.read_run()
    judged = whole.run.read_judgements("verification")
    try:
        rows = whole.run.read_front()
        plan = take_plan(whole, plan_of_point(whole, 1))
        assert plan.formats() == rows[0]["layers"] == current_plan(whole).formats()
        assert (
            judged and whole.run.read_judgements("verification") == ()
        )  # of another plan's engine
        assert plan.measured is not None and plan.measured["engine"] == rows[0]["engine"]
        with pytest.raises(RunDirError, match=f"got {len(rows) + 1}.*points 1 to {len(rows)}"):
            plan_of_point(whole, len(rows) + 1)
    finally:
        whole.run.plan_path.write_text(said)
        whole.run.write_run({k: facts[k] for k in ("verdict", "verdict_words")})
        whole.run.write_judgements("verification", judged)


def test_a_result_of_modelopt_becomes_a_plan(whole: Workbench, tmp_path: Path) -> None:
    said, facts = whole.run.plan_path.read_text(), whole.run.read_run()
    judged = whole.run.read_judgements("verification")
    query, dense = "encoder.layer.0.attention.self.query", "encoder.layer.1.output.dense"
    recipes = {f"{query}.quant_recipe": "INT8_DEFAULT_CFG(effective-bits: 8.0)"}
    recipes[f"model.{dense}.quant_recipe"] = "INT4_AWQ_CFG(effective-bits: 4.0)"
    file = tmp_path / "best.json"
    file.write_text(json.dumps({"recipe": recipes}))
    try:
        plan = take_plan(whole, plan_of_modelopt(whole, file))
        formats = plan.formats()
        assert (formats.pop(query), formats.pop(dense)) == ("int8", "w4a16")
        assert set(formats.values()) == {"fp32"} and whole.run.read_run()["verdict"] is None
        report = build_engine(whole, folder=tmp_path / "engine")
        assert report.asked["int8"] == report.asked["w4a16"] == 1
    finally:
        whole.run.plan_path.write_text(said)
        whole.run.write_run({k: facts[k] for k in ("verdict", "verdict_words")})
        whole.run.write_judgements("verification", judged)


@pytest.mark.parametrize("stage", [verify, bench])
def test_an_engine_that_is_gone_or_old_is_built_first(whole: Workbench, stage: Stage) -> None:
    engine, plan = whole.run.engine_dir("plan") / "engine.onnx", whole.run.plan_path
    kept, said = engine.read_bytes(), plan.read_text()
    engine.unlink()
    with pytest.raises(RunDirError, match=r"engine is gone.*qbench build"):
        stage(whole)
    engine.write_bytes(kept)
    first = next(entry for entry in current_plan(whole).layers if entry.format != "fp32")
    head, tail = said.split(f"- name: {first.name}\n")
    plan.write_text(
        f"{head}- name: {first.name}\n{tail.replace(f'format: {first.format}', 'format: fp32', 1)}"
    )
    with pytest.raises(RunDirError, match=r"changed since.*qbench build"):
        stage(whole)
    plan.write_text(said)


def test_a_raced_sweep_says_what_stopped(place: Path) -> None:
    work = start(configured(place, **{"sweep.race": True, "run.id": "raced"}))
    calibrate(work)
    records = list(sweep(work))
    cells = {(r.layer, r.format) for r in records}
    assert len(records) == len(cells) == len(work.layers.layers) * 5
    assert all(r.effort for r in records if r.status is Status.OK)
    again = {(r.layer, r.format): r for r in sweep(work)}
    assert again == {(r.layer, r.format): r for r in records}
    assert work.run.read_run()["sweep"]["not_reached"] == []
    work.run.unlock()
    refused = work.run.read_run()["preflight"]["refused"]
    full = start(configured(place, **{"run.id": "raced"}))  # the same run, and no race
    assert any(r.effort != "full" for r in records)
    assert {r.effort for r in sweep(full) if r.status is Status.OK} == {"full"}
    assert full.run.read_run()["preflight"]["refused"] == refused
    full.run.unlock()


def test_a_time_budget_leaves_the_rest_and_says_so(place: Path) -> None:
    work = start(configured(place, **{"sweep.budget": "0.001s", "run.id": "hurried"}))
    calibrate(work)
    records = list(sweep(work))
    told = work.run.read_run()["sweep"]
    assert told["not_reached"] and "not reached" in told["effort"]
    assert len(records) + len(told["not_reached"]) == len(work.layers.layers) * 5
    work.run.unlock()


def test_cells_side_by_side_give_the_same_numbers(place: Path, whole: Workbench) -> None:
    def numbers(records: tuple[SweepRecord, ...]) -> dict[tuple[str, str], SweepRecord]:
        return {(r.layer, r.format): replace(r, latency_delta_ms=None, wall_s=0.0) for r in records}

    work = start(configured(place, **{"run.threads": 2, "run.id": "abreast"}))
    calibrate(work)
    assert numbers(tuple(sweep(work))) == numbers(whole.run.read_sweep())
    work.run.unlock()
