"""Engines of other tools for one run: their own files, or what they choose through our emitter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from plan_aimet import AIMET, aimet_mixed
from plan_autoround import SCHEME, autoround_scheme
from plan_engines import engine_file, serve
from plan_modelopt import (
    INT8,
    MIXED,
    SEARCHED,
    modelopt_clips,
    modelopt_int8,
    modelopt_mixed,
    modelopt_searched,
)
from plan_nncf import NNCF_ONNX, NNCF_OPENVINO, nncf_onnx, nncf_openvino
from plan_torch import TorchModel, calibration, quiet

from qbench import judging
from qbench.judging import Candidate
from qbench.workbench import Workbench

DYNAMIC, STATIC = "quantize_dynamic", "quantize_static"
Choose = Callable[[Workbench, TorchModel], Candidate]


def ort_dynamic(work: Workbench, name: str) -> None:
    """Quantize the run's model by ``quantize_dynamic`` with its defaults."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(str(work.model.path), str(engine_file(work, name)))


def ort_static(work: Workbench, name: str) -> None:
    """Quantize the run's model by ``quantize_static`` with its defaults."""
    from onnxruntime.quantization import quantize_static

    batches = iter(calibration(work))
    wanted = [spec.name for spec in work.model.inputs]

    class Reader:
        """Gives feeds until there are none."""

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(batches, None)
            return None if batch is None else {key: batch.feeds[key] for key in wanted}

    quantize_static(str(work.model.path), str(engine_file(work, name)), Reader())


def build_peers(
    work: Workbench, torch_model: TorchModel, clips: Mapping[str, float]
) -> tuple[list[str], dict[str, str]]:
    """Build every peer's engine in the run; return their names, and why others are missing."""
    return build_each(peer_ways(work, torch_model, clips))


def peer_ways(
    work: Workbench, torch_model: TorchModel, clips: Mapping[str, float]
) -> dict[str, Callable[[], None]]:
    """Return what builds each peer's engine in the run and runs it, by the engine's name."""
    theirs: dict[str, float] = {}

    def emit(choose: Choose, found: Mapping[str, float]) -> None:
        candidate = choose(work, torch_model)
        judging.build(work, candidate.name, judging.plan_for(work, candidate, {**clips, **found}))

    def emit_scaled(choose: Choose) -> None:
        if not theirs:
            theirs.update(modelopt_clips(work, torch_model))
        emit(choose, theirs)

    # NOTE: AutoRound changes transformers when it is imported, so the others come first.
    ways: dict[str, Callable[[], None]] = {
        DYNAMIC: lambda: ort_dynamic(work, DYNAMIC),
        STATIC: lambda: ort_static(work, STATIC),
        INT8: lambda: emit_scaled(modelopt_int8),
        SEARCHED: lambda: emit_scaled(modelopt_searched),
        MIXED: lambda: emit_scaled(modelopt_mixed),
        NNCF_ONNX: lambda: nncf_onnx(work, NNCF_ONNX),
        NNCF_OPENVINO: lambda: nncf_openvino(work, NNCF_OPENVINO),
        AIMET: lambda: aimet_mixed(work, AIMET),
        SCHEME: lambda: emit(autoround_scheme, {}),
    }
    return {name: then_run(work, name, way) for name, way in ways.items()}


def then_run(work: Workbench, name: str, build: Callable[[], None]) -> Callable[[], None]:
    """Return what builds an engine and runs it on one batch: one that does not load is no row."""

    def way() -> None:
        build()
        serve(work, name).open_lane(1)(calibration(work)[0].feeds)

    return way


def build_each(ways: Mapping[str, Callable[[], None]]) -> tuple[list[str], dict[str, str]]:
    """Run each way; return the names that worked and the errors of those that did not.

    Whatever another tool raises is told in the table: one that fails does not end the others.
    """
    built, missing = [], {}
    for name, build in ways.items():
        try:
            with quiet():
                build()
        except Exception as error:  # noqa: BLE001 — foreign tools raise anything; it is told
            words = (str(error).strip() or "no words").splitlines()[0][:200]
            missing[name] = f"{type(error).__name__}: {words}"
        else:
            built.append(name)
    return built, missing
