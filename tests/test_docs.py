"""Documents are tested: their commands, links, file tree and code."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import click
import pytest

import qbench
from qbench.cli.main import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BY_NAME = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def code_lines(text: str) -> list[str]:
    """Return the lines of indented and fenced code, without comments and prompts."""
    fenced = [
        line for block in re.findall(r"```\w*\n(.*?)```", text, re.S) for line in block.splitlines()
    ]
    indented = [line for line in text.splitlines() if line.startswith("    ")]
    return [line.split("  #")[0].strip().removeprefix("$ ") for line in fenced + indented]


def inline_commands(text: str) -> list[str]:
    return [span for span in re.findall(r"`([^`\n]+)`", text) if "…" not in span]


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@BY_NAME
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.read_text(encoding="utf-8")), target


@BY_NAME
def test_commands_and_their_options_exist(page: Path) -> None:
    if page.name == "cli.md":
        return  # compared whole below
    text = page.read_text(encoding="utf-8")
    for line in [*code_lines(text), *inline_commands(text)]:
        words = shlex.split(line) if line.startswith("qbench ") else []
        if len(words) < 2 or words[1].startswith("-"):
            continue
        context = click.Context(cli, info_name="qbench")
        command = cli.get_command(context, words[1])
        assert command is not None, line
        known = {name for p in command.params for name in p.opts} | {"--help", "-h"}
        given = {word.split("=")[0] for word in words[2:] if word.startswith("-")}
        assert given <= known, line
        for word in words[2:]:
            if word.startswith("configs/"):
                assert (ROOT / word).is_file(), line


@BY_NAME
def test_make_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for line in [*code_lines(text), *inline_commands(text)]:
        words = line.split()
        if words[:1] == ["make"] and len(words) > 1:
            assert words[1] in targets, line


def test_the_tree_of_the_readme_is_the_tree() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.split("## What is where")[1].split("```")[1]
    shown: set[Path] = set()
    folder = ROOT
    for line in block.strip("\n").splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name
        path = folder / name if line.startswith(" ") else folder
        assert path.exists(), f"{path} is shown and does not exist"
        assert name.endswith("/") == path.is_dir(), name
        shown.add(path)
    hidden = {"__pycache__", "schemas"}
    folders = {p for p in (ROOT / "qbench").iterdir() if p.is_dir() and p.name not in hidden}
    assert folders <= shown, f"not shown: {sorted(p.name for p in folders - shown)}"


def test_python_in_the_readme_uses_names_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")
        for name in re.findall(r"qbench\.(\w+)", block):
            assert name in qbench.__all__, name


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    spec = importlib.util.spec_from_file_location("make_cli", ROOT / "docs" / "make_cli.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == module.render(), "run `make docs`"


def test_every_decision_is_listed() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs" / "decisions").glob("[0-9]*.md"):
        assert page.name in index


def test_the_changelog_has_the_version() -> None:
    assert f"## {qbench.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_pins_are_exact_and_hold_every_requirement() -> None:
    import tomllib

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    assert not any("+" in version for version in pins.values())
    ours = {"nvidia-modelopt", "nvidia-ml-py"}  # all others belong to a torch for CUDA
    assert not any(name.startswith("nvidia") for name in names - ours)
    assert pins["onnxruntime"] == pins["onnxruntime-gpu"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    for requirement in wanted:
        name = re.split(r"[<>=!~\[; ]", requirement)[0]
        assert re.sub(r"[-_.]+", "-", name).lower() in names, requirement
