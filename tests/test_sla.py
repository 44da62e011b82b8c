"""The verdict under load, on a small run, through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qbench.cli.main import run_command_line
from qbench.config import BenchConfig, make_config
from qbench.errors import ConfigError
from qbench.pipeline import build_engine, calibrate, make_plan, start, sweep, verify
from qbench.rundir import RunDir
from qbench.serving.arrivals import Arrivals, Process
from qbench.serving.rate import judge_rate
from qbench.sla import arrivals_for, known_search, trial_seconds, verdict_under_load
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
            "sweep": {"race": False, "formats": ["w8a16"], "include": ["*.query"]},
            "plan": {"max_drop": "30 %", "objective": "bytes", "keep": ["*.query=w8a16"]},
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sla-ms", "5", "--trace", "nowhere.txt"], "cannot be read"),
        (["--sla-ms", "5", "--trace", "/dev/null"], "two arrivals or more"),
        (["--sla-ms", "5", "--arrivals", "trace"], "no file was named"),
        (["--sla-ms", "x"], "a number, or none"),
        (["--sla-ms", "none", "--price-per-hour", "1"], "needs --sla-ms"),
        (["--trial-seconds", "1"], "needs --sla-ms"),
        (["--save-baseline", "/dev/null/baseline.json"], "cannot be written"),
    ],
)
def test_what_is_refused_is_told_before_anything_is_measured_and_not_kept(built, ask, words, said):
    before = RunDir.open(built).read_run()["config"]
    code, content, told = ask(str(built), *words)
    assert code == 2 and said in content["error"] and "benchmark" not in told
    assert RunDir.open(built).read_run()["config"] == before


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
    code, content, told = ask(str(built), *SHORT, "--clients", "3", "--against", str(path))
    assert code == 2 and "clients was 2 and is 3" in content["error"]
    assert "slices" not in told, "before anything is measured"


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
    pairs = serving["confirmation"]
    assert (pairs is None) == (gain["low"] <= 1.0)
    told = [] if pairs is None else zip(pairs["engine"], pairs["reference"], strict=True)
    shown = [one["kept"] - other["kept"] for one, other in told]
    assert serving["no_gain"] or (shown.count(1) >= 5 and -1 not in shown)
    assert [one["name"] for one in serving["searches"]] == ["reference", "plan"]
    assert all(one["trials"] for one in serving["searches"])
    for search in serving["searches"]:
        kept = [one for one in search["trials"] if one["kept"]]
        assert all(one["p50_ms"]["value"] <= one["p95_ms"]["value"] for one in kept)
        assert all(one["p99_ms"]["low"] <= one["p99_ms"]["value"] for one in kept)
    assert RunDir.open(built).read_run()["serving"]["words"] == serving["words"]
    assert content["serving_reused"] is False
    check_reuse(ask(str(built), *SHORT, "--price-per-hour", "7.2")[1], serving)
    work = Workbench.reopen(built, {"bench.token_budget": 128})
    work.run.unlock()
    assert known_search(work) is None and verdict_under_load(work) is not None


def test_a_search_that_is_stopped_goes_on_where_it_was(built, ask, monkeypatch):
    words = [str(built), *SHORT, "--sla-ms", "0.002", "--trial-seconds", "0.2"]
    done: list[float] = []

    def counting(rate, *rest, **how):
        done.append(rate)
        if len(done) == 5:
            raise KeyboardInterrupt
        return judge_rate(rate, *rest, **how)

    monkeypatch.setattr("qbench.sla.judge_rate", counting)
    assert ask(*words)[0] == 130
    run = RunDir.open(built)
    kept = run.read_run()["serving_search"]["trials"]
    assert sum(map(len, kept.values())) == 4
    run.write_run({"verdict": "no_gain", "verdict_words": "do not quantize: long ago"})
    _, content, told = ask(*words)
    assert "going on with a search that was stopped" in told
    serving = content["serving"]
    trials = sum(len(one["trials"]) for one in serving["searches"])
    assert len(done) == 5 + trials - 4
    before = [one["trials"][0]["p99_ms"]["value"] for one in serving["searches"]]
    assert before == [kept[name][0]["p99_ms"]["value"] for name in ("reference", "plan")]
    assert run.read_run()["serving_search"] is None
    assert serving["rates"] == {"reference": 0.0, "plan": 0.0} and serving["no_gain"]
    assert serving["words"].startswith("neither engine keeps 99% within 0.002 ms, at ")
    assert content["verdict_words"] != "do not quantize: long ago", "what verification said is back"


def test_a_trial_lasts_whole_periods_and_has_requests_to_judge_by(tmp_path):
    assert trial_seconds(Arrivals(100.0), 4.0) == 4.0
    assert trial_seconds(Arrivals(0.5), 4.0) == 20.0
    assert trial_seconds(Arrivals(100.0, Process.BURSTS), 4.0) == pytest.approx(4.4)
    trace = tuple(float(second) for second in range(1000))
    heard = Arrivals(100.0, Process.TRACE, trace_s=trace)
    assert trial_seconds(heard, 4.0) == pytest.approx(10.0)
    assert trial_seconds(heard, 0.5) == 0.5, "more than ten times as long"


def check_reuse(again: dict, before: dict) -> None:
    """A later call searches again only where something changed."""
    assert again["serving_reused"] is True
    assert again["serving"]["searches"] == before["searches"]
    rate = again["serving"]["rates"]["reference"]
    assert again["serving"]["cost_per_million"]["reference"] == pytest.approx(2000 / rate)


@pytest.fixture
def served(built: Path) -> Iterator[str]:
    """Run ``qbench serve`` on the run's engine and return the model's address."""
    pytest.importorskip("uvicorn", reason="needs the extra 'serve'")
    command = [sys.executable, "-m", "qbench.cli.main", "serve", str(built)]
    command += ["--port", "0", "--json", "--name", "mine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        events = [json.loads(process.stdout.readline()) for _ in range(2)]
        yield f"{events[0]['url']}/v2/models/mine"
        process.terminate()


def test_a_server_is_loaded_in_the_engines_place(built, served, ask):
    before = RunDir.open(built).read_run().get("serving")
    words = [str(built), *SHORT, "--sla-ms", "2000", "--trial-seconds", "0.2", "--url"]
    code, content, _ = ask(*words, served)
    server = content["server"]
    assert code == 0 and server["rate"] > 1 and server["statuses"] == {"ok": server["p50_ms"]["n"]}
    assert server["search"]["rate"] > 0 and server["search"]["trials"][0]["statuses"]["ok"] > 0
    assert RunDir.open(built).read_run().get("serving") == before, "no verdict on the run's engine"
    code, content, _ = ask(*words, served.replace("mine", "yours"))
    assert code == 2 and "answered 404" in content["error"]


def test_a_trace_is_read_for_the_search(tmp_path):
    path = tmp_path / "arrivals.txt"
    path.write_text("0\n0.5\n0.6\n")
    arrivals = arrivals_for(BenchConfig(arrivals="trace", trace=str(path)))(10.0)
    assert (arrivals.process, arrivals.trace_s) == (Process.TRACE, (0.0, 0.5, 0.6))
    with pytest.raises(ConfigError, match="no file was named"):
        arrivals_for(BenchConfig(arrivals="trace"))
    with pytest.raises(ConfigError, match="cannot be read"):
        arrivals_for(BenchConfig(arrivals="trace", trace=str(tmp_path / "none")))
