"""Trust of a real sweep on a small random embedder: noise, both views, and ``qbench audit``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from qbench import judging
from qbench.cli.main import run_command_line
from qbench.config import make_config
from qbench.pipeline import calibrate, start
from qbench.records import Kind, Status, SweepRecord
from qbench.report.run_view import open_run
from qbench.sensitivity.replay import Replay
from qbench.sensitivity.sweep import Sweep
from qbench.tasks import batches_sha256
from qbench.testing.models import bert_folder, pairs_csv
from qbench.trust import integer_format, measure_noise, measure_restored
from qbench.workbench import Workbench

FORMATS = ["int8", "int8_dynamic", "w4a16"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    place = tmp_path_factory.mktemp("place")
    config = make_config(
        {
            "model": {"source": str(bert_folder(place / "model")), "normalize": True},
            "data": {
                "source": str(pairs_csv(place / "pairs.csv")),
                "columns": {"query": "question", "answer": "reply"},
                "splits": {"calibration": 16, "sweep": 40, "verification": "rest"},
                "prepared": str(place / "calib_data"),
            },
            "task": {"kind": "retrieval"},
            "sweep": {"formats": FORMATS},
            "run": {"results": str(place / "results"), "id": "trust", "threads": 1},
        }
    )
    work = start(config)
    calibrate(work)
    yield work
    work.run.unlock()


@pytest.fixture(scope="module")
def swept(work: Workbench) -> Iterator[tuple[Sweep, tuple[SweepRecord, ...]]]:
    ranges, batches = work.run.read_ranges(), work.batches("sweep")
    work.run.start_journal(work.journal_key(batches_sha256(batches)))
    replay = Replay(work.model.ir, work.layers, batches, work.settings, work.model.output)
    clips = judging.clips_of(work, ranges)
    runner = Sweep(replay, work.task("sweep"), work.backend, clips, ranges)
    chosen = [layer for layer in work.chosen if layer.kind is Kind.LINEAR]
    cells = [(layer, name) for layer in chosen for name in FORMATS]
    for layer, name in cells:
        work.run.append_sweep(runner.measure(layer, name))
    yield runner, work.run.read_sweep()
    runner.close()


def test_every_measured_drop_has_a_p_value(swept) -> None:
    _, records = swept
    assert {r.status for r in records} == {Status.OK}
    for record in records:
        assert set(record.p_values) == {"mrr", "ndcg@10"} == set(record.drops)
        assert all(0 < p <= 1 for p in record.p_values.values())


def test_noise_is_measured_once_written_and_told(work: Workbench, swept) -> None:
    runner, records = swept
    noise = measure_noise(work, runner.bench, records)
    assert {f.what for f in noise.floors} == {"reference", "int8_dynamic"}
    assert all(f.divergence.value < 1e-6 for f in noise.floors if f.what == "reference")
    assert len(noise.calibration) == 5 and {s.format for s in noise.calibration} == {"int8"}
    by_cell = {(r.layer, r.format): r.divergence.value for r in records}
    for spread in noise.calibration:
        assert spread.divergence == pytest.approx(by_cell[spread.layer, "int8"], rel=1e-6)
        assert len(set(spread.draws)) > 1, "halves of the calibration split clip elsewhere"
    assert {(c.layer, c.format) for c in noise.calls} == set(by_cell)
    assert work.run.read_noise() == noise and not noise.remarks
    assert measure_noise(work, runner.bench, records) is not noise
    assert measure_noise(work, runner.bench, records) == noise, "taken from the folder"
    assert measure_noise(work, runner.bench, records[:-1]).key != noise.key


def test_without_time_the_spread_is_named_as_not_covered(work: Workbench, swept) -> None:
    runner, records = swept
    noise = measure_noise(work, runner.bench, records[:9], budget_s=0.0)
    assert noise.calibration == () and "covers 0 of" in noise.remarks[0]


def test_the_restored_view_is_in_the_table(work: Workbench, swept) -> None:
    runner, records = swept
    assert integer_format(records) == "int8"
    view = measure_restored(work, runner.bench, records)
    assert view is not None and view.lowered == len(view.records) == len(records) // 3
    assert measure_restored(work, runner.bench, records) == view == work.run.read_restored()
    frame = open_run(work.run.path).sweep.set_index(["layer", "format"])
    for record in view.records:
        assert record.interaction is not None
        assert frame.loc[(record.layer, "int8"), "interaction"] == record.interaction.value
    assert frame.xs("w4a16", level="format")["interaction"].isna().all()
    short = measure_restored(work, runner.bench, records, format_name="w4a16", budget_s=0.0)
    assert short is not None and short.records == () and "0 of" in short.remarks[0]
    assert short.all_low.value > 0


def test_cells_that_the_race_stopped_are_measured_whole_for_the_restored_view(
    work: Workbench, swept
) -> None:
    runner, records = swept
    whole = measure_restored(work, runner.bench, records)
    stopped = [
        replace(
            r,
            effort="stopped after 4 of 40 samples: harmless",
            samples={},
            drops={},
            divergence=replace(r.divergence, value=r.divergence.value * 1.1),
        )
        for r in records
    ]
    view = measure_restored(work, runner.bench, stopped)
    assert whole is not None and view is not None and view.key != whole.key
    for one, other in zip(whole.records, view.records, strict=True):
        assert other.single is not None and other.interaction is not None
        assert other.single.value == pytest.approx(one.single.value, rel=1e-4)


def test_only_floating_point_cells_have_no_restored_view(work: Workbench, swept) -> None:
    runner, _ = swept
    assert measure_restored(work, runner.bench, []) is None


def test_audit_tells_people_and_machines(
    work: Workbench, swept, capsys: pytest.CaptureFixture[str]
) -> None:
    work.run.unlock()
    assert run_command_line(["audit", str(work.run.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["skipped"] == {} and told["threshold"] == 0.8
    assert {s["proxy"] for s in told["scores"]} == {
        "local_noise", "weight_mse", "gradient", "divergence_half",
    }  # fmt: skip
    assert {s["format"] for s in told["scores"]} == {"all", *FORMATS}
    assert all(
        {"local_noise", "weight_mse", "gradient"} <= set(c["proxies"]) for c in told["cells"]
    )
    by_proxy = {s["proxy"]: s for s in told["scores"] if s["format"] == "all"}
    assert by_proxy["gradient"]["with_divergence"]["value"] > 0.7
    assert run_command_line(["audit", str(work.run.path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "A proxy may be used alone where" in shown and "Gradient² × layer error may" in shown
    assert len(open_run(work.run.path).audit) == len(told["scores"])


def test_a_run_without_a_sweep_is_one_clear_error(
    work: Workbench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["audit", str(work.run.path / "nowhere")]) == 2
    assert "no such run folder" in capsys.readouterr().err
