"""What the server says of itself and its model, as Open Inference Protocol v2 clients expect it."""

from __future__ import annotations

from typing import Any

from qbench import __version__
from qbench.serving.server.contract import Contract, Tensor
from qbench.serving.server.metrics import Handled
from qbench.serving.tally import ServiceStats

VERSION = "1"
_EXTENSIONS = ["binary_tensor_data", "model_configuration", "statistics", "schedule_policy"]
_CONFIG_TYPES = {"FP16": "TYPE_FP16", "FP32": "TYPE_FP32", "FP64": "TYPE_FP64"}


def server_metadata() -> dict[str, Any]:
    """Return what the server is."""
    return {"name": "qbench", "version": __version__, "extensions": [*_EXTENSIONS, "text"]}


def model_metadata(name: str, contract: Contract) -> dict[str, Any]:
    """Return the model's inputs and outputs."""
    return {
        "name": name,
        "versions": [VERSION],
        "platform": "onnxruntime_onnx",
        "inputs": [_described(tensor) for tensor in contract.inputs],
        "outputs": [_described(tensor) for tensor in contract.outputs],
    }


def _described(tensor: Tensor) -> dict[str, Any]:
    dims = [-1 if size is None else size for size in tensor.dims]
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": [-1, *dims]}


def model_config(name: str, contract: Contract, items: int, max_wait_ms: float) -> dict[str, Any]:
    """Return the model's configuration in Triton's words."""
    return {
        "name": name,
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "max_batch_size": items,
        "input": [_configured(tensor) for tensor in contract.inputs],
        "output": [_configured(tensor) for tensor in contract.outputs],
        "dynamic_batching": {
            "max_queue_delay_microseconds": round(max_wait_ms * 1000),
            "priority_levels": 2,
            "default_priority_level": 1,
        },
        "version_policy": {"latest": {"num_versions": 1}},
    }


def _configured(tensor: Tensor) -> dict[str, Any]:
    kind = _CONFIG_TYPES.get(tensor.datatype, f"TYPE_{tensor.datatype}")
    dims = [-1 if size is None else size for size in tensor.dims]
    return {"name": tensor.name, "data_type": kind, "dims": dims}


def statistics(name: str, stats: ServiceStats, handled: Handled) -> dict[str, Any]:
    """Return what the model did, in the words of Triton's statistics.

    Triton counts requests, and rows apart; the service times rows. Times are of the rows, as many
    as there were requests: their mean is that of a row.
    """
    rows = stats.latency.count
    share = handled.answered / rows if rows else 0.0
    stage_ns = {stage: seconds * 1e9 for stage, seconds in stats.stage_s.items()}

    def part(ns: float) -> dict[str, int]:
        return {"count": handled.answered, "ns": round(ns * share)}

    return {
        "model_stats": [
            {
                "name": name,
                "version": VERSION,
                "last_inference": round(handled.last_s * 1e3),
                "inference_count": rows,
                "execution_count": round(sum(stats.batch_sizes.values())),
                "inference_stats": {
                    "success": part(stats.latency.total_s * 1e9),
                    "fail": {"count": handled.failed, "ns": 0},
                    "queue": part(stage_ns["queue"]),
                    "compute_input": part(stage_ns["preprocess"] + stage_ns["formation"]),
                    "compute_infer": part(stage_ns["inference"]),
                    "compute_output": part(stage_ns["postprocess"]),
                    "cache_hit": {"count": 0, "ns": 0},
                    "cache_miss": {"count": 0, "ns": 0},
                },
                "batch_stats": [],
                "memory_usage": [],
                "response_stats": {},
            }
        ]
    }
