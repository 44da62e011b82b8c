"""The base of a run: its model in the backend's high precision, that cells and plans start from."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx_ir as ir

from qbench import judging
from qbench.backends import Variant
from qbench.engine.build import file_bytes, lower_graph, write_engine
from qbench.planning.planfile import plan_sha256
from qbench.workbench import Workbench


def base_graph(work: Workbench) -> ir.Model:
    """Return the graph in the backend's high precision: what cells of the sweep change."""
    if work.backend.variant is Variant.ROUNDED:
        return work.model.ir
    return lower_graph(
        work.model.ir, work.layers, judging.plan_for(work, judging.Candidate("base", {}), {})
    )


def base_bytes(work: Workbench) -> int:
    """Return the size of the engine in the backend's high precision, that a plan is held against.

    It is the model's own where that is what the high precision is.
    """
    if work.backend.variant is Variant.ROUNDED:
        return judging.reference_report(work).bytes
    plan = judging.plan_for(work, judging.Candidate("base", {}), {})
    with tempfile.TemporaryDirectory(dir=work.run.path) as folder:
        path, _ = write_engine(work.model, work.layers, plan, plan_sha256(plan), Path(folder))
        return file_bytes(path)
