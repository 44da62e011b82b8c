"""The model behind LitServe; in a module of its own, because its workers import it anew."""

from __future__ import annotations

from typing import Any

import litserve
import numpy as np
from serving_apps import load_ort
from starlette.responses import Response


class Embed(litserve.LitAPI):  # type: ignore[misc]
    """What a worker of LitServe drives.

    Args:
        model: ONNX file.
        threads: Threads of a worker.
        batch: Most requests of a batch.
        wait_s: Longest wait for a fuller batch.
    """

    def __init__(self, model: str, threads: int, batch: int, wait_s: float) -> None:
        super().__init__(max_batch_size=batch, batch_timeout=wait_s, api_path="/embed")
        self._file, self._threads, self._many = model, threads, batch > 1

    def setup(self, device: str) -> None:
        self._run = load_ort(self._file, self._threads)

    # NOTE: LitServe reads the annotation, and takes one in words for a parameter of the address.
    def decode_request(self, request):  # type: ignore[no-untyped-def]
        return list(request["ids"])

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, x: Any) -> Any:
        return self._run(x) if self._many else self._run([x])[0]

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return list(output)

    def encode_response(self, output: np.ndarray) -> Response:
        return Response(output.tobytes(), media_type="application/octet-stream")
