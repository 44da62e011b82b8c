"""What a user may serve or export: a run, the plan in it, an engine's folder, or an ONNX file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qbench.backends import BACKENDS, Backend, backend_named
from qbench.config import make_config
from qbench.errors import InputError, ModelError, PlanError, RunDirError, unknown_name
from qbench.graph.reading import read_onnx
from qbench.judging import PLAN, REFERENCE
from qbench.planning.planfile import plan_sha256, read_plan
from qbench.rundir import RunDir
from qbench.runtime.ort import Session, SessionSettings, SharedSessions, open_session, settings_for
from qbench.serving.bench import Engine
from qbench.tasks import Tokenizer
from qbench.tasks.tokens import CallableTokenizer, HuggingFaceTokenizer, JsonTokenizer
from qbench.workbench import Workbench

_ENGINE_FILES = ("engine.onnx", "model.onnx")
_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Servable:
    """An engine, and what its run tells of it.

    Attributes:
        name: A name for it: letters, digits, ``.``, ``_`` and ``-``.
        path: The ONNX file.
        backend: The backend that it is for.
        settings: Session options.
        run: The run that it belongs to, or ``None``.
        tokenizer: Its tokenizer, where its run has one.
        longest: Longest text in tokens, where the run or the user says so.
        lengths: Tokens of the requests that the run's benchmark sent; none without one.
        facts: What its run and plan say of it, for records.
    """

    name: str
    path: Path
    backend: Backend
    settings: SessionSettings
    run: RunDir | None = None
    tokenizer: Tokenizer | None = None
    longest: int | None = None
    lengths: tuple[int, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def graph(self) -> ir.Model:
        """Return its graph, weights on the disk.

        Raises:
            ModelError: If the file cannot be read.
        """
        return read_onnx(self.path)

    def engine(self) -> Engine:
        """Return it as the batcher wants it."""

        def open_one(threads: int) -> Session:
            return open_session(self.path, replace(self.settings, threads=threads))

        session_of = SharedSessions(open_one)
        return Engine(self.name, lambda threads: session_of(threads).run, session_of)


def tokenizer_cutting_at(tokenizer: Tokenizer, longest: int) -> Tokenizer:
    """Return a tokenizer with another longest encoding, whatever it states itself."""
    if isinstance(tokenizer, JsonTokenizer):
        tokenizer.inner.enable_truncation(longest)
        return replace(tokenizer, max_length=longest)
    if isinstance(tokenizer, CallableTokenizer):
        said = {"max_length": longest} if "max_length" in tokenizer.keywords else {}
        keywords = {**tokenizer.keywords, **said}
        return replace(tokenizer, max_length=longest, keywords=keywords)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return replace(tokenizer, max_length=longest)
    return tokenizer


def find_servable(given: str, *, engine: str | None = None, backend: str | None = None) -> Servable:
    """Return what a path names.

    Args:
        given: Folder of a run, its ``plan.yaml``, folder of an engine, or an ONNX file.
        engine: Engine of a run; the plan's by default, ``reference`` for the model itself.
        backend: Backend of an engine that belongs to no run; ``ort-cpu`` by default.

    Raises:
        RunDirError: If the run has no such engine, or its plan was changed since it was built.
        ModelError: If there is nothing to serve.
        PlanError: If a plan lies in no run.
    """
    path = Path(given)
    if path.is_dir() and (path / "run.json").is_file():
        return _of_run(path, engine)
    if path.suffix.lower() in (".yaml", ".yml"):
        return _of_plan(path, engine)
    file = _engine_file(path)
    inside = file.parent.parent
    if inside.name == "engine" and (inside.parent / "run.json").is_file():
        return _of_run(inside.parent, engine or file.parent.name)
    if engine is not None:
        raise ModelError(f"--engine names an engine of a run, and {given!r} is no run")
    stem = file.parent.name if file.name in _ENGINE_FILES else file.stem
    target = backend_named(backend) if backend is not None else BACKENDS["ort-cpu"]
    return Servable(_plain(stem), file, target, settings_for(target))


def _engine_file(path: Path) -> Path:
    """Return the ONNX file that a path names, or that lies in its folder."""
    if path.is_file():
        return path
    if not path.exists():
        raise ModelError(
            f"{str(path)!r} does not exist; give the folder of a run, its plan.yaml, the folder of "
            "an engine, or an ONNX file"
        )
    for name in _ENGINE_FILES:
        if (path / name).is_file():
            return path / name
    found = sorted(path.glob("*.onnx"))
    if not found and (path / "config.json").is_file():
        raise ModelError(
            f"{str(path)!r} is a model, and no engine of one yet: make a run of it (qbench sweep "
            f"{path} …, then plan and build), and give the folder of the run; --engine reference "
            "is the model as it is"
        )
    if len(found) != 1:
        told = ", ".join(file.name for file in found) or "none"
        raise ModelError(f"{str(path)!r} must hold one ONNX file, and holds {told}; name the file")
    return found[0]


def _of_plan(path: Path, engine: str | None) -> Servable:
    if not path.is_file():
        raise PlanError(f"plan {str(path)!r} does not exist")
    if not (path.parent / "run.json").is_file():
        raise PlanError(
            f"{str(path)!r} lies in no run; build its engine (qbench build RUN --plan {path} --out "
            "DIR) and give that folder"
        )
    return _of_run(path.parent, engine, path)


def _of_run(folder: Path, engine: str | None, plan_path: Path | None = None) -> Servable:
    run = RunDir.open(folder)
    facts = run.read_run()
    said = facts.get("config")
    if not said:
        raise RunDirError(f"{folder} tells no configuration; it was not made by qbench run")
    work = Workbench(make_config(said, None, origin=f"configuration of {folder}"), run)
    name = engine or PLAN
    if name == work.backend.high_precision and not run.engine_dir(name).is_dir():
        name = REFERENCE
    path = _path_in(run, name)
    tokenizer = _tokenizer_of(work)
    plan: Mapping[str, Any] = {}
    if name == PLAN:
        plan = {"plan_sha256": _check_plan(run, plan_path or run.plan_path, facts)}
    return Servable(
        _plain(folder.resolve().name if name == PLAN else f"{folder.resolve().name}-{name}"),
        path,
        work.backend,
        work.settings,
        run,
        tokenizer,
        work.config.model.max_length if tokenizer is None else tokenizer.max_length,
        _lengths_of(run),
        {"run": str(folder), "engine": name, **plan},
    )


def _path_in(run: RunDir, name: str) -> Path:
    path = (
        run.model_dir / "model.onnx" if name == REFERENCE else run.engine_dir(name) / "engine.onnx"
    )
    if path.is_file():
        return path
    known = [report.name for report in run.known_engines()]
    if name == PLAN:
        raise RunDirError(f"{run.path} has no engine of its plan; qbench build {run.path} makes it")
    raise RunDirError(unknown_name("engine", name, [*known, REFERENCE]))


def _check_plan(run: RunDir, path: Path, facts: Mapping[str, Any]) -> str:
    """Return the hash of a run's plan; refuse one that the engine was not built from."""
    if not path.is_file():
        raise RunDirError(f"{run.path} has no plan.yaml; qbench plan {run.path} makes it")
    found = plan_sha256(read_plan(path))
    if facts.get("built_plan_sha256") != found:
        raise RunDirError(
            f"the engine of {run.path} was not built from {path} as it is now; qbench build "
            f"{run.path} --plan {path} builds it"
        )
    return found


def _tokenizer_of(work: Workbench) -> Tokenizer | None:
    """Return the run's tokenizer; ``None`` if it cannot be had here: token ids still can."""
    with contextlib.suppress(InputError):
        return work.tokenizer
    return None


def _lengths_of(run: RunDir) -> tuple[int, ...]:
    with contextlib.suppress(RunDirError):
        return tuple(one.tokens for one in run.read_bench().latencies[:512] if one.tokens)
    return ()


def _plain(name: str) -> str:
    """Return a name as model repositories take it."""
    return _NAME.sub("-", name).strip("-.") or "model"
