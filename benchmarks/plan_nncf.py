"""NNCF's post-training quantization of the run's model, as ONNX and for OpenVINO."""

from __future__ import annotations

import os
from typing import Any

from plan_engines import engine_file, openvino_file
from plan_torch import pieces

from qbench.gate import require
from qbench.workbench import Workbench

NNCF_ONNX, NNCF_OPENVINO = "nncf-onnx", "nncf-openvino"
_OPSET = 20


def nncf_onnx(work: Workbench, name: str) -> None:
    """Quantize the run's model as ONNX, with the settings that NNCF has for transformers.

    NOTE: ONNX Runtime 1.31 gives a QuantizeLinear that it moves past a Reshape a wrong output type
    where that is an attribute, and then refuses the graph: opset 20 has no such attribute.
    """
    nncf = _nncf()
    import onnx
    from onnx import version_converter

    graph = _quantized(nncf, onnx.load(str(work.model.path)), work)
    if next(x.version for x in graph.opset_import if not x.domain) > _OPSET:
        graph = version_converter.convert_version(graph, _OPSET)
    onnx.save(graph, str(engine_file(work, name)))


def nncf_openvino(work: Workbench, name: str) -> None:
    """Quantize the run's model as OpenVINO reads it, which then serves it."""
    nncf, openvino = _nncf(), require("openvino")
    graph = openvino.Core().read_model(str(work.model.path))
    openvino.save_model(_quantized(nncf, graph, work), str(openvino_file(work, name)))


def _quantized(nncf: Any, graph: Any, work: Workbench) -> Any:
    feeds = list(pieces(work))
    kind = nncf.ModelType.TRANSFORMER
    return nncf.quantize(graph, nncf.Dataset(feeds), model_type=kind, subset_size=len(feeds))


def _nncf() -> Any:
    os.environ.setdefault("NNCF_CI", "1")  # else it tells its makers of each use
    return require("nncf")
