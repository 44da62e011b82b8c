"""What the server says of itself and its model, as Open Inference Protocol v2 clients expect it."""

from __future__ import annotations

import time
from typing import Any

from qbench import __version__
from qbench.serving.server.contract import Contract, Tensor
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


def statistics(name: str, stats: ServiceStats) -> dict[str, Any]:
    """Return what the model did, in the words of Triton's statistics."""
    answered = stats.latency.count
    failed = sum(stats.counts.get(what, 0) for what in ("failed", "hung", "shed", "closed"))
    stage_ns = {stage: round(seconds * 1e9) for stage, seconds in stats.stage_s.items()}
    batches = {size: count for size, count in stats.batch_sizes.items() if count}

    def part(ns: int, count: int = answered) -> dict[str, int]:
        return {"count": count, "ns": ns}

    return {
        "model_stats": [
            {
                "name": name,
                "version": VERSION,
                "last_inference": round(time.time() * 1e3) if answered else 0,
                "inference_count": answered,
                "execution_count": round(sum(batches.values())),
                "inference_stats": {
                    "success": part(round(stats.latency.total_s * 1e9)),
                    "fail": part(0, failed),
                    "queue": part(stage_ns["queue"]),
                    "compute_input": part(stage_ns["preprocess"] + stage_ns["formation"]),
                    "compute_infer": part(stage_ns["inference"]),
                    "compute_output": part(stage_ns["postprocess"]),
                    "cache_hit": part(0, 0),
                    "cache_miss": part(0, 0),
                },
                "batch_stats": [
                    {"batch_size": size, "count": round(count)}
                    for size, count in sorted(batches.items())
                ],
                "memory_usage": [],
                "response_stats": {},
            }
        ]
    }
