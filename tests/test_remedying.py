"""Remedies in a whole run: tried, kept in the journal, planned, built, and told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import qbench
from qbench.config import Config, make_config
from qbench.engine.build import file_facts
from qbench.errors import InputError
from qbench.pipeline import build_engine, calibrate, current_plan, make_plan, start, sweep, verify
from qbench.planning.planfile import plan_sha256, read_plan, write_plan
from qbench.records import CauseName, Status, SweepRecord, from_dict, to_dict
from qbench.remedying import left_in_high_precision, records_to_plan, try_remedies
from qbench.testing.models import bert_folder, pairs_csv
from qbench.torch_scales import check_scales, foreign_scales, treatment_from_scale
from qbench.workbench import Workbench

#: The layer whose input has a channel that stands out.
WORST = "encoder.layer.0.output.dense"


def plant(folder: Path, factor: float = 60.0) -> None:
    """Give the feed-forward of the first block one channel that is much larger than the others."""
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    inner = next(k for k in weights if k.endswith("layer.0.intermediate.dense.weight"))
    outer = next(
        k for k in weights if k.endswith("layer.0.output.dense.weight") and "attention" not in k
    )
    weights[inner][3] *= factor
    weights[outer][:, 3] /= factor
    save_file(weights, path, metadata={"format": "pt"})


def configured(place: Path, run_id: str, **overrides: object) -> Config:
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
            "sweep": {
                "formats": ["int8", "int8_dynamic", "w4a16"],
                "include": ["encoder.layer.0.*dense", "encoder.layer.1.output.dense"],
                "race": False,
                "remedies": 1,
            },
            "plan": {"max_drop": "50 %", "levels": 2, "objective": "bytes"},
            "run": {"results": str(place / "results"), "id": run_id, "threads": 1},
        },
        overrides,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    bert_folder(folder / "model")
    plant(folder / "model")
    pairs_csv(folder / "pairs.csv")
    return folder


@pytest.fixture(scope="module")
def plain_run(place: Path) -> tuple[Path, tuple[SweepRecord, ...]]:
    """A sweep without remedies, and its records."""
    work = start(configured(place, "treated", **{"sweep.remedies": 0}))
    calibrate(work)
    list(sweep(work))
    assert work.run.read_remedies() == ()
    assert records_to_plan(work) == work.run.read_sweep()
    work.run.unlock()
    return work.run.path, work.run.read_sweep()


@pytest.fixture(scope="module")
def swept(plain_run: tuple[Path, tuple[SweepRecord, ...]]) -> Iterator[Workbench]:
    work = Workbench.reopen(plain_run[0], {"sweep.remedies": 1})
    list(sweep(work))
    yield work
    work.run.unlock()


def best_of(work: Workbench, layer: str, form: str) -> SweepRecord:
    return next(r for r in records_to_plan(work) if (r.layer, r.format) == (layer, form))


def test_remedies_are_cells_of_their_own(swept: Workbench) -> None:
    plain, tried = swept.run.read_sweep(), swept.run.read_remedies()
    assert all(r.treatment is None and r.variant == "" for r in plain)
    assert len(plain) == len(swept.chosen) * 3 == 12
    names = {r.treatment.remedy for r in tried if r.format == "int8"}
    assert names == {"percentile", "entropy", "mse", "smoothquant"}
    assert {r.treatment.remedy for r in tried if r.format == "w4a16"} == {"awq", "block"}
    assert {r.variant for r in tried if r.format == "int8_dynamic"} == {"rows"}
    for record in tried:
        assert record.status in (Status.OK, Status.NOT_APPLICABLE), record.reason
        assert from_dict(SweepRecord, to_dict(record)) == record
    assert swept.run.read_run()["remedies"] == {"tried": len(tried), "not_reached": 0}


def test_the_planted_layer_is_what_plans_leave_alone(swept: Workbench) -> None:
    kept = left_in_high_precision(swept, swept.run.read_sweep())
    assert kept < {layer.name for layer in swept.layers.layers}
    assert {r.layer for r in swept.run.read_remedies() if r.format == "int8"} == {WORST}


def test_smoothing_mends_the_planted_layer(swept: Workbench) -> None:
    plain = next(r for r in swept.run.read_sweep() if (r.layer, r.format) == (WORST, "int8"))
    best = best_of(swept, WORST, "int8")
    assert best.treatment is not None
    smoothed = next(
        r
        for r in swept.run.read_remedies()
        if r.layer == WORST and r.treatment.remedy == "smoothquant"
    )
    assert smoothed.divergence.value < plain.divergence.value / 3
    assert smoothed.sqnr_db > plain.sqnr_db + 6
    dynamic = best_of(swept, WORST, "int8_dynamic")
    assert dynamic.variant in ("", "rows")


def test_the_planted_layer_has_its_cause(swept: Workbench) -> None:
    causes = [c for c in swept.run.read_causes() if (c.layer, c.format) == (WORST, "int8")]
    assert causes and causes[0].cause is CauseName.OUTLIER_CHANNELS
    frame = qbench.open_run(swept.run.path).sweep
    own = frame[(frame["layer"] == WORST) & (frame["format"] == "int8")]
    assert list(own["cause"]) == ["outlier channels"]


def test_a_second_time_nothing_is_measured_again(swept: Workbench) -> None:
    before = swept.run.read_remedies()
    assert try_remedies(swept, None, swept.run.read_sweep()) == before  # type: ignore[arg-type]


def test_remedies_leave_the_plain_records_as_they_were(
    plain_run: tuple[Path, tuple[SweepRecord, ...]], swept: Workbench
) -> None:
    assert swept.run.read_sweep() == plain_run[1]


def test_in_a_race_the_best_remedy_of_a_cell_is_measured_in_full(
    place: Path, swept: Workbench
) -> None:
    work = start(configured(place, "raced", **{"sweep.race": True, "sweep.remedies": 2}))
    calibrate(work)
    list(sweep(work))
    work.run.unlock()
    looked = [r for r in work.run.read_remedies() if r.status is Status.OK]
    cells = {(r.layer, r.format) for r in looked}
    assert len(cells) == 6 and (WORST, "int8") in cells
    for cell in cells:
        own = [r for r in looked if (r.layer, r.format) == cell]
        full = [r for r in own if r.effort == "full"]
        assert len(full) <= 1
        for record in (r for r in own if r not in full):
            assert record.effort.startswith("stopped after 16 of 40 samples: ")
            assert record.divergence is not None and record.n == 16
            if full:
                assert (
                    f"{full[0].variant} diverges less" in record.effort
                    or "no less" in record.effort
                )
    whole = {(r.layer, r.format, r.variant): r for r in swept.run.read_remedies()}
    (best,) = [r for r in looked if (r.layer, r.format, r.effort) == (WORST, "int8", "full")]
    assert best.divergence == whole[WORST, "int8", best.variant].divergence
    assert best.divergence.value == min(
        r.divergence.value for k, r in whole.items() if k[:2] == (WORST, "int8") and r.divergence
    )
    assert best_of(work, WORST, "int8") == best


def test_the_plan_carries_remedies_and_builds_the_same_bytes(
    swept: Workbench, tmp_path: Path
) -> None:
    make_plan(swept)
    plan = current_plan(swept)
    tried = {(r.layer, r.format): r.treatment for r in records_to_plan(swept) if r.treatment}
    assert tried
    for row in plan.layers:
        assert row.treatment == tried.get((row.name, row.format))
    forced = replace(
        plan,
        layers=tuple(
            replace(row, format="int8", treatment=tried[row.name, "int8"])
            if row.name == WORST
            else row
            for row in plan.layers
        ),
    )
    write_plan(forced, tmp_path / "plan.yaml")
    again = read_plan(tmp_path / "plan.yaml", swept.layers, model_sha256=swept.model.sha256)
    assert again.layers == forced.layers and plan_sha256(again) == plan_sha256(forced)
    bare = replace(forced, layers=tuple(replace(x, treatment=None) for x in forced.layers))
    assert plan_sha256(bare) != plan_sha256(forced)
    reports = [
        build_engine(swept, plan_path=tmp_path / "plan.yaml", folder=tmp_path / name)
        for name in ("one", "two")
    ]
    assert reports[0].sha256 == reports[1].sha256 == file_facts(tmp_path / "two/engine.onnx")[1]
    assert not [f for f in reports[0].fallbacks if f.layer == WORST]


def test_the_planned_engine_is_built_and_verified(swept: Workbench) -> None:
    if not swept.run.plan_path.is_file():
        make_plan(swept)
    build_engine(swept)
    judged = {j.engine: j for j in verify(swept)}
    assert np.isfinite(judged["plan"].drop.value)


def test_modelopt_gives_scales_of_the_torch_model(swept: Workbench) -> None:
    pytest.importorskip("modelopt")
    layer = swept.layers.by_name()[WORST]
    record = next(r for r in swept.run.read_ranges() if r.tensor == layer.edges[0].tensor)
    absmax = np.array(record.channel_absmax, np.float32)
    scale = foreign_scales(swept, "smoothquant", [layer], {})[WORST]
    ratio = scale / absmax  # with modelopt's alpha of 1 the activation alone makes the scale
    np.testing.assert_allclose(ratio, np.median(ratio), rtol=1e-3)
    own = treatment_from_scale("smoothquant", scale, record.tensor, absmax, None)
    assert own.variant == "smoothquant:modelopt" and own.clips[record.tensor] > 0
    awq = foreign_scales(swept, "awq", [layer], {WORST: 32})[WORST]
    assert awq.shape == absmax.shape and (awq > 0).all()
    assert np.argmax(awq) == np.argmax(absmax) == 3


def test_modelopt_is_for_torch_models(place: Path, swept: Workbench) -> None:
    config = configured(
        place,
        "foreign",
        **{"model.source": str(swept.model.path), "sweep.scales": "modelopt"},
    )
    with pytest.raises(InputError, match="is an ONNX file"):
        check_scales(Workbench(config, swept.run))
