"""qbench: which layers of a transformer may drop in precision, measured on the engine that ships.

The verbs below are imported on first use: ``import qbench`` alone is fast and loads neither torch
nor a runtime.

    import qbench

    config = qbench.load_config("configs/demo.yaml")
    run = qbench.open_run("results/demo")
    run.sweep          # a DataFrame of every cell
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qbench.config import Config, load_config
    from qbench.errors import (
        ConfigError,
        DataError,
        InputError,
        MeasurementError,
        MissingDependencyError,
        ModelError,
        PlanError,
        QbenchError,
        RunDirError,
    )
    from qbench.pipeline import (
        bench,
        build_engine,
        calibrate,
        find_layers,
        load_model,
        make_plan,
        run,
        start,
        sweep,
        verify,
    )
    from qbench.records import (
        BenchRun,
        EngineReport,
        Estimate,
        Judgement,
        Kind,
        Layer,
        Layers,
        Plan,
        PlanLayer,
        Status,
        SweepRecord,
        TensorRange,
        Verdict,
    )
    from qbench.report.run_view import open_run
    from qbench.rundir import RunDir

__version__ = "0.1.0"

__all__ = [
    # A model and its layers
    "load_model",
    "find_layers",
    # The path, in order: each verb takes the workbench that ``start`` gives
    "start",
    "calibrate",
    "sweep",
    "make_plan",
    "build_engine",
    "verify",
    "bench",
    "write_report",
    # The whole path, and looking at what it gave
    "run",
    "open_run",
    "RunDir",
    # Configuration
    "Config",
    "load_config",
    # Records
    "Kind",
    "Status",
    "Verdict",
    "Estimate",
    "Layer",
    "Layers",
    "TensorRange",
    "SweepRecord",
    "Plan",
    "PlanLayer",
    "EngineReport",
    "Judgement",
    "BenchRun",
    # Errors
    "QbenchError",
    "InputError",
    "ConfigError",
    "ModelError",
    "DataError",
    "PlanError",
    "RunDirError",
    "MissingDependencyError",
    "MeasurementError",
]

_PIPELINE = "load_model find_layers start calibrate sweep make_plan build_engine verify bench"
_MODULES = {
    "qbench.pipeline": f"{_PIPELINE} run",
    "qbench.report.page": "write_report",
    "qbench.report.run_view": "open_run",
    "qbench.rundir": "RunDir",
    "qbench.config": "Config load_config",
    "qbench.records": "Kind Status Verdict Estimate Layer Layers TensorRange SweepRecord Plan"
    " PlanLayer EngineReport Judgement BenchRun",
    "qbench.errors": "QbenchError InputError ConfigError ModelError DataError PlanError"
    " RunDirError MissingDependencyError MeasurementError",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'qbench' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
