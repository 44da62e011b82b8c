"""The verdict under load, on a small run, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qbench.cli.main import run_command_line
from qbench.config import BenchConfig, make_config
from qbench.errors import ConfigError
from qbench.pipeline import build_engine, calibrate, make_plan, start, sweep, verify
from qbench.rundir import RunDir
from qbench.serving.arrivals import Process
from qbench.sla import arrivals_for, known_search, verdict_under_load
from qbench.testing.models import bert_folder, pairs_csv
from qbench.workbench import Workbench

SHORT = ["--clients", "2", "--rounds", "2", "--seconds", "0.2"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with an engine, verified and not yet benchmarked."""
    place = tmp_path_factory.mktemp("place")
    bert_folder(place / "model")
    pairs_csv(place / "pairs.csv")
    config = make_config(
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
            "sweep": {"race": False, "formats": ["int8"], "include": ["*.query"]},
            "plan": {"max_drop": "30 %", "levels": 1, "objective": "bytes"},
            "bench": {"rate_tolerance": 0.5},
            "run": {"results": str(place / "results"), "id": "small", "threads": 1},
        }
    )
    work = start(config)
    calibrate(work)
    list(sweep(work))
    make_plan(work)
    build_engine(work)
    verify(work)
    work.run.unlock()
    return work.run.path


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]):
    """Return what runs ``qbench bench`` and gives its exit code, answer and remarks."""

    def run(*words: str) -> tuple[int, dict, str]:
        code = run_command_line(["bench", *words, "--json"])
        out, told = capsys.readouterr()
        return code, json.loads(out), told

    return run


def test_a_price_without_an_sla_is_refused_before_anything_is_measured(built, ask):
    code, content, _ = ask(str(built), "--price-per-hour", "1")
    assert code == 2 and "needs --sla-ms" in json.dumps(content)


def test_a_baseline_is_saved_and_compared(built, ask, tmp_path):
    path = tmp_path / "baseline.json"
    _, content, _ = ask(str(built), *SHORT, "--save-baseline", str(path))
    assert content["against"] == [] and content["serving"] is None
    record = json.loads(path.read_text())
    assert set(record["conditions"]) >= {
        "model_sha256",
        "machine",
        "versions",
        "lengths",
        "clients",
    }
    _, content, _ = ask(str(built), *SHORT, "--against", str(path))
    assert {one["engine"] for one in content["against"]} >= {"reference", "plan"}


def test_the_verdict_names_rates_gain_and_price(built, ask):
    words = [str(built / "plan.yaml"), *SHORT, "--sla-ms", "200", "--trial-seconds", "0.3"]
    code, content, _ = ask(*words, "--price-per-hour", "0.36")
    assert code in (0, 1)
    serving = content["serving"]
    assert set(serving["rates"]) == {"reference", "plan"}
    assert all(rate > 0 for rate in serving["rates"].values())
    for name, rate in serving["rates"].items():
        assert serving["cost_per_million"][name] == pytest.approx(0.36 / (rate * 3600) * 1e6)
    gain = serving["gain"]
    assert gain["value"] == pytest.approx(serving["rates"]["plan"] / serving["rates"]["reference"])
    assert serving["no_gain"] == (gain["low"] <= 1.0)
    assert [one["name"] for one in serving["searches"]] == ["reference", "plan"]
    assert all(one["trials"] for one in serving["searches"])
    for search in serving["searches"]:
        kept = [one for one in search["trials"] if one["kept"]]
        assert all(one["p50_ms"]["value"] <= one["p95_ms"]["value"] for one in kept)
        assert all(one["p99_ms"]["low"] <= one["p99_ms"]["high"] for one in kept)
    assert RunDir.open(built).read_run()["serving"]["words"] == serving["words"]
    assert content["serving_reused"] is False
    check_reuse(ask(str(built), *SHORT, "--price-per-hour", "7.2")[1], serving)
    work = Workbench.reopen(built, {"bench.token_budget": 128})
    work.run.unlock()
    assert known_search(work) is None and verdict_under_load(work) is not None


def check_reuse(again: dict, before: dict) -> None:
    """A later call searches again only where something changed."""
    assert again["serving_reused"] is True
    assert again["serving"]["searches"] == before["searches"]
    rate = again["serving"]["rates"]["reference"]
    assert again["serving"]["cost_per_million"]["reference"] == pytest.approx(2000 / rate)


def test_a_trace_is_read_for_the_search(tmp_path):
    path = tmp_path / "arrivals.txt"
    path.write_text("0\n0.5\n0.6\n")
    arrivals = arrivals_for(BenchConfig(arrivals="trace", trace=str(path)))(10.0)
    assert (arrivals.process, arrivals.trace_s) == (Process.TRACE, (0.0, 0.5, 0.6))
    with pytest.raises(ConfigError, match="no file was named"):
        arrivals_for(BenchConfig(arrivals="trace"))
    with pytest.raises(ConfigError, match="cannot be read"):
        arrivals_for(BenchConfig(arrivals="trace", trace=str(tmp_path / "none")))
