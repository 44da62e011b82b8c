"""A run's sweep on Ray: interrupted, continued by threads, and the same in the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from qbench.config import make_config
from qbench.errors import InputError
from qbench.pipeline import calibrate, start
from qbench.progress import Silence
from qbench.records import SweepRecord
from qbench.sensitivity.executors import LocalExecutor
from qbench.sweeping import all_cells, ready_sweep
from qbench.testing.models import bert_folder, pairs_csv
from qbench.workbench import Workbench

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    bert_folder(folder / "model", layers=1)
    pairs_csv(folder / "pairs.csv")
    return folder


def begun(place: Path, run: str, **sweep: object) -> Workbench:
    work = start(
        make_config(
            {
                "model": {"source": str(place / "model"), "normalize": True},
                "data": {
                    "source": str(place / "pairs.csv"),
                    "columns": {"query": "question", "answer": "reply"},
                    "splits": {"calibration": 16, "sweep": 24, "verification": "rest"},
                    "prepared": str(place / "calib_data"),
                },
                "task": {"kind": "retrieval"},
                "sweep": {
                    "formats": ["int8", "w4a16"],
                    "include": ["*dense*", "*query*", "*norm*"],
                    "race": False,
                    **sweep,
                },
                "run": {"results": str(place / "results"), "id": run, "threads": 2},
            }
        )
    )
    calibrate(work)
    return work


def swept(work: Workbench, stop_after: int | None = None) -> Iterator[SweepRecord]:
    with ready_sweep(work, Silence()) as ready:
        for count, record in enumerate(all_cells(work, ready, Silence())):
            if count == stop_after:
                raise KeyboardInterrupt
            yield record


def by_cell(work: Workbench) -> dict[tuple[str, str], SweepRecord]:
    return {
        (r.layer, r.format): replace(r, wall_s=0.0, latency_delta_ms=None)
        for r in work.run.read_sweep()
    }


def test_an_interrupted_sweep_goes_on_elsewhere_and_ends_the_same(place: Path) -> None:
    whole = begun(place, "local")
    assert len(list(swept(whole))) == len(by_cell(whole))
    assert whole.run.read_run()["executor"] == {"executor": "local", "workers": 2}
    whole.run.unlock()
    torn = begun(place, "torn", executor="ray")
    with pytest.raises(KeyboardInterrupt):
        list(swept(torn, stop_after=5))
    told = torn.run.read_run()["executor"]
    assert told["executor"] == "ray" and told["workers"] == 2 and not told["refused"]
    known = len(by_cell(torn))
    assert 5 <= known < len(by_cell(whole))
    torn.run.unlock()
    again = begun(place, "torn", executor="local")
    list(swept(again))
    assert by_cell(again) == by_cell(whole)
    again.run.unlock()


def test_where_nothing_is_left_no_cluster_is_started(place: Path) -> None:
    whole = begun(place, "local", executor="ray")
    with ready_sweep(whole, Silence()) as ready:
        assert isinstance(ready.executor, LocalExecutor)
    whole.run.unlock()


def test_an_address_is_tried_before_the_model_is_loaded(place: Path) -> None:
    with pytest.raises(InputError, match="no Ray cluster answers"):
        begun(place, "nowhere", ray_address="127.0.0.1:9")
