"""One run: the folder ``results/<run-id>/``. Only it and its parts know a path in it.

A run is written by one process at a time and read by any number. ``sweep.jsonl`` is an append-only
journal; every other file is replaced as a whole.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qbench import storage
from qbench.errors import RunDirError, did_you_mean
from qbench.provenance import run_name, utc_now
from qbench.records import (
    BenchRun,
    BenchSummary,
    EngineReport,
    Judgement,
    Layer,
    Layers,
    RequestLatency,
    TensorRange,
    Unlayered,
    from_dict,
    to_dict,
)
from qbench.sweepfiles import SweepFiles
from qbench.trustfiles import TrustFiles

Histograms = Mapping[str, np.ndarray[Any, Any]]


class RunDir(SweepFiles, TrustFiles):
    """The folder of one run. ``create``, ``resume_or_create`` or ``open`` gives one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    # --- finding a run ---------------------------------------------------------------------------

    @classmethod
    def create(cls, root: str | Path, run_id: str) -> RunDir:
        """Open ``root/run_id`` for writing, making it where it is missing.

        Raises:
            RunDirError: If the path is a file, cannot be made, or another process writes there.
        """
        run = cls(Path(root) / run_id)
        try:
            with storage.clear_disk_errors(run.path):
                run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirError(
                f"cannot make the folder {run.path}: {error.strerror}; give a folder that can be "
                "written with --results (run.results)"
            ) from error
        run.lock()
        return run

    @classmethod
    def resume_or_create(
        cls, root: str | Path, run_id: str | None, source: str, fingerprint: str
    ) -> RunDir:
        """Open the run that a command belongs to.

        With ``run_id`` it is that folder. Without, it is the newest unfinished run of the same
        ``fingerprint`` that no other process writes; else a new folder named by time and model.

        Args:
            root: The folder of all runs.
            run_id: The name asked for, or ``None``.
            source: Where the model comes from, for the name of a new run.
            fingerprint: Hash of what the command was asked to do.

        Raises:
            RunDirError: As ``create``.
        """
        if run_id is not None:
            run = cls.create(root, run_id)
        else:
            run = _unfinished(Path(root), fingerprint) or _new_run(Path(root), source)
        run.write_run({"fingerprint": fingerprint, "finished": False})
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """Open an existing run for reading.

        Raises:
            RunDirError: If there is no run; near misses are named.
        """
        run = cls(Path(path))
        if run.path.is_dir():
            if any(path.is_file() for path in (run._run_path, run._journal.path, run._layers_path)):
                return run
            raise RunDirError(f"{run.path} holds no run (no run.json); give a folder of results/")
        parent = run.path.parent
        siblings = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
        near = did_you_mean(run.path.name, siblings)
        raise RunDirError(f"no such run folder: {run.path}{near}")

    # --- run.json: what ran, on what, when --------------------------------------------------------

    def write_run(self, facts: Mapping[str, Any]) -> None:
        """Add facts to ``run.json``; a key that is there already is replaced.

        Raises:
            InputError: If the disk is full.
        """
        begun = {"created_at": utc_now().isoformat()}
        known = self.read_run() if self._run_path.is_file() else begun
        storage.write_json(self._run_path, {**known, **to_dict(facts)})

    def read_run(self) -> dict[str, Any]:
        """Return the facts of ``run.json``.

        Raises:
            RunDirError: If it is missing, damaged, or of another version.
        """
        return storage.read_json(self._run_path, "qbench run")

    def finish(self) -> None:
        """Mark the run as finished: the same command then begins a new one."""
        self.write_run({"finished": True, "finished_at": utc_now().isoformat()})

    # --- layers and ranges -----------------------------------------------------------------------

    def write_layers(self, layers: Layers) -> None:
        """Write every layer, and every node that is in none."""
        lines: list[dict[str, Any]] = [{"layer": to_dict(layer)} for layer in layers.layers]
        lines += [{"unlayered": to_dict(node)} for node in layers.unlayered]
        storage.write_lines(self._layers_path, {"file": "layers"}, lines)

    def read_layers(self) -> Layers:
        """Return what ``write_layers`` wrote.

        Raises:
            RunDirError: If it is missing, damaged, or of another version.
        """
        _, lines = storage.read_lines(self._layers_path, "qbench layers")
        return Layers(
            layers=tuple(from_dict(Layer, line["layer"]) for line in lines if "layer" in line),
            unlayered=tuple(
                from_dict(Unlayered, line["unlayered"]) for line in lines if "unlayered" in line
            ),
        )

    def write_ranges(self, ranges: Iterable[TensorRange], histograms: Histograms) -> None:
        """Write the ranges, and the histogram of each tensor (any array a name)."""
        storage.write_arrays(self._histograms_path, histograms)
        lines = (to_dict(range_) for range_ in ranges)
        storage.write_lines(self._ranges_path, {"file": "ranges"}, lines)

    def read_ranges(self) -> tuple[TensorRange, ...]:
        """Return the ranges that calibration found.

        Raises:
            RunDirError: If they are missing, damaged, or of another version.
        """
        _, lines = storage.read_lines(self._ranges_path, "qbench calibrate")
        return tuple(from_dict(TensorRange, line) for line in lines)

    def read_histograms(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the histograms that calibration found.

        Raises:
            RunDirError: If they are missing, damaged, or of another version.
        """
        return storage.read_arrays(self._histograms_path, "qbench calibrate")

    # --- engines and what was measured on them ----------------------------------------------------

    def write_engines(self, reports: Iterable[EngineReport]) -> None:
        """Write the report of every engine built."""
        storage.write_json(self._engines_path, {"engines": [to_dict(r) for r in reports]})

    def read_engines(self) -> tuple[EngineReport, ...]:
        """Return the report of every engine built.

        Raises:
            RunDirError: If they are missing, damaged, or of another version.
        """
        content = storage.read_json(self._engines_path, "qbench build")
        return tuple(from_dict(EngineReport, item) for item in content["engines"])

    def known_engines(self) -> tuple[EngineReport, ...]:
        """Return the report of every engine built so far; none where nothing was built."""
        return self.read_engines() if self._engines_path.is_file() else ()

    def write_front(self, proposals: Iterable[Mapping[str, Any]]) -> None:
        """Write the proposals of the planner, one mapping each."""
        self._update(self._front_path, {"front": [to_dict(p) for p in proposals]})

    def read_front(self) -> list[dict[str, Any]]:
        """Return the proposals of the planner.

        Raises:
            RunDirError: If they are missing, damaged, or of another version.
        """
        front: list[dict[str, Any]] = storage.read_json(self._front_path, "qbench plan").get(
            "front", []
        )
        return front

    def write_prices(self, prices: Iterable[Mapping[str, Any]]) -> None:
        """Write what formats cost, by kind, shape and source, one mapping each."""
        self._update(self._front_path, {"prices": [to_dict(p) for p in prices]})

    def known_prices(self) -> list[dict[str, Any]]:
        """Return what formats cost; none where nothing was profiled."""
        if not self._front_path.is_file():
            return []
        prices: list[dict[str, Any]] = storage.read_json(self._front_path, "qbench plan").get(
            "prices", []
        )
        return prices

    def known_front(self) -> list[dict[str, Any]]:
        """Return the proposals of the planner; none where nothing was planned."""
        return self.read_front() if self._front_path.is_file() else []

    def write_judgements(self, split: str, judgements: Sequence[Judgement]) -> None:
        """Write what engines gave on a split (``sweep`` or ``verification``)."""
        self._update(self._judged_path(split), {"judgements": [to_dict(j) for j in judgements]})

    def read_judgements(self, split: str) -> tuple[Judgement, ...]:
        """Return what engines gave on a split.

        Raises:
            RunDirError: If they are missing, damaged, or of another version.
        """
        made_by = "qbench plan" if split == "sweep" else "qbench verify"
        content = storage.read_json(self._judged_path(split), made_by)
        return tuple(from_dict(Judgement, item) for item in content.get("judgements", []))

    def known_judgements(self, split: str) -> tuple[Judgement, ...]:
        """Return what engines gave on a split; none where nothing was judged."""
        return self.read_judgements(split) if self._judged_path(split).is_file() else ()

    def write_bench(self, bench: BenchRun) -> None:
        """Write a benchmark: conditions and summaries first, then one line a request."""
        header = {
            "file": "bench",
            "conditions": to_dict(bench.conditions),
            "summaries": [to_dict(summary) for summary in bench.summaries],
        }
        storage.write_lines(self._bench_path, header, (to_dict(x) for x in bench.latencies))

    def read_bench(self) -> BenchRun:
        """Return the benchmark with every raw latency.

        Raises:
            RunDirError: If it is missing, damaged, or of another version.
        """
        header, lines = storage.read_lines(self._bench_path, "qbench bench")
        return BenchRun(
            conditions=header["conditions"],
            latencies=tuple(from_dict(RequestLatency, line) for line in lines),
            summaries=tuple(from_dict(BenchSummary, item) for item in header["summaries"]),
        )

    # --- paths -----------------------------------------------------------------------------------

    @property
    def plan_path(self) -> Path:
        """The plan, a YAML file that may be edited by hand."""
        return self.path / "plan.yaml"

    @property
    def report_path(self) -> Path:
        """The page that tells the run."""
        return self.path / "report.html"

    @property
    def figures_dir(self) -> Path:
        """The folder of figures as files; it may not exist yet."""
        return self.path / "figures"

    @property
    def model_dir(self) -> Path:
        """The folder of the exported model; it may not exist yet."""
        return self.path / "model"

    def engine_dir(self, name: str) -> Path:
        """Return the folder of one engine; it may not exist yet."""
        return self.path / "engine" / name

    def _judged_path(self, split: str) -> Path:
        return self._front_path if split == "sweep" else self.path / f"{split}.json"

    def _update(self, path: Path, content: Mapping[str, Any]) -> None:
        known = storage.read_json(path, "qbench run") if path.is_file() else {}
        storage.write_json(path, {**known, **content})

    @property
    def _run_path(self) -> Path:
        return self.path / "run.json"

    @property
    def _layers_path(self) -> Path:
        return self.path / "layers.jsonl"

    @property
    def _ranges_path(self) -> Path:
        return self.path / "ranges.jsonl"

    @property
    def _histograms_path(self) -> Path:
        return self.path / "histograms.npz"

    @property
    def _engines_path(self) -> Path:
        return self.path / "engines.json"

    @property
    def _front_path(self) -> Path:
        return self.path / "front.json"

    @property
    def _bench_path(self) -> Path:
        return self.path / "bench.jsonl"


def _new_run(root: Path, source: str) -> RunDir:
    """Make a folder named by time and model, ``20260131-142507-all-minilm-l6-v2``."""
    stem = run_name(source, utc_now())
    for number in itertools.count(1):
        name = stem if number == 1 else f"{stem}-{number}"
        if not (root / name).exists():
            with contextlib.suppress(FileExistsError):  # another process was a moment faster
                root.mkdir(parents=True, exist_ok=True)
                (root / name).mkdir()
                break
    return RunDir.create(root, name)


def _unfinished(root: Path, fingerprint: str) -> RunDir | None:
    for path in sorted(root.glob("*/run.json"), key=os.path.getmtime, reverse=True):
        run = RunDir(path.parent)
        with contextlib.suppress(RunDirError):
            facts = run.read_run()
            if facts.get("fingerprint") == fingerprint and not facts.get("finished"):
                run.lock()
                return run
    return None
