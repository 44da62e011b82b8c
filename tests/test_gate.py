from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qbench.errors import MissingDependencyError
from qbench.gate import check_runtime, is_installed, require


def test_a_missing_optional_package_is_named_with_the_command_that_adds_it() -> None:
    with pytest.raises(MissingDependencyError, match="pip install no_such_module_here"):
        require("no_such_module_here")
    assert require("json").dumps([]) == "[]"


def test_an_import_that_fails_inside_a_present_package_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_there.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        require("half_there")


def test_this_environment_has_one_runtime() -> None:
    assert check_runtime() in ("onnxruntime", "onnxruntime-gpu")
    assert is_installed("numpy") and not is_installed("no-such-distribution")


def pretend_installed(folder: Path, *names: str) -> dict[str, str]:
    """Return an environment in which packages look installed, as pip leaves them."""
    for name in names:
        info = folder / f"{name.replace('-', '_')}-1.31.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.31.1\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["layers", "x.onnx"]])
def test_two_runtimes_at_once_stop_every_command(tmp_path: Path, arguments: list[str]) -> None:
    environment = pretend_installed(tmp_path, "onnxruntime", "onnxruntime-gpu")
    done = subprocess.run(
        [sys.executable, "-m", "qbench.cli.main", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    told = " ".join((done.stdout + done.stderr).split())
    assert "onnxruntime and onnxruntime-gpu are both installed" in told
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in told
    assert "Traceback" not in told


def test_no_runtime_names_the_extras() -> None:
    code = (
        "import importlib.metadata as m, sys\n"
        "from qbench import gate\n"
        "gate.RUNTIMES = ('no-such-runtime', 'nor-this-one')\n"
        "try: gate.check_runtime()\n"
        "except gate.MissingDependencyError as error: print(error)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert 'pip install "qbench[cpu]"' in told and 'pip install "qbench[gpu]"' in told
