"""``kill -9`` at random moments of a sweep: real processes, through the command line.

Each process is a session of its own. It runs the command line unchanged, but for a note that it
makes of every cell that it has finished, so that what a kill costs can be counted. Those that are
killed are forked from one that has imported everything already: an import is no part of a sweep,
and would be most of this test.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qbench
from qbench.graph.model import save_graph
from qbench.journal import Journal
from qbench.records import to_dict
from qbench.rundir import RunDir
from qbench.testing.graphs import tiny_encoder
from qbench.testing.models import pairs_csv

KILLS = 15  # of each kind of sweep
WORKERS = 2
PART = 0.5  # of the time of a whole sweep, that a process gets at most
#: Splits words into numbers; the same in every process.
TOKENIZER = """
import zlib
def tokenize(texts):
    return [[1 + zlib.crc32(word.encode()) % 98 for word in text.split()] for text in texts]
"""
#: Reads commands, one JSON list a line; runs each in a fork and a session of its own. Says the
#: number of its process, and how it ended.
SERVER = """
import json, os, sys
import onnxruntime, pandas, psutil, pyarrow.parquet, scipy.special, scipy.stats
import qbench.pipeline, qbench.report.run_records, qbench.report.summary
import qbench.sensitivity.executors.local as local
from qbench.cli import main as face, resume, sweep

def noting(measure, notes):
    def noted(bench, pools, layers, job):
        record = measure(bench, pools, layers, job)
        kind = "full" if job.look is None else f"look {job.look}"
        os.write(notes, f"{record.layer} {record.format} {kind}\\n".encode())
        return record
    return noted

for line in sys.stdin:
    arguments, notes, log = json.loads(line)
    if os.fork() == 0:
        os.setsid()
        print(os.getpid(), flush=True)
        for number, name in enumerate((os.devnull, os.devnull, log)):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        file = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        local.measure = noting(local.measure, file)
        os._exit(face.run_command_line(arguments))
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@dataclass(frozen=True)
class Place:
    """A folder with a model, data, and the finished sweeps that no one disturbed."""

    folder: Path
    environment: dict[str, str]

    def arguments(self, mode: str, run_id: str) -> list[str]:
        """Return the command of a sweep."""
        return [
            "sweep", "model.onnx", "--tokenizer", "tokenizer.py:tokenize", "--task", "retrieval",
            "--data", "pairs.csv", "--column", "query=question", "--column", "answer=reply",
            "--splits", "16,32,rest", "--threads", str(WORKERS),
            "--format", "int8", "--format", "w4a16", "--format", "int8_dynamic",
            f"--{mode}", "--results", "results", "--run-id", run_id,
        ]  # fmt: skip

    def run(self, run_id: str) -> RunDir:
        """Return a run, for reading."""
        return RunDir(self.folder / "results" / run_id)

    def finish(self, arguments: list[str]) -> None:
        """Run a command to its end, in a process that imports what it needs."""
        command = [sys.executable, "-m", "qbench.cli.main", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()


class Server:
    """Starts commands, and kills them."""

    def __init__(self, place: Place) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVER],
            cwd=place.folder,
            env=place.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._folder = place.folder

    def run(self, arguments: list[str], notes: str, seconds: float) -> int | None:
        """Run a command for so long; return its exit code, or ``None`` where it was killed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps([arguments, notes, "server.log"]).encode() + b"\n")
        stdin.flush()
        pid = int(stdout.readline())
        if not select.select([stdout], [], [], seconds)[0]:
            os.killpg(pid, signal.SIGKILL)
        code = int(stdout.readline())
        assert code in (0, -signal.SIGKILL), (self._folder / "server.log").read_text()
        return code if code == 0 else None

    def close(self) -> None:
        """End it."""
        self._process.communicate()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("place")
    save_graph(tiny_encoder(layers=1, hidden=16), folder / "model.onnx")
    pairs_csv(folder / "pairs.csv", rows=80)
    (folder / "tokenizer.py").write_text(TOKENIZER)
    root = str(Path(qbench.__file__).parents[1])
    return Place(folder, {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def server(place: Place) -> Iterator[Server]:
    started = Server(place)
    yield started
    started.close()


def without_times(value: Any) -> Any:
    """Return plain values without what a clock gave."""
    if isinstance(value, dict):
        timed = {"wall_s", "latency_delta_ms", "forecast", "begun_at"}
        return {key: without_times(inner) for key, inner in value.items() if key not in timed}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def result(run: RunDir) -> dict[str, Any]:
    """Return all that a finished sweep says, times aside."""
    said = run.read_run()
    return {
        "records": without_times(to_dict(list(run.read_sweep()))),
        "remedies": without_times(to_dict(list(run.read_remedies()))),
        "layers": to_dict(run.read_layers()),
        "ranges": to_dict(list(run.read_ranges())),
        "noise": without_times(to_dict(run.known_noise())),
        "restored": without_times(to_dict(run.known_restored())),
        "facts": {key: said[key] for key in ("reference", "sweep", "data", "model", "goal")},
    }


def lines_of(run: RunDir) -> list[dict[str, Any]]:
    """Return the journal's lines; it must be whole."""
    return Journal(run.path / "sweep.jsonl", "qbench sweep").read()[1] if run.has_journal else []


def known_jobs(run: RunDir) -> set[str]:
    """Return which of the noted measurements the journal holds."""
    known = set()
    for line in lines_of(run):
        name = f"{line['layer']} {line['format']}"
        looks = [key for key in line["samples"] if key.startswith("sub_pool")]
        known |= {f"{name} look {at}" for at in range(len(looks))}
        known |= {f"{name} full"} if line["effort"] == "full" else set()
    return known


def kills(place: Place, server: Server, mode: str, whole_s: float) -> Iterator[RunDir]:
    """Kill processes at random moments of a sweep until it is done; then begin another.

    A process gets at most part of the time of a whole sweep: the one after it goes on from there,
    so that all of the sweep is reached.
    """
    rng = np.random.default_rng([len(mode), 5])
    killed = 0
    for number in itertools.count():
        run, code, restarts = place.run(f"{mode}-{number}"), None, 0
        while code is None and killed < KILLS:
            again = restarts % 2 and run.has_journal
            arguments = ["resume", str(run.path)] if again else place.arguments(mode, run.path.name)
            before, notes = lines_of(run), f"{run.path.name}-{restarts}.notes"
            code = server.run(arguments, notes, rng.uniform(0, PART * whole_s))
            restarts, killed = restarts + 1, killed + (code is None)
            assert lines_of(run)[: len(before)] == before  # what was measured stays as it was
            finished = place.folder / notes
            noted = set(finished.read_text().splitlines()) if finished.exists() else set()
            lost = noted - known_jobs(run)
            full = {job for job in lost if job.endswith("full")}
            assert len(full) <= WORKERS, full
            assert len(lost) <= 8 * WORKERS + 1, lost  # looks take milliseconds
        if code is None:
            place.finish(["resume", str(run.path)])
        yield run
        if killed >= KILLS:
            return


@pytest.mark.parametrize("mode", ["no-race", "race"])
def test_a_sweep_that_is_killed_again_and_again_ends_as_if_it_was_not(
    place: Place, server: Server, mode: str
) -> None:
    whole_run = f"{mode}-whole"
    took_s = []
    for name in (whole_run, f"{mode}-again"):  # the first one also warms the machine's caches
        began = time.perf_counter()
        assert server.run(place.arguments(mode, name), f"{name}.notes", 600.0) == 0
        took_s.append(time.perf_counter() - began)
    whole, whole_s = result(place.run(whole_run)), min(took_s)
    assert result(place.run(f"{mode}-again")) == whole
    for run in kills(place, server, mode, whole_s):
        found = result(run)
        for part, said in whole.items():
            assert found[part] == said, f"{run.path.name}: {part}"
