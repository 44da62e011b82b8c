from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

import qbench
from qbench.testing.runs import made_run

_NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "01_sensitivity.ipynb"


def test_no_output_is_stored() -> None:
    notebook = nbformat.read(_NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's own packages
def test_notebook_runs_on_a_made_up_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    run = made_run(tmp_path, blocks=1, n=12)
    monkeypatch.setenv("QBENCH_RUN", str(run.path))
    monkeypatch.setenv("PYTHONPATH", str(Path(qbench.__file__).parents[1]))  # the one under test
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(_NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(_NOTEBOOK.parent)}}
    ).execute()
    drawn = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/svg+xml" in output.get("data", {})
    ]
    assert len(drawn) == 10
    assert "here the plan does not dominate" in notebook.cells[-1].outputs[0].text
