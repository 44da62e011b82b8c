"""The floors of the house, and how light the front door is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import qbench

PACKAGE = Path(qbench.__file__).parent

#: Floor of each part of the package; a part imports its own floor and those below.
FLOORS = {
    **dict.fromkeys(["errors", "formats", "backends", "records", "remedies"], 0),
    **dict.fromkeys(["config", "provenance", "rundir", "statistics", "data"], 1),
    **dict.fromkeys(["storage", "journal", "lock", "validation", "yamlfile", "gate"], 1),
    **dict.fromkeys(["trustfiles", "sweepfiles", "limits"], 1),
    **dict.fromkeys(["schemas", "graph", "lowering"], 2),
    **dict.fromkeys(["runtime", "tasks"], 3),
    **dict.fromkeys(["calibration", "sensitivity", "planning", "engine", "serving"], 4),
    **dict.fromkeys(["pipeline", "planner", "baselines", "judging", "sweeping", "workbench"], 5),
    **dict.fromkeys(["raced", "progress", "executing"], 5),
    **dict.fromkeys(["budgets", "trials", "repairs", "pricing"], 5),
    **dict.fromkeys(["trust", "auditing", "remedying", "explaining", "torch_scales"], 5),
    **dict.fromkeys(
        ["sla", "remote", "servable", "hosting", "exporting", "serializing", "base"], 5
    ),
    **dict.fromkeys(["cli", "report", "testing"], 6),
}
STAGES = {part for part, floor in FLOORS.items() if floor == 4}
#: Libraries too heavy to be imported before they are needed.
HEAVY = (
    "torch",
    "transformers",
    "datasets",
    "sklearn",
    "altair",
    "vl_convert",
    "onnxruntime",
    "ray",
)
#: Modules that are nothing without such a library, and are themselves imported late.
ALLOWED = {"wrappers.py": {"torch"}}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(tree: ast.AST) -> set[tuple[str, int]]:
    """Return every module that a tree imports anywhere in it, with the line."""
    found: set[tuple[str, int]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.name, node.lineno) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            module = node.module or ""
            names = [a.name for a in node.names] if module == "qbench" else []
            found |= {(f"qbench.{name}", node.lineno) for name in names} or {(module, node.lineno)}
    return found


def test_every_part_has_a_floor() -> None:
    parts = {part_of(path) for path in modules()} - {"__init__"}
    assert parts <= set(FLOORS), f"no floor for {sorted(parts - set(FLOORS))}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path: Path) -> None:
    own = part_of(path)
    if own == "__init__":
        return
    wrong = []
    for name, line in imported(ast.parse(path.read_text(encoding="utf-8"))):
        top, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if top != "qbench" or other not in FLOORS:
            continue
        above = FLOORS[other] > FLOORS[own]
        sibling = own in STAGES and other in STAGES and other != own
        upward = own == "report" and other == "cli"
        if above or sibling or upward:
            wrong.append(f"line {line}: {own} (F{FLOORS[own]}) imports {name} (F{FLOORS[other]})")
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_libraries_are_imported_where_they_are_used(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top_level = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {name.split(".")[0] for node in top_level for name, _ in imported(node)}
    allowed = {"altair"} if part_of(path) == "report" else ALLOWED.get(path.name, set())
    assert not names & set(HEAVY) - allowed


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_stay_small(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    limit = 400
    assert len(source.splitlines()) <= limit
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert code_lines(node) <= 50, f"{node.name} has {code_lines(node)} lines"
    assert not {"utils", "helpers", "common", "manager"} & {path.stem, *path.parts}


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the length of a function, its docstring left out."""
    length = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        length -= (first.end_lineno or 0) - first.lineno + 1
    return length


def in_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["qbench", "qbench.cli.main", "qbench.rundir"])
def test_the_front_door_is_light(module: str) -> None:
    code = (
        "import sys, time\n"
        "began = time.perf_counter()\n"
        f"import {module}\n"
        "print(time.perf_counter() - began, *sorted(m for m in sys.modules if '.' not in m))\n"
    )
    fastest, loaded = 9.9, set[str]()
    for _ in range(3):  # the machine may be busy; what counts is what it can do
        seconds, *names = in_fresh_process(code).split()
        fastest, loaded = min(fastest, float(seconds)), set(names)
    assert not loaded & {*HEAVY, "pandas", "scipy", "onnx", "onnx_ir"}
    if module == "qbench":
        assert fastest < 0.3


def test_every_public_name_is_there_and_documented() -> None:
    for name in qbench.__all__:
        thing = getattr(qbench, name)
        assert thing.__doc__, name
    assert set(qbench.__all__) <= set(dir(qbench))
    assert len(set(qbench.__all__)) == len(qbench.__all__)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'swep'"):
        _ = qbench.swep  # type: ignore[attr-defined]
