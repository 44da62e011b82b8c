"""Stands in for Triton's ONNX Runtime backend where only its Python backend is installed.

Copied to ``backends/onnxruntime/model.py`` it serves every model of the platform
``onnxruntime_onnx`` from an unchanged repository. It runs inside Triton's own interpreter. As
the real one does, it refuses tensors that the graph does not have. Requests of one batch have
equal shapes, as Triton's scheduler sees to; where a repository allows ragged batches they are
padded with zeros to the longest, as for a model with a mask.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# NOTE: the embedded interpreter does not read PYTHONPATH by itself.
sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


class TritonPythonModel:
    """What Triton's Python backend drives."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the model's session with the threads that its configuration names."""
        import onnxruntime
        import triton_python_backend_utils as triton

        config = json.loads(args["model_config"])
        said = {key: item["string_value"] for key, item in config.get("parameters", {}).items()}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(said.get("intra_op_thread_count", 0))
        options.inter_op_num_threads = int(said.get("inter_op_thread_count", 0))
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        file = config.get("default_model_filename") or "model.onnx"
        path = os.path.join(args["model_repository"], args["model_version"], file)
        self._session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        self._inputs = [one["name"] for one in config["input"]]
        self._outputs = [one["name"] for one in config["output"]]
        sides = (
            (self._inputs, self._session.get_inputs()),
            (self._outputs, self._session.get_outputs()),
        )
        for told, known in sides:
            wrong = set(told) - {one.name for one in known}
            if wrong:
                raise triton.TritonModelException(f"not in the graph: {sorted(wrong)}")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run the requests that Triton put into one batch together."""
        import numpy as np
        import triton_python_backend_utils as triton

        feeds, rows = {}, [0]
        for name in self._inputs:
            tensors = [triton.get_input_tensor_by_name(one, name) for one in requests]
            # NOTE: with NumPy 2 the backend's own conversions give empty arrays; DLPack does not.
            arrays = [np.from_dlpack(tensor) for tensor in tensors]
            feeds[name] = _joined(arrays)
            rows = [len(array) for array in arrays]
        outputs = self._session.run(self._outputs, feeds)
        ends = np.cumsum(rows)
        answers = []
        for begin, end in zip(ends - rows, ends, strict=True):
            tensors = [
                triton.Tensor.from_dlpack(name, np.ascontiguousarray(array[begin:end]))
                for name, array in zip(self._outputs, outputs, strict=True)
            ]
            answers.append(triton.InferenceResponse(tensors))
        return answers


def _joined(arrays: list[Any]) -> Any:
    """Return arrays [rows, …] of a batch as one; those of different shape are padded with zeros."""
    import numpy as np

    shape = np.max([array.shape[1:] for array in arrays], axis=0)
    if all(array.shape[1:] == tuple(shape) for array in arrays):
        return np.concatenate(arrays)
    joined = np.zeros((sum(map(len, arrays)), *shape), arrays[0].dtype)
    row = 0
    for array in arrays:
        joined[(slice(row, row + len(array)), *map(slice, array.shape[1:]))] = array
        row += len(array)
    return joined
